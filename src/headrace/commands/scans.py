"""Reading very many jobs: pages by the number of the job, which never changes.

Other lists page by offset, which skips and repeats jobs while they move. Here `next` of a page is `after` of the next
one, and a range of numbers (`after`, `until`) can be read by several readers side by side. `newest` tells how far the
numbers go, `oldest` after which number they begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET, Meta, Raw, UnsetType

from headrace.backends.base import DeadLetter, JobScan, ResultRow
from headrace.commands._base import Command, Flag, Reply, command
from headrace.commands.eventlog import Seq
from headrace.model import MAX_SAFE_INTEGER, QueueName, ShortText, optional

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


class Scan(Command[Any], tag=False, kw_only=True):
    """What all scans are told."""

    queue: QueueName | None = None
    after: Seq = 0
    until: Seq = MAX_SAFE_INTEGER
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000

    def wanted(self, states: tuple[str, ...] = ()) -> JobScan:
        return JobScan(self.queue, states, self.after, self.until, self.limit)


class Scanned(Reply):
    """`next` is left out on the last page."""

    newest: int
    oldest: int
    next: int | UnsetType = UNSET


class ScannedJobs(Scanned, kw_only=True):
    jobs: list[Raw]


@command(ScannedJobs, category="Query", flags=Flag.BULK, http="GET /scan/jobs")
class ScanJobs(Scan, tag_field="cmd", tag="ScanJobs"):
    """Jobs of one queue or of all in the order in which they were pushed, by number."""

    state: ShortText | None = None

    async def run(self, engine: Engine, peer: Peer) -> ScannedJobs:
        page = await engine.backend.scan_jobs(self.wanted((self.state,) if self.state else ()))
        return ScannedJobs(jobs=page.rows, newest=page.newest, oldest=page.oldest, next=optional(page.next))


class ScannedResults(Scanned, kw_only=True):
    results: list[ResultRow]


@command(ScannedResults, category="Query", flags=Flag.BULK, http="GET /scan/results")
class ScanResults(Scan, tag_field="cmd", tag="ScanResults"):
    """What completed jobs returned, by the number of the job."""

    async def run(self, engine: Engine, peer: Peer) -> ScannedResults:
        page = await engine.backend.scan_results(self.wanted())
        return ScannedResults(results=page.rows, newest=page.newest, oldest=page.oldest, next=optional(page.next))


class ScannedLetters(Scanned, kw_only=True):
    entries: list[DeadLetter]


@command(ScannedLetters, category="DLQ", flags=Flag.BULK, http="GET /scan/dlq")
class ScanDeadLetters(Scan, tag_field="cmd", tag="ScanDlq"):
    """Dead letters with the history of their failure, by the number of the job."""

    async def run(self, engine: Engine, peer: Peer) -> ScannedLetters:
        page = await engine.backend.scan_dlq(self.wanted())
        return ScannedLetters(entries=page.rows, newest=page.newest, oldest=page.oldest, next=optional(page.next))
