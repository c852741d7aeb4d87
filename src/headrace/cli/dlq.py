"""`headrace dlq`: the dead letters of a queue, grouped by what went wrong; let them run again or remove them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from headrace import notation
from headrace.cli.output import (
    Cell,
    Column,
    Styled,
    confirm,
    note,
    print_json,
    print_json_line,
    print_line,
    print_table,
)
from headrace.cli.session import Exit, UsageError, add_client_flags, add_yes_flag, connected
from headrace.errors import NotFound

if TYPE_CHECKING:
    from headrace.backends.base import DeadLetter
    from headrace.client.queue import SyncQueue

_GROUPS: Final = (
    Column("COUNT", is_number=True),
    Column("LAST", is_number=True),
    Column("ERROR", gives_way=True),
)
_EACH: Final = (
    Column("AGE", is_number=True),
    Column("TRIES", is_number=True),
    Column("NAME", gives_way=True),
    Column("ERROR", gives_way=True),
    Column("ID"),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the dead letters of a queue by error, let them run again, or remove them."
    parser.add_argument("queue", metavar="QUEUE")
    parser.add_argument(
        "action",
        metavar="ACTION",
        nargs="?",
        default="list",
        choices=("list", "retry", "purge", "remove"),
        help="list, retry, purge (remove all) or remove (those named) (default: list)",
    )
    parser.add_argument("ids", metavar="ID", nargs="*", help="retry, remove: the dead letters that are meant")
    parser.add_argument("--each", action="store_true", help="list: one line for each instead of groups")
    parser.add_argument("--limit", type=int, metavar="N", help="list: lines at most (default: 20); retry: the N oldest")
    parser.add_argument("--reason", metavar="REASON", help="retry: only those, such as stalled or timeout")
    add_yes_flag(parser)
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.client.queue import SyncQueue

    with connected(arguments) as client:
        return _ACTIONS[arguments.action](arguments, SyncQueue(client, arguments.queue))


def show(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    limit = 20 if arguments.limit is None else arguments.limit
    total = queue.dlq.stats().total
    if arguments.each:
        return _show_each(arguments, queue.dlq.list(limit), total)
    from headrace.commands.dashboard import DashboardFailures

    found = queue.call(DashboardFailures(queue=queue.name, limit=limit)).data
    if arguments.as_json:
        for group in found.groups:
            print_json_line(group)
        return 0
    if not total:
        note(f"{queue.name} has no dead letters")
        return 0
    now_ms = time.time() * 1000
    rows: list[list[Cell]] = [
        [
            Styled(notation.count(group.count), "red"),
            notation.age(group.last_seen, now_ms),
            notation.one_line(group.error),
        ]
        for group in found.groups
    ]
    print_table(_GROUPS, rows)
    examined = "" if found.examined == found.total else f" (the newest {found.examined:,} of them were looked at)"
    note(f"{total:,} in all{examined}; --each shows each, `headrace dlq {queue.name} retry` runs them again")
    return 0


def _show_each(arguments: argparse.Namespace, letters: list[DeadLetter], total: int) -> int:
    if arguments.as_json:
        for letter in letters:
            print_json_line(letter)
        return 0
    now_ms = time.time() * 1000
    print_table(_EACH, [_row(letter, now_ms) for letter in letters])
    if len(letters) < total:
        note(f"{len(letters):,} of {total:,}; more with --limit N")
    return 0


def _row(letter: DeadLetter, now_ms: float) -> list[Cell]:
    from headrace.client.job import decode_job

    job = decode_job(letter.job)
    return [
        notation.duration(max(0.0, now_ms - letter.entered_at)),
        str(job.attempts),
        notation.one_line(job.name),
        Styled(notation.first_line(letter.error) or letter.reason, "red"),
        notation.one_line(job.id),
    ]


def retry(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    if arguments.ids:
        missing = [job_id for job_id in arguments.ids if not queue.dlq.retry(job_id)]
        return _tell(arguments, queue, "retried", len(arguments.ids) - len(missing), missing)
    count = queue.dlq.retry(limit=arguments.limit, reason=arguments.reason)
    return _tell(arguments, queue, "retried", count, [])


def remove(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    if not arguments.ids:
        raise UsageError("which ones? Name their ids, or use `purge` for all")
    missing = [job_id for job_id in arguments.ids if not queue.dlq.remove(job_id)]
    return _tell(arguments, queue, "removed", len(arguments.ids) - len(missing), missing)


def purge(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    total = queue.dlq.stats().total
    letters = "dead letter" if total == 1 else "dead letters"
    confirm(f"Remove {total:,} {letters} of {queue.name}", arguments.yes)
    return _tell(arguments, queue, "removed", queue.dlq.purge(), [])


def _tell(arguments: argparse.Namespace, queue: SyncQueue, verb: str, count: int, missing: list[str]) -> int:
    if arguments.as_json:
        print_json({"queue": queue.name, verb: count, "missing": missing})
    else:
        print_line(f"{verb} {count:,} dead {'letter' if count == 1 else 'letters'} of {queue.name}")
    if missing:
        raise NotFound(f"no dead letters of {queue.name}: {', '.join(missing)}")
    return Exit.OK


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace, SyncQueue], int]]] = {
    "list": show,
    "retry": retry,
    "purge": purge,
    "remove": remove,
}
