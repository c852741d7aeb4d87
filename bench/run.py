#!/usr/bin/env python3
"""Measure Headrace beside the real bunqueue (part `server` of `make bench`) and write docs/benchmarks.md.

    bench/run.py                        everything, ten to fifteen minutes
    bench/run.py --only disk --rounds 3 one part, fewer rounds
    bench/run.py --quick                one round, small numbers, prints instead of writing
    bench/run.py --peer-only --quick    bunqueue alone, to try the harness

Servers are started by this script on ports of their own and are gone when it ends. The load comes from
bench/loadgen (C, compiled on the first run). Raw results are appended to bench/build/runs.jsonl.
With --check the exit code is 1 when a requirement is missed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import report
from measure import DISK, MEMORY, Bench, say
from servers import BenchmarkFailed, Contender, bunqueue, headrace

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
PARTS = ("disk", "memory", "start", "million")


def main() -> int:
    args = _arguments()
    # A plain kill must also unwind the stack: that is what stops the servers and removes their data.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _run(args)
    except BenchmarkFailed as failure:
        say(str(failure))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _run(args: argparse.Namespace) -> int:
    contenders = [bunqueue()] if args.peer_only else [bunqueue(), headrace()]
    writes = not (args.quick or args.peer_only or args.no_write)
    parts = [args.only] if args.only else list(PARTS)
    for part in parts if writes else []:
        report.block(part, "")  # a missing marker should fail now, not after ten minutes
    bench = Bench(_compile_loadgen(), contenders, BUILD)
    missed = []
    for part in parts:
        text = _measure(part, bench, contenders, args)
        missed += [f"{part}: {line}" for line in report.misses(text)]
        if writes:
            report.write_block(part, text)
        print(f"\n## {part}\n\n{text}", flush=True)
    for line in missed:
        say(f"requirement missed: {line}")
    return 1 if missed and args.check else 0


def _measure(part: str, bench: Bench, contenders: list[Contender], args: argparse.Namespace) -> str:
    """The text of one block: where the figures come from, then the figures."""
    rounds, starts, jobs = (1, 2, 50_000) if args.quick else (args.rounds, args.starts, args.jobs)
    alternating = f"Medians of {rounds} alternating rounds after a warm-up."
    measures: dict[str, tuple[str, Callable[[], str]]] = {
        "disk": (
            f"{alternating} SQLite files on disk.",
            lambda: report.workloads(bench.workloads(DISK, on_disk=True, rounds=rounds), DISK),
        ),
        "memory": (
            f"{alternating} No files.",
            lambda: report.workloads(bench.workloads(MEMORY, on_disk=False, rounds=rounds), MEMORY),
        ),
        "start": (
            "Time from starting the process to its first Ping reply, on an empty store.",
            lambda: report.starts(bench.starts(starts)),
        ),
        "million": (
            "Jobs of 100 bytes pushed with PUSHB of 1,000 to a server on disk.",
            lambda: report.backlogs(bench.backlogs(jobs)),
        ),
    }
    method, measure = measures[part]
    figures = measure()
    return report.provenance(contenders, method, BUILD) + figures


def _compile_loadgen() -> Path:
    """The load generator, compiled anew when its source is newer."""
    source, binary = HERE / "loadgen/loadgen.c", BUILD / "loadgen"
    BUILD.mkdir(exist_ok=True)
    if binary.exists() and binary.stat().st_mtime >= source.stat().st_mtime:
        return binary
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise BenchmarkFailed("a C compiler is needed for the load generator: install gcc")
    subprocess.run([compiler, "-O2", "-Wall", "-Wextra", "-o", str(binary), str(source)], check=True, timeout=120)
    return binary


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--rounds", type=int, default=15, help="alternating rounds per workload (default 15)")
    parser.add_argument("--starts", type=int, default=7, help="starts per server and storage (default 7)")
    parser.add_argument("--jobs", type=int, default=1_000_000, help="backlog of the part 'million'")
    parser.add_argument("--quick", action="store_true", help="one round with small numbers; prints only")
    parser.add_argument("--peer-only", action="store_true", help="measure bunqueue alone; prints only")
    parser.add_argument("--no-write", action="store_true", help="print the tables, leave the page alone")
    parser.add_argument("--check", action="store_true", help="exit 1 when a requirement is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
