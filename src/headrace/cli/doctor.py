"""`headrace doctor`: look at a database file, and say what is wrong in plain words."""

from __future__ import annotations

import argparse
from pathlib import Path

from headrace.cli.output import print_findings, print_json


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
    else:
        print_findings(report.facts, report.problems, "healthy")
    return 1 if report.problems else 0
