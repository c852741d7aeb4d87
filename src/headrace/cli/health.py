"""`headrace health`: one line and an exit code, for probes of containers and monitors."""

from __future__ import annotations

import argparse

from headrace import notation
from headrace.cli.output import print_json, print_line
from headrace.cli.session import Exit, UsageError, add_client_flags, connected


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Exit code 0: the server takes jobs. 1: it cannot store them. 4: it does not answer."
    parser.add_argument("--timeout", metavar="SPAN", default="5s", help="how long it may take to answer (default: 5s)")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.commands.monitoring import StorageStatus
    from headrace.durations import seconds

    limit = seconds(arguments.timeout, "--timeout")
    if not limit:
        raise UsageError("--timeout must be longer than 0")
    with connected(arguments, limit) as client:
        storage = client.ask_blocking(StorageStatus(), limit).data
    is_well = not storage.disk_full and storage.error is None
    if arguments.as_json:
        print_json({"healthy": is_well, "storage": storage})
    elif is_well:
        print_line("healthy", "green")
    else:
        reason = notation.one_line(storage.error or "the disk is full")
        print_line(f"nothing can be stored: {reason}", "red")
    return Exit.OK if is_well else Exit.FAILED
