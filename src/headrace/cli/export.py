"""`headrace export`: the jobs of a queue as JSON lines, page by page, whatever their number.

The lines hold all fields of a job; `headrace push --file` with --name-column name --id-column id --data-column data
reads them back. Jobs that change their state while the export runs may be missing or come twice: pause the queue first
when that matters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from headrace import notation
from headrace.cli.jobs import STATES, add_state_flag
from headrace.cli.output import is_terminal, note, progress
from headrace.cli.session import UsageError, add_client_flags, connected

if TYPE_CHECKING:
    from msgspec import Raw

    from headrace.client.client import Client

PAGE: Final = 4000
"""A page costs the server what it shows and what it passes by: larger ones pass by less often."""


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the jobs of a queue as JSON lines to stdout or a file, the oldest first."
    parser.add_argument("queue", metavar="QUEUE", help="queue to export")
    add_state_flag(parser)
    parser.add_argument("--output", "-o", metavar="FILE", help="(default: stdout)")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.client.queue import SyncQueue

    began = time.monotonic()
    with connected(arguments) as client:
        counts = SyncQueue(client, arguments.queue).counts()
        states = arguments.state or [state for state in STATES if state != "prioritized"]
        total = sum(counts[state] for state in states)
        out = _open(arguments.output)
        try:
            written = _write(client, arguments, out, total)
        finally:
            if out is not sys.stdout:
                out.close()
    seconds = time.monotonic() - began
    note(f"exported {notation.jobs(written)} of {arguments.queue} in {notation.duration(seconds * 1000)}")
    return 0


def _open(path: str | None) -> IO[str]:
    if path is None:
        return sys.stdout
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _write(client: Client, arguments: argparse.Namespace, out: IO[str], total: int) -> int:
    from headrace.server.jsonwire import packed_to_json

    written = 0
    # A bar between the lines on the same terminal would spoil both.
    is_shared = out is sys.stdout and is_terminal()
    with progress(f"export {arguments.queue}", total, is_quiet=is_shared) as advance:
        for page in _pages(client, arguments):
            out.writelines(f"{packed_to_json(bytes(job)).decode()}\n" for job in page)
            written += len(page)
            advance(written, written)
    out.flush()
    return written


def _pages(client: Client, arguments: argparse.Namespace) -> Iterator[list[Raw]]:
    from headrace.commands.queries import GetJobs
    from headrace.errors import ReplyTooLarge

    offset, size = 0, PAGE
    while True:
        asked = GetJobs(queue=arguments.queue, state=arguments.state, limit=size, offset=offset)
        try:
            page = client.ask_blocking(asked).jobs
        except ReplyTooLarge:
            if size == 1:
                raise
            size = max(1, size // 4)
            continue
        yield page
        if len(page) < size:
            return
        offset += size
