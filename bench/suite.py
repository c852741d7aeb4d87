#!/usr/bin/env python3
"""All of docs/benchmarks.md in one run (`make bench`): every part in turn, each in a process of its own.

    bench/suite.py                             everything
    bench/suite.py --quick                     every part with small numbers, prints instead of writing
    bench/suite.py --only server,valkey        these parts
    bench/suite.py --only server -- --only disk --rounds 5     what follows -- goes to the script of the part

A part writes its own block of the page when it is done, so a run that is interrupted keeps what it has measured. A part
that fails is named at the end, and the others are measured all the same. To add a part: its script, which calls
`report.write_block`, its line in PARTS, and the block's markers in the page. The table of requirements at the head of
the page is made of all blocks by tools/docs.py.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Part(NamedTuple):
    script: str
    what: str
    quick: tuple[str, ...] = ("--quick",)


PARTS = {
    "server": Part("run.py", "the server beside bunqueue: work, start, a million jobs"),
    "anchor": Part("anchor.py", "the server beside beanstalkd"),
    "tasks": Part("tasks.py", "tasks beside Dramatiq, Huey and bunqueue"),
    "idle": Part("idle.py", "a worker that waits"),
    "valkey": Part("against_bullmq.py", "queues on Valkey beside BullMQ"),
    "flows": Part("workflows.py", "workflows beside DBOS, questions to events"),
    "pipeline": Part(
        "pipeline.py",
        "the data pipeline beside DuckDB",
        ("--parts", "capture,move,learn-50000,lives-50000", "--rows", "10000", "--rounds", "1", "--no-write"),
    ),
}


def main() -> int:
    args = _arguments()
    names = args.only.split(",") if args.only else list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"there is no part {unknown[0]!r}; the parts are: {', '.join(PARTS)}")
    if args.rest and len(names) > 1:
        sys.exit("what follows -- is for one part: name it with --only")
    ends = {name: _measure(name, [*(PARTS[name].quick if args.quick else ()), *args.rest]) for name in names}
    subprocess.run([sys.executable, str(HERE.parent / "tools/docs.py")], check=True)
    for name, code in ends.items():
        if code:
            print(f"bench: {name} ended with code {code}", file=sys.stderr)
    return 1 if any(ends.values()) else 0


def _measure(name: str, options: list[str]) -> int:
    part = PARTS[name]
    print(f"bench: {name}: {part.what}", file=sys.stderr, flush=True)
    began = time.monotonic()
    code = subprocess.run([sys.executable, str(HERE / part.script), *options], check=False).returncode
    print(f"bench: {name} took {(time.monotonic() - began) / 60:.1f} min", file=sys.stderr, flush=True)
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PARTS", help=f"of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small numbers; prints only")
    parser.add_argument("rest", nargs="*", metavar="-- OPTION", help="for the script of the one part")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
