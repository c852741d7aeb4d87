#!/usr/bin/env python3
"""Run the same workloads against several servers in turn (A B A B ...) and print medians and ratios.

    alternate.py --loadgen ./loadgen --rounds 3 --out runs.jsonl \
        --server bunqueue=6789:PID --server headrace=7789:PID[,PID2] \
        --spec "push --connections 8 --inflight 16 --seconds 1" \
        --spec "pull --connections 8 --inflight 16 --prefill 20000 --seconds 3"

The first server is the base of the ratios. Every raw line is appended to --out with the keys
`round` and `spec` added; the summary on stdout is one JSON object per (spec, server).
`bench/run.py` uses the same functions: `run_rounds` measures, `summarise` takes the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Runs = dict[tuple[str, str], list[Result]]

MEDIANS = ("per_s", "requests_per_s", "cpu_us_per_unit", "cpu_share", "loadgen_cpu_share", "rss_end_kb")


@dataclass(frozen=True)
class Target:
    """A running server: where it listens and which processes do its work."""

    name: str
    port: int
    pids: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read NAME=PORT:PID[,PID]."""
        name, _, rest = text.partition("=")
        port, _, pids = rest.partition(":")
        return cls(name, int(port), tuple(int(pid) for pid in pids.split(",") if pid))


def run_loadgen(loadgen: str, target: Target, options: Sequence[str], limit_s: float) -> Result | None:
    """One loadgen run; None (with a note on stderr) when it failed."""
    command = [loadgen, "--port", str(target.port), "--label", target.name]
    for pid in target.pids:
        command += ["--pid", str(pid)]
    command += ["--workload", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"{target.name}: {' '.join(options)}: timed out", file=sys.stderr)
        return None
    if done.returncode:
        print(f"{target.name}: {' '.join(options)}: {done.stderr.strip()}", file=sys.stderr)
        return None
    result: Result = json.loads(done.stdout)
    return result


def run_rounds(
    loadgen: str,
    targets: Sequence[Target],
    specs: Sequence[str],
    rounds: int,
    limit_s: float = 120.0,
    out: Path | None = None,
) -> Runs:
    """Measure every spec on every target, `rounds` times, alternating between the targets."""
    runs: Runs = {}
    for number in range(rounds):
        # The order turns round every other time, so that no server always goes first.
        order = targets if number % 2 == 0 else targets[::-1]
        for spec in specs:
            print(f"round {number + 1} of {rounds}: {spec}", file=sys.stderr)
            for target in order:
                with _others_stopped(target, targets):
                    result = run_loadgen(loadgen, target, [*spec.split(), "--obliterate"], limit_s)
                if result is None:
                    continue
                result.update(round=number, spec=spec)
                runs.setdefault((spec, target.name), []).append(result)
                if out is not None:
                    with out.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(result) + "\n")
    return runs


@contextmanager
def _others_stopped(target: Target, targets: Sequence[Target]) -> Iterator[None]:
    """The other servers stand still: what one has put off would disturb this one, and nobody would count it."""
    others = [pid for other in targets if other is not target for pid in other.pids]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def summarise(runs: Runs, targets: Sequence[Target], specs: Sequence[str]) -> list[Result]:
    """One row of medians per spec and target that has results, with ratios to the first target."""
    rows = []
    for spec in specs:
        base = runs.get((spec, targets[0].name), [])
        for target in targets:
            results = runs.get((spec, target.name))
            if results:
                ratios = {} if target is targets[0] else _ratios(results, base)
                rows.append({"spec": spec, "server": target.name, **_medians(results), **ratios})
    return rows


def _medians(results: list[Result]) -> Result:
    row: Result = {"runs": len(results)}
    for key in MEDIANS:
        if all(key in result for result in results):
            row[key] = round(statistics.median(result[key] for result in results), 2)
    for key in sorted({key for result in results for key in result if key.endswith(("_p50_us", "_p99_us"))}):
        row[key] = round(statistics.median(result[key] for result in results if key in result), 1)
    row["errors"] = sum(result["errors"] for result in results)
    row["duplicates"] = sum(result["duplicates"] for result in results)
    return row


def _ratios(results: list[Result], base: list[Result]) -> Result:
    """Medians of the ratios of single rounds: from one to another the machine may get faster or slower for both."""
    of_round = {result["round"]: result for result in base}
    pairs = [(result, of_round[result["round"]]) for result in results if result["round"] in of_round]
    ratios: Result = {}
    if pairs:
        ratios["speed_ratio"] = _median(ours["per_s"] / max(theirs["per_s"], 1e-9) for ours, theirs in pairs)
        if all("cpu_us_per_unit" in result for pair in pairs for result in pair):
            cpu = ((ours["cpu_us_per_unit"], theirs["cpu_us_per_unit"]) for ours, theirs in pairs)
            ratios["cpu_ratio"] = _median(theirs / max(ours, 1e-9) for ours, theirs in cpu)
    return ratios


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loadgen", default="./loadgen")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append raw results here")
    parser.add_argument("--server", action="append", required=True, type=Target.parse, metavar="NAME=PORT:PID[,PID]")
    parser.add_argument("--spec", action="append", required=True, help="workload and its options")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds per run")
    args = parser.parse_args()
    runs = run_rounds(args.loadgen, args.server, args.spec, args.rounds, args.limit, args.out)
    for row in summarise(runs, args.server, args.spec):
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
