"""Argument parsing and the exit code. A subcommand is a function that takes the parsed arguments.

To add one: a function `add_<name>(subcommands)` in a module of this package that sets `run`, and its line in `_parser`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headrace import __version__
from headrace.cli import doctor, flow, serve, worker
from headrace.errors import HeadraceError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="A job queue that speaks the bunqueue protocol and loses nothing it acknowledged.",
        epilog="Try `headrace serve` and connect a client to port 6789. `headrace COMMAND --help` tells more.",
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve.add_serve(subcommands)
    worker.add_worker(subcommands)
    doctor.add_doctor(subcommands)
    flow.prepare(subcommands.add_parser("flow", help="workflows: list, show, cancel, signal, retry"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
