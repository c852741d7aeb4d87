"""A backend under test with its clock: every verb as a plain call that is committed and checked at once.

To put another backend under the suite: add its Kind to KINDS with a factory and a check of its insides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from headrace.backends.base import Ack, Demand, FamilyNode, GroupDemand
from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.slices import run_now
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.clock import ManualClock
from headrace.commands.jobs import PushEntry
from headrace.model import Event
from tests.conformance import invariants, valkeykeys
from tests.valkeyserver import redis_binary, shared_cluster, shared_server

T = TypeVar("T")
# How soon the server answers is not under test, and the failure of a chain of thousands is one script.
PATIENT = "timeout=60"


@dataclass(frozen=True)
class Kind:
    """One backend that the suite runs against."""

    name: str
    make: Callable[[Path, ManualClock], Any]
    check: Callable[[Any], None]
    is_persistent: bool
    """Whether it is a file of its own that can be opened again."""
    is_local: bool = True


def seeded() -> Callable[[], float]:
    return random.Random(7).random


def _memory(folder: Path, clock: ManualClock) -> LocalBackend:
    return LocalBackend(None, clock=clock, rng=seeded())


def _sqlite(folder: Path, clock: ManualClock) -> LocalBackend:
    return LocalBackend(folder / "jobs.db", clock=clock, rng=seeded())


def _valkey(folder: Path, clock: ManualClock) -> ValkeyBackend:
    """On a server that others have used before: its keys go, its functions stay."""
    shared_server().client().flushall()
    return ValkeyBackend(f"{shared_server().url}?prefix=t{folder.name}&{PATIENT}", clock=clock, rng=seeded())


LOCAL_KINDS = (
    Kind("memory", _memory, invariants.check, is_persistent=False),
    Kind("sqlite", _sqlite, invariants.check, is_persistent=True),
)


def _cluster(folder: Path, clock: ManualClock) -> ValkeyBackend:
    shared_cluster().flush()
    return ValkeyBackend(f"{shared_cluster().url}?prefix=t{folder.name}&{PATIENT}", clock=clock, rng=seeded())


def _redis(folder: Path, clock: ManualClock) -> ValkeyBackend:
    server = shared_server(redis_binary())
    server.client().flushall()
    return ValkeyBackend(f"{server.url}?prefix=t{folder.name}", clock=clock, rng=seeded())


REDIS = Kind("redis", _redis, valkeykeys.check, is_persistent=False, is_local=False)
CLUSTER = Kind("cluster", _cluster, lambda backend: None, is_persistent=False, is_local=False)
VALKEY = Kind("valkey", _valkey, valkeykeys.check, is_persistent=False, is_local=False)
KINDS = (*LOCAL_KINDS, VALKEY)


def pack(value: Any) -> Raw:
    return Raw(msgspec.msgpack.encode(value))


def unpack(raw: Any) -> Any:
    return msgspec.msgpack.decode(bytes(raw))


def spec(data: Any = None, **options: Any) -> PushEntry:
    """A push as the wire would make it. Lists are copied: a backend may keep what it is given."""
    fresh = {key: list(value) if isinstance(value, list) else value for key, value in options.items()}
    return PushEntry(data=pack(data), **fresh)


@dataclass
class Held:
    """One claimed job."""

    id: str
    token: str | None
    job: dict[str, Any]


class Rig:
    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.clock = ManualClock()
        self.events: list[Event] = []
        self.is_checking = True
        """Switched off where thousands of steps would each look at thousands of jobs."""
        self._last_seq = 0
        self._loop = None if kind.is_local else asyncio.new_event_loop()
        self.backend = kind.make(folder, self.clock)
        self.wait(self.backend.open())
        self.settle()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a verb, without ending the tick."""
        return run_now(work) if self._loop is None else self._loop.run_until_complete(work)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        """A verb of the backend: run to its end, committed, checked; also when it raises."""

        def call(*args: Any, **options: Any) -> Any:
            try:
                return self.wait(getattr(self.backend, verb)(*args, **options))
            finally:
                self.settle()

        return call

    def settle(self) -> None:
        """End a tick: commit, look at the events, check everything."""
        self.backend.commit()
        for event in self.backend.take_events():
            assert event.seq == self._last_seq + 1, "events must be numbered without a gap"
            self._last_seq = event.seq
            self.events.append(event)
        if self.is_checking:
            self.kind.check(self.backend)

    def take_words(self) -> list[str]:
        """What was told since the last call."""
        words, self.events = [event.event for event in self.events], []
        return words

    def reopen(self) -> None:
        """Stop and start again on the same storage."""
        self.wait(self.backend.close())
        self.backend = self.kind.make(self.folder, self.clock)
        self.wait(self.backend.open())
        self.settle()

    def close(self) -> None:
        self.wait(self.backend.close())
        if self._loop is not None:
            self._loop.close()

    def advance(self, ms: int) -> None:
        """Let time pass and do what it demands."""
        self.clock.advance(ms)
        self.sweep()

    # -- the verbs that nearly every test needs -------------------------------------------------------------

    def push(self, queue: str = "q", data: Any = None, **options: Any) -> str:
        return self.insert_one(queue, spec(data, **options))

    def push_many(self, *specs: PushEntry, queue: str = "q") -> list[str]:
        return self.insert(queue, specs)

    def push_family(self, *nodes: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
        made = [FamilyNode(job_id, queue, spec(**options)) for job_id, queue, options in nodes]
        return [unpack(raw) for raw in self.insert_family(made)]

    def pull(
        self,
        queue: str = "q",
        count: int = 1,
        *,
        owner: str | None = "w",
        lease_ms: float = 30_000,
        holder: dict[str, int] | None = None,
        group: GroupDemand | None = None,
    ) -> list[Held]:
        claims = self.claim(queue, Demand(count, owner, lease_ms, holder, group))
        jobs = [unpack(claim.job) for claim in claims]
        return [Held(job["id"], claim.token, job) for job, claim in zip(jobs, claims, strict=True)]

    def take(self, queue: str = "q", **options: Any) -> Held:
        (held,) = self.pull(queue, **options)
        return held

    def pulled_ids(self, queue: str = "q", count: int = 1000, **options: Any) -> list[str]:
        return [held.id for held in self.pull(queue, count, **options)]

    def ack(self, held: Held, result: Any = ..., remove: bool | None = None) -> list[int]:
        encoded = None if result is ... else bytes(pack(result))
        return self.complete([Ack(held.id, held.token, encoded, remove)])

    def nack(
        self,
        held: Held,
        error: str | None = "boom",
        *,
        stack: list[str] | None = None,
        unrecoverable: bool = False,
        remove: bool | None = None,
        retry_after: float | None = None,
    ) -> bool:
        return self.fail(
            held.id,
            token=held.token,
            error=error,
            stack=stack,
            unrecoverable=unrecoverable,
            remove=remove,
            retry_after=retry_after,
        )

    def run(self, queue: str = "q", result: Any = ...) -> Held:
        """Claim the next job and complete it."""
        held = self.take(queue)
        self.ack(held, result)
        return held

    def bury(self, queue: str = "q", error: str = "boom") -> Held:
        """Claim the next job and fail it for good."""
        held = self.take(queue)
        self.nack(held, error, unrecoverable=True)
        return held

    # -- looking -------------------------------------------------------------------------------------------

    def look(self, job_id: str) -> dict[str, Any]:
        return unpack(self.job(job_id))

    def states(self, *ids: str) -> list[str]:
        return [self.state(job_id) for job_id in ids]

    def ids_in(self, states: str | Sequence[str] | None, queue: str = "q", **page: Any) -> list[str]:
        wanted = [states] if isinstance(states, str) else states
        options = {"offset": 0, "limit": 100_000, "asc": True, **page}
        return [unpack(raw)["id"] for raw in self.jobs(queue, wanted, **options)]

    def count(self, queue: str = "q") -> dict[str, int]:
        """Counts of the states that have jobs; `prioritized` only where it is not 0."""
        counts = msgspec.to_builtins(self.wait(self.backend.counts(queue)))
        self.settle()
        return {name: number for name, number in counts.items() if number}
