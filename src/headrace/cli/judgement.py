"""Which queue is in trouble, how badly, and the one sentence that says so. Numbers in, words out.

`server/dashboard/health.js` judges by the same rules: change both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace import notation
from headrace.commands.dashboard import LONG_WAIT_MS

if TYPE_CHECKING:
    from headrace.commands.dashboard import HistoryView, Overview, QueueRow
    from headrace.commands.monitoring import ServerStats

RECENT_MS: Final = 60_000
GRAVITY: Final = {"stuck": 4, "behind": 3, "late": 2, "paused": 1, "": 0}


class Judged(NamedTuple):
    """A queue with its rates and what is wrong with it, if anything."""

    row: QueueRow
    in_per_sec: float
    out_per_sec: float
    depths: list[float]
    trouble: str

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
    return Judged(row, pushed, out, own.waiting if own is not None else [], _trouble(row, pushed, out))


def _recent(values: Sequence[float], step: float) -> float:
    newest = values[-max(1, round(RECENT_MS / step)) :]
    return sum(newest) / len(newest) if newest else 0.0


def _trouble(row: QueueRow, pushed: float, out: float) -> str:
    if row.paused:
        return "paused" if row.waiting else ""
    if not row.waiting or (row.oldest_waiting_ms or 0) <= LONG_WAIT_MS:
        return ""
    if not row.active and not out:
        return "stuck"
    return "behind" if pushed > out else "late"


def worst_first(queues: list[Judged]) -> list[Judged]:
    return sorted(queues, key=lambda queue: (*(-part for part in queue.badness), queue.row.name))


def sentence(queues: list[Judged], overview: Overview, unit: str) -> Sentence:
    """One sentence of state, and a second one for the rest. `queues` come with the worst first."""
    storage = overview.storage
    if storage.disk_full or storage.error:
        reason = notation.one_line(storage.error or "the disk is full").rstrip(".")
        text = f"Nothing can be stored: {reason}. Nothing is accepted until that is over."
        return Sentence("✕", text, "bold red")
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
    late = "is late but catching up" if queue.out_per_sec > queue.in_per_sec else "is late"
    return {
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
