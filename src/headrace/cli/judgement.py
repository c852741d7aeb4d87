"""Which queue is in trouble, how badly, and the one sentence that says so. Numbers in, words out.

`server/dashboard/health.js` judges by the same rules: change both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace import notation
from headrace.commands.dashboard import LONG_WAIT_MS

if TYPE_CHECKING:
    from headrace.commands.dashboard import HistoryView, Overview, QueueRow, QueueSeries
    from headrace.commands.monitoring import ServerStats

RECENT_MS: Final = 60_000
FEWEST_FAILURES: Final = 3
GRAVITY: Final = {"failing": 5, "stuck": 4, "behind": 3, "late": 2, "paused": 1, "": 0}


class Judged(NamedTuple):
    """A queue with its rates and what is wrong with it, if anything."""

    row: QueueRow
    in_per_sec: float
    out_per_sec: float
    failed_per_sec: float
    depths: list[float]
    trouble: str

    @property
    def is_late(self) -> bool:
        return not self.row.paused and self.row.waiting > 0 and (self.row.oldest_waiting_ms or 0) > LONG_WAIT_MS

    @property
    def oldest_ms(self) -> float | None:
        return self.row.oldest_waiting_ms if self.row.waiting else None

    @property
    def badness(self) -> tuple[float, ...]:
        return (GRAVITY[self.trouble], self.oldest_ms or 0, self.row.failed_today, self.row.waiting)


class Sentence(NamedTuple):
    glyph: str
    text: str
    style: str


def judge(row: QueueRow, history: HistoryView) -> Judged:
    own = history.queues.get(row.name)
    pushed, out = row.in_per_sec, row.out_per_sec
    # A minute is steadier than the seconds that the row knows, once there is one.
    if own is not None and len(own.pushed) * history.step >= RECENT_MS:
        pushed, out = _recent(own.pushed, history.step), _recent(own.out, history.step)
    failed = _recent(own.failed, history.step) if own is not None else 0.0
    judged = Judged(row, pushed, out, failed, own.waiting if own is not None else [], "")
    return judged._replace(trouble=_trouble(judged, own is not None and _is_failing(own, history.step)))


def _newest(values: Sequence[float], step: float) -> Sequence[float]:
    return values[-max(1, round(RECENT_MS / step)) :]


def _recent(values: Sequence[float], step: float) -> float:
    newest = _newest(values, step)
    return sum(newest) / len(newest) if newest else 0.0


def _is_failing(own: QueueSeries, step: float) -> bool:
    """Not one job that fails now and then: as many as are completed, or more."""
    failed = sum(_newest(own.failed, step))
    return round(failed * step / 1000) >= FEWEST_FAILURES and failed >= sum(_newest(own.out, step))


def _trouble(queue: Judged, is_failing: bool) -> str:
    row = queue.row
    if row.paused:
        return "paused" if row.waiting else ""
    if is_failing:
        return "failing"
    if not queue.is_late:
        return ""
    if not row.active and not queue.out_per_sec:
        return "stuck"
    return "behind" if queue.in_per_sec > queue.out_per_sec else "late"


def worst_first(queues: list[Judged]) -> list[Judged]:
    return sorted(queues, key=lambda queue: (*(-part for part in queue.badness), queue.row.name))


def sentence(queues: list[Judged], overview: Overview, unit: str) -> Sentence:
    """One sentence of state, and a second one for the rest. `queues` come with the worst first."""
    storage = overview.storage
    if storage.disk_full or storage.error:
        reason = notation.one_line(storage.error or "The disk is full").rstrip(".")
        return Sentence("✕", f"Nothing is accepted. {reason}.", "bold red")
    if not queues or not queues[0].trouble:
        return Sentence("✓", f"{_reassurance(queues)} {_summary(overview.stats)}", "green")
    worst = queues[0]
    more = sum(bool(queue.trouble) for queue in queues) - 1
    rest = f" {more} more {'queue needs' if more == 1 else 'queues need'} a look." if more else ""
    style = {"paused": "bright_black", "late": "yellow"}.get(worst.trouble, "bold red")
    return Sentence("‖" if worst.trouble == "paused" else "!", f"{_told(worst, unit)}{rest}", style)


def _told(queue: Judged, unit: str) -> str:
    row, oldest = queue.row, notation.duration(queue.oldest_ms)
    rates = f"{notation.rate(queue.in_per_sec, unit)}/{unit} in, {notation.rate(queue.out_per_sec, unit)}/{unit} out"
    failed = notation.rate(queue.failed_per_sec, unit)
    completed = notation.rate(queue.out_per_sec, unit)
    late = "is late but catching up" if queue.out_per_sec > queue.in_per_sec else "is late"
    return {
        "failing": f"{row.name} is failing: {failed}/{unit} failed, {completed}/{unit} completed.",
        "stuck": f"{row.name} is stuck: {row.waiting:,} waiting, the oldest for {oldest}, and no worker takes them.",
        "behind": f"{row.name} is falling behind: oldest job waits {oldest}, {rates}.",
        "late": f"{row.name} {late}: oldest job waits {oldest}, {rates}.",
        "paused": f"{row.name} is paused with {row.waiting:,} waiting.",
    }[queue.trouble]


def _reassurance(queues: list[Judged]) -> str:
    """Not every backend knows how long jobs have waited."""
    is_blind = any(queue.row.waiting and not queue.row.paused and queue.oldest_ms is None for queue in queues)
    return "No queue is known to be late." if is_blind else "All queues are keeping up."


def _summary(stats: ServerStats) -> str:
    waiting, active, delayed = (notation.count(count) for count in (stats.waiting, stats.active, stats.delayed))
    return f"{waiting} waiting, {active} running, {delayed} delayed."
