#!/usr/bin/env python3
"""Measure workflows of three steps that do nothing, beside DBOS, and questions to events (part `flows`).

    bench/workflows.py                  everything, a few minutes
    bench/workflows.py --quick          one round, small numbers, prints instead of writing
    bench/workflows.py --soak 50000     so many flows in one process, for its memory

Each engine is one process on a SQLite file of its own: engine, worker and caller together. Needs dbos
(`tools/setup.sh bench`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from measure import say
from servers import BenchmarkFailed, headrace

HERE = Path(__file__).resolve().parent
BLOCK = "flows"
FLOWS_PER_S, TIMES_DBOS, ALONE_MS, GROWTH_MB = 500, 20, 5.0, 10.0
UNDER_WAY = {"flows": 100, "questions": 100, "dbos": 20}
TITLES = {"flows": "headrace, workflows", "dbos": "DBOS, workflows", "questions": "headrace, questions to events"}


class Stage:
    """One engine at work."""

    def __init__(self, engine: str, folder: str) -> None:
        command = [sys.executable, str(HERE / "flowpeers.py"), engine, f"{folder}/flows.db"]
        self._engine = engine
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
        self._answer()

    def ask(self, word: str, *numbers: int) -> Any:
        assert self.process.stdin is not None
        print(word, *numbers, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise BenchmarkFailed(f"{self._engine}: its process ended; is everything installed (tools/setup.sh bench)?")
        return json.loads(line)


@contextmanager
def staged(engine: str) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(engine, folder)
        try:
            yield stage
        finally:
            stage.process.kill()
            stage.process.wait()


@dataclass
class Figures:
    per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float, float]:
        return statistics.median(self.per_s), statistics.median(self.cpu_ms), statistics.median(self.alone_ms)


def measure(rounds: int, counts: dict[str, int]) -> dict[str, Figures]:
    """Every engine in turn, `rounds` times; each is warmed up before it is measured."""
    found = {engine: Figures() for engine in counts}
    for number in range(rounds):
        for engine, count in counts.items():
            say(f"round {number + 1} of {rounds}: {TITLES[engine]}")
            with staged(engine) as stage:
                stage.ask("many", count // 4, UNDER_WAY[engine])
                found[engine].alone_ms += stage.ask("alone", max(10, count // 10))
                seconds, cpu, _ = stage.ask("many", count, UNDER_WAY[engine])
                found[engine].per_s.append(count / seconds)
                found[engine].cpu_ms.append(cpu * 1000 / count)
    return found


def soak(count: int) -> list[float]:
    """RSS in MB after each fifth of so many flows."""
    say(f"{count:,} flows in one process")
    with staged("flows") as stage:
        return [stage.ask("many", count // 5, 100)[2] for _ in range(5)]


# -- telling -----------------------------------------------------------------------------------------------------------


def table(found: dict[str, Figures]) -> str:
    rows = [["", "per second", "CPU-ms each", "alone, p50 ms", "required"]]
    ours, theirs = found["flows"].medians(), found["dbos"].medians()
    is_fast = ours[0] >= FLOWS_PER_S or ours[0] >= TIMES_DBOS * theirs[0]
    required = {
        "flows": f"≥ {FLOWS_PER_S} per second or ≥ {TIMES_DBOS}x DBOS; alone < {ALONE_MS:g} ms",
        "questions": f"alone < {ALONE_MS:g} ms",
    }
    for engine, figures in found.items():
        per_s, cpu, alone = figures.medians()
        is_met = engine == "dbos" or (alone < ALONE_MS and (engine != "flows" or is_fast))
        mark = "" if is_met else f" {report.MISSED}"
        rows.append([TITLES[engine], f"{per_s:,.0f}", f"{cpu:.2f}", f"{alone:.2f}{mark}", required.get(engine, "-")])
    times = (
        f"{ours[0] / theirs[0]:.0f} times as many workflows per second as DBOS, with {theirs[1] / ours[1]:.0f} times"
    )
    return report.render(rows) + f"\n{times} less CPU for each.\n"


def memory_line(count: int, sizes: Sequence[float]) -> str:
    """What has a bound (ids of removed jobs, SQLite's cache) fills first; after that nothing may grow."""
    mark = "" if sizes[-1] - sizes[-3] <= GROWTH_MB else f" {report.MISSED}"
    told = ", ".join(f"{size:.0f}" for size in sizes)
    return (
        f"\nMemory after each fifth of {count:,} workflows in one process: {told} MB{mark}; caches fill first, and the "
        f"last two fifths may add at most {GROWTH_MB:g} MB.\n"
    )


def _provenance(rounds: int, counts: dict[str, int]) -> str:
    method = (
        f"DBOS {importlib.metadata.version('dbos')}. Medians of {rounds} rounds: {counts['flows']:,} workflows and "
        f"{counts['questions']:,} questions, {UNDER_WAY['flows']} under way at once; DBOS {counts['dbos']:,}, "
        f"{UNDER_WAY['dbos']} at once."
    )
    return report.provenance([headrace()], method, Path(tempfile.gettempdir()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flows", type=int, default=4000, help="flows in a round; a twentieth of them for DBOS")
    parser.add_argument("--soak", type=int, default=50_000, help="flows in one process, for its memory; 0: none")
    parser.add_argument("--quick", action="store_true", help="one round with small numbers; prints only")
    parser.add_argument("--no-write", action="store_true", help="print the table, leave the page alone")
    parser.add_argument("--check", action="store_true", help="exit 1 when a requirement is missed")
    args = parser.parse_args(arguments)
    flows, rounds, soaked = (400, 1, 0) if args.quick else (args.flows, args.rounds, args.soak)
    counts = {"flows": flows, "dbos": max(20, flows // 20), "questions": flows}
    try:
        found = measure(rounds, counts)
        text = table(found) + (memory_line(soaked, soak(soaked)) if soaked else "")
    except BenchmarkFailed as failure:
        say(str(failure))
        return 2
    text = _provenance(rounds, counts) + text
    print(text)
    if not (args.quick or args.no_write):
        report.write_block(BLOCK, text)
    return 1 if args.check and report.misses(text) else 0


if __name__ == "__main__":
    sys.exit(main())
