"""`headrace jobs`: the jobs of a queue as people recognise them: name, age, attempt, an excerpt or the error."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from headrace import notation
from headrace.cli.output import Cell, Column, Styled, note, payload_of, print_json_line, print_table, state_cell
from headrace.cli.session import add_client_flags, connected

if TYPE_CHECKING:
    from msgspec import Raw

    from headrace.client.client import Client
    from headrace.client.job import JobInfo

STATES: Final = ("waiting", "prioritized", "delayed", "active", "completed", "failed", "waiting-children")
_MAX_FOUND: Final = 500
"""Jobs that one search may find."""
_COLUMNS: Final = (
    Column("STATE"),
    Column("AGE", is_number=True, spared=2),
    Column("TRY", is_number=True, spared=3),
    Column("NAME", gives_way=8),
    Column("ABOUT", gives_way=8, spared=1),
    Column("ID", spared=4),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the jobs of a queue, the oldest first. With --json one line per job with all its fields."
    parser.add_argument("queue", metavar="QUEUE", help="queue to list")
    add_state_flag(parser)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="how many at most (default: 20)")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="skip the first N (default: 0)")
    parser.add_argument("--newest", action="store_true", help="the newest first")
    parser.add_argument(
        "--search", metavar="TEXT", help="only those with this in their id, name, tags, error or data, the newest first"
    )
    add_client_flags(parser)
    parser.set_defaults(run=run)


def add_state_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", action="append", choices=STATES, metavar="STATE", help=f"only these: {', '.join(STATES)}"
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.client.job import decode_job

    with connected(arguments) as client:
        found = _page(client, arguments) if arguments.search is None else list(_search(client, arguments))
    if arguments.as_json:
        for job in found:
            print_json_line(job)
        return 0
    if not found:
        note(_nothing(arguments))
        return 0
    now_ms = time.time() * 1000
    print_table(_COLUMNS, [_row(decode_job(job), now_ms) for job in found])
    if len(found) == arguments.limit and arguments.search is None:
        note(f"the first {arguments.limit}; more with --limit N or --offset {arguments.offset + arguments.limit}")
    return 0


def _page(client: Client, arguments: argparse.Namespace) -> list[Raw]:
    from headrace.commands.queries import GetJobs

    asked = GetJobs(
        queue=arguments.queue,
        state=arguments.state,
        limit=arguments.limit,
        offset=arguments.offset,
        asc=not arguments.newest,
        brief=not arguments.as_json,
    )
    return client.ask_blocking(asked).jobs


def _search(client: Client, arguments: argparse.Namespace) -> Iterator[Raw]:
    """One request looks at so many jobs; the next ones go on from there until enough are found."""
    from headrace.commands.queries import SearchJobs

    left, cursor = arguments.limit, None
    while left > 0:
        limit = min(left, _MAX_FOUND)
        asked = SearchJobs(
            queue=arguments.queue,
            text=arguments.search,
            state=arguments.state,
            limit=limit,
            cursor=cursor,
            brief=not arguments.as_json,
        )
        page = client.ask_blocking(asked)
        yield from page.jobs
        left, cursor = left - len(page.jobs), page.cursor
        if cursor is None:
            return


def _nothing(arguments: argparse.Namespace) -> str:
    if arguments.search is not None:
        return f"{arguments.queue} has no such jobs with {arguments.search!r} in them"
    if arguments.state:
        return f"{arguments.queue} has no {' or '.join(arguments.state)} jobs"
    return f'{arguments.queue} has no jobs; add one with: headrace push {arguments.queue} NAME \'{{"some": "data"}}\''


def _row(job: JobInfo, now_ms: float) -> list[Cell]:
    return [
        state_cell(job.state),
        notation.duration(max(0.0, now_ms - job.created_at)),
        f"{attempt(job)}/{job.max_attempts}",
        notation.one_line(job.name),
        _about(job),
        notation.one_line(job.id),
    ]


def attempt(job: JobInfo) -> int:
    """The current or next attempt, or the last one of a job that has ended; as on the dashboard (`parts.js`)."""
    return job.attempts + (job.state != "failed")


def _about(job: JobInfo) -> Cell:
    error: Any = job.failed_reason
    return Styled(notation.first_line(error), "red") if error else notation.excerpt(payload_of(job.encoded_data))
