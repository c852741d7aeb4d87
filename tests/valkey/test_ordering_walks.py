"""Ordering keys under everything that can become of their jobs, by chance: no walk may leave a key blocked.

Both kinds of workers take, end, retry and give back jobs of two keys, producers add and debounce them, somebody cancels
and revives them. Then all that is left is worked on: every job must end, and no slot may stay taken.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress

import pytest

from headrace.errors import HeadraceError
from tests.conformance.rig import Held, Rig
from tests.scale import scaled
from tests.valkey.foreign import Foreign
from tests.valkey.nodeworker import NodeWorker

OPTS = json.dumps({"attempts": 3, "backoff": {"type": "fixed", "delay": 50}})
LIMITS = {"a": {"capacity": 2000, "refill": 4000}, "b": {"rate_max": 2, "rate_duration": 300}}
STEPS = 150
ROUNDS = 300


class Walk:
    """`node` is given where Node workers take part: ours then have neither limits nor times to live, which the one that
    is played here does not know."""

    def __init__(self, seed: int, rig: Rig, foreign: Foreign, node: NodeWorker | None) -> None:
        self.chance = random.Random(seed)
        self.rig, self.foreign, self.node = rig, foreign, node
        self.mine: list[Held] = []
        self.theirs: list[tuple[str, str]] = []
        rig.wait(rig.backend._register("q"))

    def step(self) -> None:
        names = [
            "add",
            "add",
            "add",
            "debounce",
            "pull",
            "pull",
            "end",
            "end",
            "pass_time",
            "pass_time",
            "cancel",
            "revive",
        ]
        if self.node is not None:
            names += ["take_as_node", "end_as_node"]
        with suppress(HeadraceError):  # a lease may be over
            getattr(self, self.chance.choice(names))()

    def _given(self) -> dict[str, object]:
        key = self.chance.choice("ab")
        limits = {} if self.node else {**LIMITS[key], "ttl": self.chance.choice([0, 0, 0, 120])}
        concurrency = {"a": 1, "b": 2}[key]
        return {
            "ordering": key,
            "opts": OPTS,
            "concurrency": concurrency,
            "priority": self.chance.choice([0, 0, 3]),
            **limits,
        }

    def add(self) -> None:
        self.foreign.add(**self._given(), delay=self.chance.choice([0, 0, 0, 80]), more=(self.chance.choice("001"),))

    def debounce(self) -> None:
        self.foreign.dedup("d", "debounce", **self._given(), delay=80)

    def pull(self) -> None:
        self.mine += self.rig.pull(count=self.chance.choice([1, 3]), lease_ms=self.chance.choice([200, 5000]))

    def end(self) -> None:
        if not self.mine:
            return
        held = self.mine.pop(self.chance.randrange(len(self.mine)))
        match self.chance.choice(["ack", "nack", "bury", "give back"]):
            case "ack":
                self.rig.ack(held)
            case "give back":
                self.rig.move_to_wait(held.id, held.token)
            case how:
                self.rig.nack(held, unrecoverable=how == "bury")

    def take_as_node(self) -> None:
        assert self.node is not None
        taken = self.node.take()
        self.theirs += [taken] if taken else []

    def end_as_node(self) -> None:
        if not self.theirs:
            return
        assert self.node is not None
        taken = self.theirs.pop(self.chance.randrange(len(self.theirs)))
        if self.chance.random() < 0.5:
            self.node.complete(*taken, None)
        else:
            self.node.fail(*taken, "boom", self.chance.choice([None, 40]))

    def pass_time(self) -> None:
        self.rig.advance(self.chance.choice([10, 60, 130]))
        self.rig.look_after()

    def cancel(self) -> None:
        ids = self.rig.ids_in(["waiting", "delayed"])
        if ids:
            self.rig.cancel(self.chance.choice(ids))

    def revive(self) -> None:
        ids = self.rig.ids_in("failed")
        if ids:
            self.rig.retry_dlq("q", self.chance.choice(ids), None, None)

    def finish(self) -> None:
        for taken in self.theirs:
            assert self.node is not None
            self.node.complete(*taken, None)
        for _ in range(ROUNDS):
            for held in self.mine:
                with suppress(HeadraceError):
                    self.rig.ack(held)
            self.rig.advance(100)
            self.mine = self.rig.pull(count=5)
            if not self.mine and not self.unended():
                return

    def unended(self) -> dict[str, str]:
        keys = self.foreign.client.keys(self.foreign.key("job:*"))
        states = {key: self.foreign.client.hget(key, "state") for key in keys}
        return {key: state for key, state in states.items() if state not in ("completed", "failed")}


@pytest.mark.parametrize("with_node", [False, True], ids=["ours", "both"])
@pytest.mark.parametrize("seed", range(scaled(6, 60)))
def test_no_key_is_blocked_whatever_becomes_of_its_jobs(rig: Rig, foreign: Foreign, seed: int, with_node: bool) -> None:
    walk = Walk(seed, rig, foreign, NodeWorker(foreign) if with_node else None)
    for _ in range(STEPS):
        walk.step()
    walk.finish()
    assert walk.unended() == {}
    active = [foreign.client.hget(foreign.key(f"group:{key}"), "active") for key in "ab"]
    assert all(count in (None, "0") for count in active), active
    assert foreign.client.get(foreign.key("list-active")) in (None, "0")
