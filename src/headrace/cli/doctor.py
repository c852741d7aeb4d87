"""`headrace doctor`: look at a database file, and say what is wrong in plain words."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace import notation
from headrace.cli.output import print_json


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check a database file while no server has it open. Exit code 0: healthy."
    parser.add_argument("--data-path", metavar="FILE", default="headrace.db", help="(default: headrace.db)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="JSON for machines on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.backends.local.checkup import examine

    report = examine(Path(arguments.data_path))
    if arguments.as_json:
        print_json({"healthy": not report.problems, "facts": report.facts, "problems": report.problems})
        return 1 if report.problems else 0
    for line in report.facts:
        print(f"  {line}")
    for problem in report.problems:
        print(f"! {problem}")
    print("healthy" if not report.problems else f"{notation.counted(len(report.problems), 'problem')} found")
    return 1 if report.problems else 0
