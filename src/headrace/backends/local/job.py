"""A job in memory. Fields above the line are stored; those below live only as long as the process.

Equal settings are one shared object and a plain job has neither links nor history, which keeps a waiting job near
half a kilobyte. `gc=False`: jobs form no cycles that are not broken by hand (`Queue.clear`), and a million of them
must not be walked by the garbage collector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.model import AttemptRecord, Burial, JobLinks, JobSettings, TimelineEntry
from headrace.states import State

if TYPE_CHECKING:
    from headrace.backends.local.index import Bucket, Queue


class History(Struct, omit_defaults=True):
    """What happened to a job beyond the ordinary; made only when it happens."""

    timeline: list[TimelineEntry] = []
    progress: float = 0
    message: str | None = None
    stacktrace: list[str] | None = None
    failures: list[AttemptRecord] = []
    burial: Burial | None = None
    pending: set[str] = set()
    """Dependencies that are not settled yet."""
    children_completed: int = 0
    failed_children: dict[str, str] = {}
    ignored_children: dict[str, str] = {}
    key_released: bool = False
    """The uniqueKey was taken away from this job while it lived."""
    key_expires: int | None = None
    successor: str | None = None
    """The job that a repeating job left behind it when it completed."""


class Lease(Struct, gc=False, frozen=True):
    """Who works on a job, and until when it is theirs. Times ending in _mono are monotonic.

    Frozen: jobs of one claim that have no tokens share it. Whoever prolongs or moves one gives the job another.
    """

    serial: int
    """The number of the claim."""
    token: str | None
    owner: str | None
    length_ms: float
    until_mono: int
    timeout_mono: int | None
    heartbeat_ms: int
    heartbeat_mono: int
    started_mono: int
    holder: dict[str, int] | None
    bucket: Bucket | None = None
    """Where on the wheel of leases the job stands."""


class Ended(Struct, gc=False):
    """A lease that is over, remembered to answer a late ACK or FAIL."""

    token: str | None
    finalized: bool
    """True: timed out, failed or completed. False: it merely ran out and nobody has taken the job since."""


class Job(Struct, gc=False, eq=False):
    seq: int
    id: str
    queue: Queue
    data: bytes | None
    name: str | None
    settings: JobSettings
    links: JobLinks | None
    state: State
    priority: int
    created: int
    run_at: int
    size: int = 0
    """Bytes of the payload, also when it is not in memory."""
    finished: int | None = None
    attempts: int = 0
    stalls: int = 0
    result: bytes | None = None
    history: History | None = None
    # ---- not stored ----
    started: int | None = None
    lease: Lease | None = None
    ended: Ended | None = None

    @property
    def heartbeat(self) -> int:
        return self.created if self.lease is None else self.lease.heartbeat_ms

    def remember(self) -> History:
        """The history, begun now if there was none: from here on the timeline is written down."""
        if self.history is None:
            self.history = History(timeline=self.beginnings())
        return self.history

    def beginnings(self) -> list[TimelineEntry]:
        """The timeline of a job to which nothing out of the ordinary has happened yet."""
        timeline = [TimelineEntry("delayed" if self.run_at > self.created else "waiting", float(self.created))]
        if self.started is not None:
            owner = self.lease.owner if self.lease is not None else None
            timeline.append(TimelineEntry("active", float(self.started), worker=owner))
        if self.finished is not None:
            timeline.append(TimelineEntry("completed", float(self.finished)))
        return timeline

    def own_links(self) -> JobLinks:
        if self.links is None:
            self.links = JobLinks()
        return self.links

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self.state.word}, queue={self.queue.name!r})"
