#!/usr/bin/env python3
"""Measure how soon an idle worker begins a job, and what it costs while there is none.

    bench/idle.py                   500 jobs, one every 20 ms, then a minute of nothing, in both modes: three minutes
    bench/idle.py --quick           50 jobs and ten seconds; prints instead of writing

The time of a job runs from the call of `enqueue` in one process to its first line in another (or, embedded, in the same
one). Nothing is what it says: the worker waits, and its CPU and its calls of `write` are counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import report
from measure import say
from servers import BenchmarkFailed
from tasks import Peer, ours, staged

BLOCK = "idle"
MAX_PICK_UP_MS = 2.0
MAX_IDLE_PERCENT = 0.5


@dataclass(frozen=True)
class Quiet:
    """One mode: how soon a job began (ms), and what a minute of nothing costs."""

    name: str
    p50: float
    p99: float
    cpu_percent: float
    writes_per_min: float


def measure(peer: Peer, jobs: int, seconds: float) -> Quiet:
    with staged(peer) as stage:
        say(f"{peer.name}: {jobs} jobs")
        stage.run("rare", 20)
        stage.run("rare", jobs)
        delays = stage.delays()[-jobs:]
        say(f"{peer.name}: {seconds:g} s of nothing")
        cpu, writes = _idle(stage.worker, seconds)
    cuts = statistics.quantiles(delays, n=100)
    return Quiet(peer.name, cuts[49] * 1000, cuts[98] * 1000, cpu / seconds * 100, writes / seconds * 60)


def _idle(worker: psutil.Process, seconds: float) -> tuple[float, int]:
    time.sleep(2)  # until what the last job left behind is done
    cpu, writes = sum(worker.cpu_times()[:2]), worker.io_counters().write_count
    time.sleep(seconds)
    return sum(worker.cpu_times()[:2]) - cpu, worker.io_counters().write_count - writes


def table(rows: list[Quiet]) -> str:
    header = ["worker", "begins a job: p50 ms", "p99 ms", "idle: CPU %", "writes a minute"]
    shown = [header]
    for row in rows:
        late = f" {report.MISSED}" if row.p50 >= MAX_PICK_UP_MS else ""
        busy = f" {report.MISSED}" if row.cpu_percent >= MAX_IDLE_PERCENT else ""
        cpu = f"{row.cpu_percent:.2f}{busy}"
        shown.append([row.name, f"{row.p50:.2f}{late}", f"{row.p99:.2f}", cpu, f"{row.writes_per_min:.0f}"])
    return report.render(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small numbers; prints only")
    parser.add_argument("--no-write", action="store_true", help="print the table, leave the page alone")
    args = parser.parse_args()
    jobs, seconds = (50, 10.0) if args.quick else (500, 60.0)
    try:
        measured = ours()
        text = table([measure(peer, jobs, seconds) for peer in measured])
    except BenchmarkFailed as failure:
        say(str(failure))
        return 2
    method = f"{jobs} jobs, one every 20 ms, to a worker that has nothing else to do; then {seconds:g} s without any."
    brokers = [peer.broker for peer in measured if peer.broker is not None]
    text = report.provenance(brokers, method, Path(tempfile.gettempdir())) + text
    print(text)
    if not (args.quick or args.no_write):
        report.write_block(BLOCK, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
