"""Histories to learn from: a real backend whose jobs succeed, fail, stall, are cancelled and revived, on a clock that
the test moves. What it logs is what a server would have captured."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from headrace.backends.base import FlowPush
from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.eventlog import LogLimits
from headrace.clock import ManualClock
from headrace.errors import HeadraceError
from headrace.model import FlowStatus
from tests.conformance.rig import Held, Kind, Rig, spec

START_MS = 1_793_487_600_000  # 2026-10-31 23:00 UTC: midnight and the end of a month come soon
ERRORS = (
    "TimeoutError: no answer from 10.0.0.{n} after {n} ms",
    "ValueError: '{n}' is not a number",
    "job {n} broke\nat line {n}",
    None,
)


def rig_at(folder: Path, segment_bytes: int = 20_000) -> Rig:
    """A backend that keeps its log in `folder/log`, in small segments."""
    limits = LogLimits(segment_bytes=segment_bytes, segment_ms=10**12, keep_bytes=None, cap_bytes=None)

    def make(where: Path, clock: ManualClock) -> LocalBackend:
        return LocalBackend(where / "jobs.db", clock=clock, log_root=where / "log", log_limits=limits)

    rig = Rig(Kind("history", make, lambda backend: None, is_persistent=True), folder)
    rig.clock.advance(START_MS - rig.clock.now_ms())
    return rig


def seal(rig: Rig) -> None:
    roll = rig.backend._log.roll()
    if roll is not None:
        roll.run()


class Story:
    """Random things that happen to jobs, reproducible by seed."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.held: list[Held] = []
        self.known: list[str] = []
        self.flows: list[str] = []
        self._steps: list[tuple[int, Callable[[], object]]] = [
            (30, self._push),
            (30, self._pull),
            (18, self._ack),
            (9, self._fail),
            (4, self._wait_long),
            (1, self._flow),
            (2, self._give_back),
            (2, self._cancel),
            (2, self._revive),
            (1, self._clean),
            (1, self._postpone),
            (1, self._repeat),
            (2, self._workflow),
        ]

    def go(self, steps: int) -> None:
        weights, moves = zip(*self._steps, strict=True)
        for _ in range(steps):
            self.rig.clock.advance(self.random.choice((0, 1, 20, 300, 2_000)))
            try:
                self.random.choices(moves, weights)[0]()
            except HeadraceError:
                continue  # the job had moved on: what a client would be told
            if self.rig.backend._log.due(self.rig.clock.now_ms()):
                seal(self.rig)

    def _queue(self) -> str:
        return self.random.choice(("mail", "mail", "mail", "image", "report"))

    def _push(self) -> None:
        options: dict[str, object] = {"max_attempts": self.random.choice((1, 2, 3)), "backoff": 500}
        if self.random.random() < 0.3:
            options["delay"] = self.random.choice((0, 700, 60_000))
        if self.random.random() < 0.2:
            options["priority"] = self.random.randint(1, 9)
        if self.random.random() < 0.2:
            options["custom_id"] = f"id-{self.random.randint(1, 12)}"
        if self.random.random() < 0.1:
            options["ttl"] = 30_000
        if self.random.random() < 0.2:
            options |= {"name": self.random.choice(("send", "resize")), "tags": ["a", "b"], "remove_on_complete": True}
        self.known.append(self.rig.push(self._queue(), {"n": len(self.known)}, **options))

    def _flow(self) -> None:
        children = [self.rig.push("image", {}) for _ in range(2)]
        self.known += [*children, self.rig.push("report", {}, depends_on=children)]

    def _pull(self) -> None:
        lease = self.random.choice((2_000, 30_000, 120_000))
        self.held += self.rig.pull(self._queue(), owner=f"worker-{self.random.randint(1, 3)}", lease_ms=lease)

    def _some_held(self) -> Held:
        if not self.held:
            raise HeadraceError("nobody works")
        return self.held.pop(self.random.randrange(len(self.held)))

    def _ack(self) -> None:
        self.rig.ack(self._some_held(), {"done": True} if self.random.random() < 0.5 else ...)

    def _fail(self) -> None:
        error = self.random.choice(ERRORS)
        text = None if error is None else error.format(n=self.random.randint(1, 10_000))
        self.rig.nack(self._some_held(), text, unrecoverable=self.random.random() < 0.2)

    def _wait_long(self) -> None:
        self.rig.advance(self.random.choice((5_000, 40_000, 130_000)))

    def _give_back(self) -> None:
        held = self._some_held()
        self.rig.move_to_wait(held.id, held.token)

    def _some_known(self) -> str:
        return self.random.choice(self.known)

    def _cancel(self) -> None:
        self.rig.cancel(self._some_known())

    def _revive(self) -> None:
        self.rig.retry_dlq(self._queue(), None, 2, None)

    def _repeat(self) -> None:
        self.rig.retry_completed(self._queue(), None, 1, None)

    def _postpone(self) -> None:
        held = self._some_held()
        self.rig.move_to_delayed(held.id, 800, held.token)

    def _workflow(self) -> None:
        """Begin a workflow, whose first job is to end it in time, or end one that needs that job no more."""
        if self.flows and self.random.random() < 0.5:
            flow = self.flows.pop()
            self.rig.advance_flow(flow, 1, FlowStatus.COMPLETED, (), (), None, (f"{flow}-timer",))
            return
        flow = f"flow-{len(self.known)}-{len(self.flows)}"
        timer = spec(None, flow_id=flow, custom_id=f"{flow}-timer", name="timer", delay=60_000)
        self.rig.start_flow(flow, "order", "order", (), (FlowPush("order", timer),))
        self.flows.append(flow)

    def _clean(self) -> None:
        queue = self._queue()
        match self.random.choice(("drain", "obliterate", "purge_dlq", "clean")):
            case "clean":
                self.rig.clean(queue, 1_000, "completed", 5)
            case "obliterate" if self.random.random() < 0.5:
                self.rig.obliterate(queue)
            case move:
                self.rig.drain(queue) if move == "drain" else self.rig.purge_dlq(queue)
