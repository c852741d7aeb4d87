"""`headrace backup`: a copy of a database file, made while its server goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace import notation
from headrace.cli.output import print_json, progress


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Copy a database file as it is at this moment, also while a server has it open. The copy is one file, without "
        "the event log. To restore, start a server with --data-path on it."
    )
    parser.add_argument("target", metavar="TO", help="the file to write; it must not exist")
    parser.add_argument("--data-path", metavar="FILE", default="headrace.db", help="(default: headrace.db)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="JSON for machines on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.backends.local.copying import copy_database

    target = Path(arguments.target)
    with progress(f"copy {arguments.data_path}", 1.0) as advance:
        copied = copy_database(Path(arguments.data_path), target, advance)
    if arguments.as_json:
        print_json({"file": str(target), "jobs": copied.jobs, "bytes": copied.bytes})
    else:
        print(f"{target}: {notation.jobs(copied.jobs)}, {copied.bytes:,} bytes")
    return 0
