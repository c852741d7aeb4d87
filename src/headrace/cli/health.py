"""`headrace health`: one line and an exit code, for probes of containers and monitors."""

from __future__ import annotations

import argparse

from headrace import notation
from headrace.cli.output import print_json, print_line
from headrace.cli.session import Exit, add_client_flags, connected


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Exit code 0: the server takes jobs. 1: its disk refuses writes. 4: it does not answer."
    parser.add_argument("--timeout", metavar="SPAN", default="5s", help="how long it may take to answer (default: 5s)")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.commands.monitoring import StorageStatus
    from headrace.durations import seconds

    limit = seconds(arguments.timeout, "--timeout")
    with connected(arguments, limit) as client:
        storage = client.ask_blocking(StorageStatus(), limit).data
    is_well = not storage.disk_full and storage.error is None
    if arguments.as_json:
        print_json({"healthy": is_well, "storage": storage})
    elif is_well:
        print_line("healthy", "green")
    else:
        reason = notation.one_line(storage.error or "it is full")
        print_line(f"the disk refuses writes: {reason}", "red")
    return Exit.OK if is_well else Exit.FAILED
