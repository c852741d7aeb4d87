"""`headrace pipeline report`: one HTML file about what happened, made from the facts of a lake. Needs no Spark.

First what was found, in sentences with numbers; then the charts that show it. Each says its window and its n.
Percentiles of fewer than MIN_N values are not shown: `None` leaves a gap. What lasted some minutes only is shown by
shorter windows than gold has (`moments`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import date, datetime, timedelta
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow.compute as pc
import pyarrow.dataset as ds

from headrace import __version__
from headrace.errors import HeadraceError
from headrace.notation import count, counted, duration, one_line
from headrace.pipeline import moments
from headrace.pipeline.charts import Point, Series, heat_map, moment, percent, span, sparkline, time_chart
from headrace.pipeline.lake import Lake, LakeBusy

MIN_N: Final = 100
MAX_QUEUES: Final = 12
_MAX_ALIKE: Final = 5
"""Sentences of one kind: who reads two hundred of them?"""
_MIN_BACKLOG: Final = 10
_NOTABLE_BACKLOG: Final = 0.05
"""A backlog below this share of what came lately is nothing to speak of."""
_BACKLOG: Final = "Backlog: jobs that were added and had not ended, delayed ones included."
_MEMORY_QUEUES: Final = ("s.groups", "s.receipts")
"""Ends of the names of queues in which events keep what they remember: no worker ever takes their jobs."""
_UNIT_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_LONGEST_MS: Final = {"minute": 6 * 3_600_000, "hour": 31 * 86_400_000}
"""Up to which span charts show windows of this length; beyond the last one they show days."""
_MAX_COLUMNS: Final = 14 * 24
_MAX_COURSE: Final = 7 * 24
"""Points of an error's course: beyond so many hours, each is of several."""
_FEW_WINDOWS: Final = 3

Row = dict[str, Any]
Period = Literal["before", "during", "after"]
"""Of which days a table is read: those of the report, or those before or after them."""


def write_report(lake: Lake, out: Path, *, days: int = 7, queue: str | None = None) -> None:
    """The report of the last `days` days that the lake has facts of, up to the day of its last run."""
    try:
        facts = Facts(lake, days, queue)
    except FileNotFoundError as error:
        raise LakeBusy(f"{lake.root} changed while it was read: try again ({error.filename})") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_text(Page(facts).html(), encoding="utf-8")
    temporary.replace(out)


class Facts:
    """What the report is about, read from gold."""

    def __init__(self, lake: Lake, days: int, queue: str | None) -> None:
        newest = _newest_date(lake)
        self.lake = lake
        self.queue = queue
        self._since = newest - timedelta(days=min(days - 1, newest.toordinal() - 1))
        self._until = newest
        self._by_unit: dict[str, list[Row]] = {}
        self._by_queue: dict[str, dict[str, list[Row]]] = {}
        self._former = self._backlogs_before()
        self.errors = self._read("error_signature_hour")
        self.gaps = _read_all(lake.committed("silver/gaps"))
        self.ahead = self._minutes_ahead()
        minutes = self._table("queue_minute", ["window_start"])
        if not minutes and any(self._former.values()):  # nothing happened to its backlog: the days are those of others
            minutes = self._table("queue_minute", ["window_start"], of_all=True)
        if not minutes:
            which = f" of the queue {queue} since {self._since}: --days takes more of them" if queue else ""
            raise HeadraceError(f"{lake.root} has no facts{which}")
        first, last = pc.min_max(minutes["window_start"]).as_py().values()
        self.start, self.end = moments.ms_of(first), moments.ms_of(last) + _UNIT_MS["minute"]
        self.unit = next((unit for unit, ms in _LONGEST_MS.items() if self.end - self.start <= ms), "day")
        self.step_ms = dict(_UNIT_MS)
        is_short = self.end - self.start <= moments.LONGEST_MS
        added = sum(row["added"] for row in self.rows("day"))
        if is_short and added and added + sum(self._former.values()) <= moments.MAX_JOBS:
            self._look_closer()
        self.workers = [] if queue else self._workers()
        # A queue in which nothing happens any more still has its backlog.
        totals: dict[str, int] = defaultdict(int, {name: left for name, left in self._former.items() if left})
        for row in self.rows("day"):
            totals[row["queue"]] += row["added"] + row["started"]
        self.queues = sorted(totals, key=lambda name: -totals[name])

    def rows(self, unit: str) -> list[Row]:
        """All windows of a length, in order of time: read when they are first asked for, as there may be many."""
        if unit not in self._by_unit:
            self._by_unit[unit] = self._read(f"queue_{unit}")
        return self._by_unit[unit]

    def _read(self, table: str, columns: list[str] | None = None, *, period: Period = "during") -> list[Row]:
        found = self._table(table, columns, period=period)
        rows: list[Row] = found.to_pylist() if found else []
        return sorted(map(_in_ms, rows), key=lambda row: row["window_start"])

    def _table(
        self, table: str, columns: list[str] | None = None, *, period: Period = "during", of_all: bool = False
    ) -> Any:
        """The rows of a period as they are stored; None when there are none."""
        folder = self.lake.path(f"gold/{table}")
        if next(folder.rglob("*.parquet"), None) is None:
            return None
        data = ds.dataset(folder, partitioning="hive", format="parquet")
        day, since, until = ds.field("window_date").cast("string"), self._since.isoformat(), self._until.isoformat()
        wanted = {"before": day < since, "during": (day >= since) & (day <= until), "after": day > until}[period]
        if self.queue is not None and not of_all and "queue" in data.schema.names:
            wanted = wanted & (ds.field("queue") == self.queue)
        return data.to_table(columns=columns, filter=wanted) or None

    def _minutes_ahead(self) -> list[datetime]:
        """The minutes after these days in which something is said to have happened."""
        minutes = self._table("queue_minute", ["window_start"], period="after")
        found: list[datetime] = pc.unique(minutes["window_start"]).to_pylist() if minutes else []
        return found

    @property
    def course_ms(self) -> int:
        """How long the windows are in which workers are shown."""
        return max(_UNIT_MS["minute"], (self.end - self.start) // 60)

    def _workers(self) -> list[Row]:
        """A row per worker and `place`, the number of its window. A fleet has millions of minutes: no row for each."""
        minutes = self._table("worker_minute", ["worker", "window_start", "busy_ms", "slots"])
        if minutes is None:
            return []
        at = pc.divide(minutes["window_start"].cast("int64"), 1000)
        place = pc.divide(pc.max_element_wise(pc.subtract(at, self.start), 0), self.course_ms)
        sums: list[Row] = (
            minutes.append_column("place", place)
            .group_by(["worker", "place"])
            .aggregate([("busy_ms", "sum"), ("slots", "sum"), ("slots", "max")])
            .to_pylist()
        )
        return sums

    def _backlogs_before(self) -> dict[str, int]:
        """What each queue had when the days of this report began, as the last day before with facts of it says."""
        rows = self._read("queue_day", ["queue", "window_start", "backlog_end"], period="before")
        return {row["queue"]: row["backlog_end"] for row in rows}

    def _look_closer(self) -> None:
        """Windows of seconds instead of minutes, if the jobs themselves are still there."""
        jobs = moments.read_jobs(self.lake, self._since, self.queue)
        attempts = moments.read_attempts(self.lake, self._since, self.queue)
        seconds = [at for row in moments.facts_of(jobs, attempts, 1_000) if (at := row["window_start"]) < self.end]
        if not seconds:
            return
        self.start, self.end = max(self.start, seconds[0]), min(self.end, seconds[-1] + 1_000)
        step = moments.step_of(self.end - self.start)
        facts = moments.facts_of(jobs, attempts, step)
        facts = [row for row in facts if self.start - step < row["window_start"] < self.end]
        self.unit, self._by_unit["moment"], self.step_ms["moment"] = "moment", facts, step

    def words(self, unit: str | None = None) -> str:
        unit = unit or self.unit
        if unit != "moment":
            return f"per {unit}"
        return "per second" if self.step_ms[unit] == 1_000 else f"per {duration(self.step_ms[unit])}"

    def of(self, queue: str, unit: str | None = None) -> list[Row]:
        unit = unit or self.unit
        if unit not in self._by_queue:
            self._by_queue[unit] = _grouped(self.rows(unit), "queue")
        return self._by_queue[unit].get(queue, [])

    @property
    def span(self) -> tuple[float, float]:
        return self.start, self.end

    def filled(self, queue: str, value: Callable[[Row], float | None]) -> list[Point]:
        """A point per window, with 0 where nothing happened. The last one is left out if it is not over yet."""
        step = self.step_ms[self.unit]
        known = {row["window_start"]: value(row) for row in self.of(queue)}
        first, last = self.start - self.start % step, self.end - self.end % step
        return [(at, known.get(at, 0)) for at in range(first, last if last > first + step else self.end, step)]

    def backlog(self, queue: str) -> list[Point]:
        """What there was at the end of each window: where nothing happened it stays as it was."""
        step, level = self.step_ms[self.unit], self._former.get(queue, 0)
        known = {row["window_start"]: row["backlog_end"] for row in self.of(queue)}
        points: list[Point] = []
        for at in range(self.start - self.start % step, self.end, step):
            level = known.get(at, level)
            points.append((at, level))
        return points

    def percentile(self, queue: str, what: str, rank: str, unit: str) -> list[Point]:
        """Percentiles with gaps: where there are too few values, and where windows are missing."""
        step = self.step_ms[unit]
        known = {row["window_start"]: row for row in self.of(queue, unit) if row[f"{what}_n"] >= MIN_N}
        starts = range(self.start - self.start % step, self.end, step)
        points: list[Point] = []
        for at in starts:
            value = known[at][f"{what}_{rank}"] if at in known else None
            points.append((max(at, self.start), value))
            if len(starts) <= _FEW_WINDOWS:  # a line from end to end, where a dot would be easy to miss
                points.append((min(at + step, self.end), value))
        return points

    def finest_unit(self, queue: str, what: str) -> str | None:
        """The shortest windows of which most have enough values for percentiles; None if none has."""
        for unit in (self.unit, *(unit for unit in _UNIT_MS if _UNIT_MS[unit] > self.step_ms[self.unit])):
            counts = [row[f"{what}_n"] for row in self.of(queue, unit) if row[f"{what}_n"]]
            if counts and 2 * sum(n >= MIN_N for n in counts) >= len(counts):
                return unit
        return None


def _newest_date(lake: Lake) -> date:
    """The newest date with facts up to the last run: one event of a clock that is ahead must not move the days."""
    dates = [path.name.partition("=")[2] for path in lake.path("gold/queue_day").glob("window_date=*")]
    if not dates:
        raise HeadraceError(f"{lake.root} has no facts yet: run `headrace pipeline run --lake {lake.root}` first")
    made_at = lake.pointer().made_at
    past = [day for day in dates if made_at is None or day <= made_at.date().isoformat()]
    return date.fromisoformat(max(past or dates))  # if all lie ahead, it was the clock of the run that was behind


def _read_all(folders: Iterable[Path]) -> list[Row]:
    return [row for folder in folders for row in ds.dataset(folder, format="parquet").to_table().to_pylist()]


def _grouped(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[name]].append(row)
    return dict(groups)


def _in_ms(row: Row) -> Row:
    return {k: moments.ms_of(v) if isinstance(v, datetime) else v for k, v in row.items()}


# -- what was found -------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A sentence about a queue, and how bad it is beside others of its kind."""

    weight: float
    text: str


def findings(facts: Facts) -> list[str]:
    """Sentences with numbers, worst first. HTML."""
    found: list[str | None] = []
    for find, others in (
        (_trouble, "have a backlog that grows or that no worker takes"),
        (_missed_sla, "missed their SLA"),
        (_slowest_hour, "had an hour that was much slower than usual"),
    ):
        found += _worst(filter(None, (find(facts, queue) for queue in facts.queues)), others)
    found += [_main_error(facts), _retries(facts), _busiest_worker(facts), _gaps(facts), _ahead(facts)]
    return [text for text in found if text] or [
        "Nothing stands out: all queues kept up, no SLA was missed and nothing failed."
    ]


def _worst(found: Iterable[Finding], others: str) -> list[str]:
    """The worst of a kind, and how many more there are."""
    texts = [finding.text for finding in sorted(found, key=lambda finding: -finding.weight)]
    more = len(texts) - _MAX_ALIKE
    return texts if more < 2 else [*texts[:_MAX_ALIKE], f"{counted(more, 'more queue')} {others}."]


def _done(row: Row) -> int:
    """Jobs that work has ended, one way or the other."""
    return int(row["completed"] + row["dlq"])


def _removed(row: Row) -> int:
    """Jobs that ended without it: cancelled, dropped by their workflow, cleared away, outlived."""
    return int(row["removed"] + row["expired"])


def _name(queue: str) -> str:
    return f"<b>{escape(queue)}</b>"


def _trouble(facts: Facts, queue: str) -> Finding | None:
    if queue.endswith(_MEMORY_QUEUES) and not any(row["started"] for row in facts.of(queue, "day")):
        return None
    text = _falling_behind(facts, queue) or _standing_still(facts, queue)
    return Finding(facts.backlog(queue)[-1][1] or 0, text) if text else None


def _falling_behind(facts: Facts, queue: str) -> str | None:
    rows = facts.of(queue)
    level = facts.backlog(queue)
    last, middle = level[-1][1] or 0, level[len(level) // 2][1] or 0
    since = level[len(level) // 2][0]
    recent = [row for row in rows if row["window_start"] >= since]
    came, went = sum(row["added"] for row in recent), sum(_done(row) + _removed(row) for row in recent)
    if last < _MIN_BACKLOG or last <= 1.2 * middle or last < _NOTABLE_BACKLOG * came:
        return None
    return (
        f"{_name(queue)} is falling behind: its backlog, delayed jobs included, rose from {count(middle)} to "
        f"{count(last)} jobs since {moment(since)}; {count(came)} were added in that time and {count(went)} ended."
    )


def _standing_still(facts: Facts, queue: str) -> str | None:
    level = facts.backlog(queue)
    since = level[len(level) // 2][0]
    backlog = level[-1][1] or 0
    unit = "minute" if facts.unit == "moment" else facts.unit  # what is counted from the jobs does not have it
    recent = [row for row in facts.of(queue, unit) if row["window_start"] + facts.step_ms[unit] > since]
    if backlog < _MIN_BACKLOG or any(row["started"] for row in recent):
        return None
    return (
        f"{_name(queue)} is stuck: no job was started since {moment(since)}, and its backlog is {count(backlog)} jobs, "
        "delayed ones included."
    )


def _missed_sla(facts: Facts, queue: str) -> Finding | None:
    rows = facts.of(queue, "day")
    breaches, waits = sum(row["sla_breaches"] for row in rows), sum(row["wait_n"] for row in rows)
    target = next((row["sla_target_ms"] for row in rows if row["sla_target_ms"]), None)
    if not breaches or target is None:
        return None
    return Finding(
        breaches,
        f"{count(breaches)} of {count(waits)} jobs of {_name(queue)} ({percent(breaches / waits)}) waited longer than "
        f"the SLA of {duration(target)}.",
    )


def _slowest_hour(facts: Facts, queue: str) -> Finding | None:
    rows = [row for row in facts.of(queue, "hour") if row["wait_n"] >= MIN_N]
    if len(rows) < 2:
        return None
    worst = max(rows, key=lambda row: row["wait_p95"])
    usual = sorted(row["wait_p95"] for row in rows)[len(rows) // 2]
    if worst["wait_p95"] < 2 * max(usual, 50):
        return None
    when = moment(worst["window_start"])
    return Finding(
        worst["wait_p95"],
        f"p95 wait of {_name(queue)} was {duration(worst['wait_p95'])} in the hour from {when} "
        f"(n = {count(worst['wait_n'])}); in a usual hour it is {duration(usual)}.",
    )


def _main_error(facts: Facts) -> str | None:
    counts: dict[str, int] = defaultdict(int)
    for row in facts.errors:
        counts[row["signature"]] += row["count"]
    if not counts:
        return None
    worst, total = max(counts, key=lambda text: counts[text]), sum(counts.values())
    share = "" if len(counts) == 1 else f"; {percent(counts[worst] / total)} of them with"
    return (
        f"{counted(total, 'attempt')} failed with an error{share or ':'} <code>{escape(one_line(worst, 120))}</code>."
    )


def _retries(facts: Facts) -> str | None:
    rows = facts.rows("day")
    started, retried = sum(row["started"] for row in rows), sum(row["retried"] for row in rows)
    dead = sum(row["dlq"] for row in rows)
    parts = [f"{percent(retried / max(1, started))} of all {count(started)} attempts were retries"] if retried else []
    parts += [f"{counted(dead, 'job')} went to the dead-letter queue"] if dead else []
    return f"{', and '.join(parts)}." if parts else None


def _busiest_worker(facts: Facts) -> str | None:
    busy: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for row in facts.workers:
        busy[row["worker"]][0] += row["busy_ms_sum"]
        busy[row["worker"]][1] += row["slots_sum"] * _UNIT_MS["minute"]
    if not busy:
        return None
    name = max(busy, key=lambda worker: busy[worker][0] / busy[worker][1])
    used = busy[name][0] / busy[name][1]
    which = f"The busiest of {len(busy)} workers" if len(busy) > 1 else "The only worker"
    return f"{which}, {_name(name)}, used {percent(used)} of its slots while it had work."


def _gaps(facts: Facts) -> str | None:
    if not facts.gaps:
        return None
    lost = sum(gap["last_seq"] - gap["first_seq"] + 1 for gap in facts.gaps)
    return (
        f"The log has {counted(len(facts.gaps), 'gap')}: {counted(lost, 'event')} in all are missing, and their jobs."
    )


def _ahead(facts: Facts) -> str | None:
    if not facts.ahead:
        return None
    minutes = counted(len(facts.ahead), "minute is", "minutes are")
    return (
        f"{minutes} left out whose events are dated after the last run, up to {max(facts.ahead):%a %d %b %Y %H:%M}: "
        "a clock was ahead."
    )


# -- the page -------------------------------------------------------------------------------------------------------


class Page:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._shown = facts.queues[:MAX_QUEUES]

    def html(self) -> str:
        facts = self._facts
        what = f"Queue {facts.queue}" if facts.queue else counted(len(facts.queues), "queue")
        title = f"{what}, {span(facts.start, facts.end)} UTC"
        sections = [
            self._summary(),
            self._multiples("Arrivals, completions and backlog", self._flow),
            self._multiples("Wait for a worker", lambda queue: self._times(queue, "wait"), self._too_few("wait")),
            self._waits_by_hour(),
            self._multiples("Run time of an attempt", lambda queue: self._times(queue, "run"), self._too_few("run")),
            self._multiples("Failed attempts", self._failures),
            self._error_table(),
            self._worker_table(),
            self._origin(),
        ]
        body = "".join(section for section in sections if section)
        fresh = f"facts up to {moment(facts.end)} UTC"
        return _PAGE.format(title=escape(title), fresh=escape(fresh), style=_style(), body=body, version=__version__)

    def _summary(self) -> str:
        lines = "".join(f"<li>{text}</li>" for text in findings(self._facts))
        return f'<section><h2>What happened</h2><ul class="findings">{lines}</ul>{self._queue_table()}</section>'

    def _queue_table(self) -> str:
        heads = (
            "Queue",
            "Added",
            "Completed",
            "Dead letters",
            "Removed",
            "Backlog",
            "Failed attempts",
            "Backlog over time",
        )
        rows = []
        for queue in self._shown:
            days = self._facts.of(queue, "day")
            totals = [sum(row[name] for row in days) for name in ("added", "completed", "dlq")]
            totals.append(sum(map(_removed, days)))
            ended = sum(row["run_n"] for row in days)
            failed = sum(row["failed_attempts"] + row["stalled"] for row in days)
            level = [value or 0 for _, value in self._facts.backlog(queue)]
            rate = percent(failed / ended) if ended else "-"
            cells = [*map(count, totals), count(level[-1]), rate]
            figures = "".join(f'<td class="n">{cell}</td>' for cell in cells)
            rows.append(f"<tr><th>{escape(queue)}</th>{figures}<td>{sparkline(level, 'waiting')}</td></tr>")
        head = "".join(
            f"<th{'' if n in (0, len(heads) - 1) else ' class=n'}>{name}</th>" for n, name in enumerate(heads)
        )
        more = len(self._facts.queues) - len(self._shown)
        left_out = f" Left out: {counted(more, 'smaller queue')}." if more > 0 else ""
        note = f'<p class="note">{_BACKLOG}{left_out}</p>'
        return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{note}"

    def _multiples(self, title: str, draw: Callable[[str], str], note: str = "") -> str:
        charts = [chart for chart in map(draw, self._shown) if chart]
        if not charts and not note:
            return ""
        drawn = f'<div class="multiples">{"".join(charts)}</div>' if charts else ""
        return f"<section><h2>{title}</h2>{drawn}{note}</section>"

    def _too_few(self, what: str) -> str:
        """The queues of which no percentile is shown, and why."""
        facts = self._facts
        counts = {queue: sum(row[f"{what}_n"] for row in facts.of(queue, "day")) for queue in self._shown}
        left_out = [queue for queue, n in counts.items() if n and facts.finest_unit(queue, what) is None]
        names = ", ".join(f"{_name(queue)} (n = {count(counts[queue])})" for queue in left_out)
        words = f"Fewer than {MIN_N} in every window, too few for percentiles: {names}."
        return f'<p class="note">{words}</p>' if left_out else ""

    def _flow(self, queue: str) -> str:
        facts = self._facts
        added = Series("added", "came", facts.filled(queue, lambda row: row["added"]))
        done = Series("done", "completed", facts.filled(queue, _done), is_area=True)
        removed = Series("removed", "dead", facts.filled(queue, _removed))
        flow = [done, added, removed] if any(map(_removed, facts.of(queue, "day"))) else [done, added]
        backlog = Series("backlog (below)", "waiting", facts.backlog(queue), is_area=True)
        total = sum(row["added"] for row in facts.of(queue, "day"))
        caption = f"jobs {facts.words()}, n = {count(total)} added"
        upper = time_chart(flow, facts.span, count, height=90)
        lower = time_chart([backlog], facts.span, count, height=50)
        return _figure(queue, caption, [*flow, backlog], upper + lower)

    def _times(self, queue: str, what: str) -> str:
        facts = self._facts
        unit = facts.finest_unit(queue, what)
        n = sum(row[f"{what}_n"] for row in facts.of(queue, "day"))
        if unit is None:
            return ""
        kind = "waiting" if what == "wait" else "active"
        ranks = ("p50", "p95", "p99")
        lines = [Series(rank, f"{kind} {rank}", facts.percentile(queue, what, rank, unit)) for rank in ranks]
        target = next((row["sla_target_ms"] for row in facts.of(queue, "day") if row["sla_target_ms"]), None)
        rule = (float(target), f"SLA {duration(target)}") if what == "wait" and target else None
        left_out = sum(0 < row[f"{what}_n"] < MIN_N for row in facts.of(queue, unit))
        caption = f"{facts.words(unit)}, log scale, n = {count(n)}"
        caption += f"; without {counted(left_out, 'window')} of n < {MIN_N}" if left_out else ""
        return _figure(queue, caption, lines, time_chart(lines, facts.span, duration, is_log=True, rule=rule))

    def _failures(self, queue: str) -> str:
        facts = self._facts
        failed = Series(
            "failed or stalled", "failed", facts.filled(queue, lambda r: r["failed_attempts"] + r["stalled"])
        )
        dead = Series("dead letters", "dead", facts.filled(queue, lambda row: row["dlq"]))
        days = facts.of(queue, "day")
        total = sum(row["failed_attempts"] + row["stalled"] for row in days)
        if not total:
            return ""
        started = sum(row["started"] for row in days)
        retried = sum(row["retried"] for row in days)
        caption = f"attempts {facts.words()}, n = {count(total)} of {count(started)}; "
        caption += f"{started / max(1, started - retried):.2f} attempts per job"
        return _figure(queue, caption, [failed, dead], time_chart([failed, dead], facts.span, count, height=90))

    def _waits_by_hour(self) -> str:
        facts = self._facts
        unit = "hour" if facts.end - facts.start <= _MAX_COLUMNS * _UNIT_MS["hour"] else "day"
        step = _UNIT_MS[unit]
        windows = range(facts.start - facts.start % step, facts.end, step)
        if len(windows) < 3:
            return ""
        rows = []
        for queue in self._shown:
            known = {row["window_start"]: row for row in facts.of(queue, unit) if row["wait_n"] >= MIN_N}
            if known:
                rows.append((queue, [known[at]["wait_p95"] if at in known else None for at in windows]))
        if not rows:
            return ""
        map_ = heat_map(rows, windows, duration)
        note = f"p95 wait per queue and {unit}: the stronger the colour, the longer. Empty: fewer than {MIN_N} jobs."
        return (
            f'<section><h2>When did jobs wait?</h2><div class="scroll">{map_}</div><p class="note">{note}</p></section>'
        )

    def _error_table(self) -> str:
        grouped = _grouped(self._facts.errors, "signature")
        if not grouped:
            return ""
        worst = sorted(grouped.items(), key=lambda item: -sum(row["count"] for row in item[1]))[:15]
        rows = "".join(self._error_row(signature, found) for signature, found in worst)
        course = "<th>Over time</th>" if self._has_course(_UNIT_MS["hour"]) else ""
        seen = "<th>First seen</th><th>Last seen</th>"
        head = f"<tr><th>Error</th><th class=n>Attempts</th><th>Queues</th>{course}{seen}</tr>"
        which = (
            f"The {len(worst)} most frequent of {len(grouped)} signatures"
            if len(grouped) > len(worst)
            else "Signatures"
        )
        note = f"{which}: errors without the numbers, ids and quoted texts in them."
        table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
        return f'<section><h2>Errors by signature</h2>{table}<p class="note">{note}</p></section>'

    def _error_row(self, signature: str, rows: list[Row]) -> str:
        hour = _UNIT_MS["hour"]
        first = self._facts.start - self._facts.start % hour
        step = hour * -(-(self._facts.end - first) // (hour * _MAX_COURSE))
        by_place: dict[int, int] = defaultdict(int)
        for row in rows:
            by_place[(row["window_start"] - first) // step] += row["count"]
        course = [by_place[n] for n in range(-(-(self._facts.end - first) // step))]
        queues = ", ".join(sorted({row["queue"] for row in rows})[:4])
        exact = 1_000 if self._facts.unit == "moment" else _UNIT_MS["minute"]
        times = min(row["first_seen"] for row in rows), max(row["last_seen"] for row in rows)
        seen = [moment(at - at % exact) for at in times]
        sample = escape(f"{rows[0]['sample_error']}\njob {rows[0]['sample_job_id']}")
        line = f"<td>{sparkline(course, 'failed')}</td>" if self._has_course(hour) else ""
        return (
            f'<tr><td><code title="{sample}">{escape(one_line(signature, 160))}</code></td>'
            f'<td class="n">{count(sum(row["count"] for row in rows))}</td><td>{escape(queues)}</td>'
            f'{line}<td class="when">{seen[0]}</td><td class="when">{seen[1]}</td></tr>'
        )

    def _worker_table(self) -> str:
        grouped = _grouped(self._facts.workers, "worker")
        if not grouped:
            return ""
        by_work = sorted(grouped.items(), key=lambda item: -sum(row["busy_ms_sum"] for row in item[1]))[:20]
        rows = "".join(self._worker_row(worker, found) for worker, found in by_work)
        course = "<th>Over time</th>" if self._has_course(_UNIT_MS["minute"]) else ""
        head = f"<tr><th>Worker</th><th class=n>Busy</th><th class=n>Slots</th><th class=n>Used</th>{course}</tr>"
        note = (
            "Slots: the most jobs that a worker held at once on a day. Used: the share of them, in minutes with work."
        )
        table = f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
        return f'<section><h2>Workers</h2>{table}<p class="note">{note}</p></section>'

    def _worker_row(self, worker: str, rows: list[Row]) -> str:
        busy = sum(row["busy_ms_sum"] for row in rows)
        room = sum(row["slots_sum"] for row in rows) * _UNIT_MS["minute"]
        known = {row["place"]: row["busy_ms_sum"] for row in rows}
        places = (self._facts.end - self._facts.start) // self._facts.course_ms + 1
        course = [known.get(place, 0) for place in range(places)]
        cells = (duration(busy), str(max(row["slots_max"] for row in rows)), percent(busy / room))
        figures = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        line = f"<td>{sparkline(course, 'active')}</td>" if self._has_course(_UNIT_MS["minute"]) else ""
        return f"<tr><th>{escape(worker)}</th>{figures}{line}</tr>"

    def _has_course(self, step_ms: int) -> bool:
        """Whether there are enough windows of this length to draw what came of something over time."""
        return bool((self._facts.end - self._facts.start) // step_ms >= _FEW_WINDOWS)

    def _origin(self) -> str:
        facts, pointer = self._facts, self._facts.lake.pointer()
        waiting = len(facts.lake.batches_after(pointer.batch))
        lines = [f"Facts of run {pointer.run}, from {escape(facts.lake.root.name)}; up to {moment(facts.end)} UTC."]
        missing = f"{counted(waiting, 'ingested batch is', 'ingested batches are')} not included yet."
        lines.append(missing if waiting else "All ingested batches are included.")
        lines.append("The log reports no gaps." if not facts.gaps else _gaps(facts) or "")
        lines.append(
            "Percentiles are nearest rank. A wait counts when it ends, and does not include the requested delay."
        )
        return f'<section class="origin"><h2>About this report</h2><p>{" ".join(lines)}</p></section>'


def _style() -> str:
    return (resources.files("headrace.pipeline") / "report.css").read_text(encoding="utf-8")


def _figure(queue: str, caption: str, series: list[Series], chart: str) -> str:
    keys = "".join(f'<span class="key {one.kind}">{one.name}</span>' for one in series)
    return f"<figure><figcaption><b>{escape(queue)}</b> {keys}<small>{caption}</small></figcaption>{chart}</figure>"


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · Headrace report</title><style>{style}</style></head>
<body><header><h1>{title}</h1><p class="fresh">Headrace {version}, {fresh}</p></header>
<main>{body}</main></body></html>
"""
