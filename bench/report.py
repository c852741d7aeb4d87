"""Turns measurements into the tables of docs/benchmarks.md.

The page is written by hand except for its blocks, `<!-- bench:NAME:begin -->` to `<!-- bench:NAME:end -->`.
A block is replaced only by a run that measured it, so each carries its own date and versions. A figure that
misses its requirement is marked, and `misses` finds it.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import apsw

from loadgen.alternate import Result
from measure import Backlog, StartTime, Workload
from servers import ROOT, Contender

PAGE = ROOT / "docs/benchmarks.md"
BASE = "bunqueue"
OURS = "headrace"
START_LIMIT = 1.5
MISSED = "**missed**"

# Each line of the backlog table: its title, its figure, and the limit that ours must keep.
BACKLOG_LINES: tuple[tuple[str, Callable[[Backlog], float], float | None], ...] = (
    ("RSS, MB", lambda row: row.rss_bytes / 1e6, 1000),
    ("RSS per job, bytes", lambda row: (row.rss_bytes - row.empty_rss_bytes) / row.jobs, None),
    ("database per job, bytes", lambda row: row.database_bytes / row.jobs, None),
    ("other files (event log), MB", lambda row: row.other_bytes / 1e6, None),
    ("CPU-us per job, first tenth", lambda row: row.first_slice_us, None),
    ("CPU-us per job, last tenth", lambda row: row.last_slice_us, None),
    ("last tenth / first tenth", lambda row: row.last_slice_us / row.first_slice_us, 1.5),
    ("kill -9 to first PULL, s", lambda row: row.restart_s, 10),
)


def write_block(name: str, text: str) -> None:
    PAGE.write_text(block(name, text))


def block(name: str, text: str) -> str:
    """The page with the block `name` replaced."""
    begin, end = f"<!-- bench:{name}:begin -->", f"<!-- bench:{name}:end -->"
    head, found_begin, rest = PAGE.read_text().partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page has no block '{begin} ... {end}'")
    return f"{head}{begin}\n{text.strip()}\n{end}{tail}"


def provenance(contenders: Sequence[Contender], method: str, data_folder: Path) -> str:
    """When, where and with what a block was measured."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = ", ".join(f"{contender.name} {contender.version}" for contender in contenders)
    machine = f"{os.cpu_count()} cores ({_cpu_model()}), Linux {platform.release()}"
    storage = f"data on {_file_system(data_folder)}"
    return (
        f"Measured {today}: {versions}, SQLite {apsw.sqlite_lib_version()} in {OURS}.\n"
        f"Machine: {machine}, {storage}, load average {os.getloadavg()[0]:.1f} at the end.\n"
        f"{method}\n\n"
    )


def workloads(rows: Sequence[Result], declared: Sequence[Workload]) -> str:
    """CPU per job, wall rates and, where measured one at a time, latencies."""
    with_budget = any(workload.budget_us for workload in declared)
    header = ["workload", f"{BASE} CPU-us", f"{OURS} CPU-us", *(["budget"] if with_budget else [])]
    header += ["times less CPU", "required", f"{BASE} jobs/s", f"{OURS} jobs/s"]
    table = [header]
    for workload in declared:
        base, ours = _pair(rows, workload)
        budget = [f"{workload.budget_us:g}" if workload.budget_us else "-"] if with_budget else []
        table.append(
            [
                workload.title,
                _number(base, "cpu_us_per_unit"),
                _number(ours, "cpu_us_per_unit"),
                *budget,
                _ratio(ours, workload.floor),
                f"≥ {workload.floor:g}x",
                _rate(base),
                _rate(ours),
            ]
        )
    return render(table) + _latencies(rows, declared) + _wrong_replies(rows)


def starts(rows: Sequence[StartTime]) -> str:
    """Start to first reply."""
    table = [["storage", "server", "median ms", "lowest ms", "runs", f"to {BASE}", "required"]]
    base = {row.storage: row.median_ms for row in rows if row.server == BASE}
    for row in rows:
        ratio, required = "-", "-"
        if row.server != BASE:
            ratio = _mark(row.median_ms / base[row.storage], START_LIMIT, "x")
            required = f"≤ {START_LIMIT:g}x"
        figures = [f"{row.median_ms:.0f}", f"{row.lowest_ms:.0f}", str(row.runs)]
        table.append([row.storage, row.server, *figures, ratio, required])
    return render(table)


def backlogs(rows: Sequence[Backlog]) -> str:
    """Memory, files, cost while filling and recovery of a large backlog."""
    by_server = {row.server: row for row in rows}
    table = [[f"{rows[0].jobs:,} waiting jobs", BASE, OURS, "required"]]
    for title, figure, limit in BACKLOG_LINES:
        base, ours = by_server.get(BASE), by_server.get(OURS)
        cells = [
            _mark(figure(base), None) if base else "-",
            _mark(figure(ours), limit) if ours else "-",
            f"≤ {limit:,g}" if limit else "-",
        ]
        table.append([title, *cells])
    return render(table)


def misses(text: str) -> list[str]:
    """The table lines of a block in which a requirement is missed."""
    return [line for line in text.splitlines() if MISSED in line]


def _pair(rows: Sequence[Result], workload: Workload) -> tuple[Result | None, Result | None]:
    key = (workload.options, workload.is_awake)
    found = {row["server"]: row for row in rows if (row["spec"], row["is_awake"]) == key}
    return found.get(BASE), found.get(OURS)


def _ratio(ours: Result | None, floor: float) -> str:
    if ours is None or "cpu_ratio" not in ours:
        return "-"
    ratio = ours["cpu_ratio"]
    return f"{ratio:.1f}x" if ratio >= floor else f"{ratio:.2f}x {MISSED}"


def _latencies(rows: Sequence[Result], declared: Sequence[Workload]) -> str:
    """The p50 of each request of the sequential workloads; ours must be the lower one."""
    sequential = [workload for workload in declared if workload.options.startswith("seq ")]
    table = [["p50 us", BASE, OURS, "required"]]
    for workload in sequential:
        base, ours = _pair(rows, workload)
        for verb in ("push", "pull", "ack"):
            key = f"{verb}_p50_us"
            mine = _number(ours, key)
            if base and ours and ours[key] >= base[key]:
                mine += f" {MISSED}"
            table.append([f"{verb.upper()}, {workload.title}", _number(base, key), mine, "lower"])
    return "\n" + render(table) if sequential else ""


def _wrong_replies(rows: Sequence[Result]) -> str:
    lines = [
        f"{row['server']}, `{row['spec']}`: {row['errors']} errors, {row['duplicates']} duplicate deliveries"
        + (f" {MISSED}" if row["server"] == OURS else "")
        for row in rows
        if row["errors"] or row["duplicates"]
    ]
    if not lines:
        return "\nNo error replies and no duplicate deliveries from any server.\n"
    return "\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _mark(figure: float, limit: float | None, unit: str = "") -> str:
    """The figure, marked when it is above its limit."""
    text = f"{figure:,.2f}{unit}" if figure < 100 else f"{figure:,.0f}{unit}"
    return text if limit is None or figure <= limit else f"{text} {MISSED}"


def _number(row: Result | None, key: str) -> str:
    if row is None or key not in row:
        return "-"
    value = float(row[key])
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _rate(row: Result | None) -> str:
    return f"{row['per_s']:,.0f}" if row else "-"


def render(table: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|" + "---|" * len(table[0]))
    return "\n".join(lines) + "\n"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`: the mount with the longest matching path."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, name = line.split()[1:3]
        inside = folder.is_relative_to(mount)
        if inside and len(mount) >= len(best):
            best, kind = mount, name
    return kind
