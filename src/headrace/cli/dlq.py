"""`headrace dlq`: the dead letters of a queue, grouped by what went wrong; let them run again or remove them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice
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
    progress,
)
from headrace.cli.session import BULK_S, Exit, UsageError, add_client_flags, add_yes_flag, connected
from headrace.errors import NotFound

if TYPE_CHECKING:
    from headrace.backends.base import DeadLetter
    from headrace.client.queue import SyncQueue
    from headrace.commands.dashboard import FailureGroup

_PAGE: Final = 500
_GROUPS: Final = (
    Column("COUNT", is_number=True),
    Column("LAST", is_number=True, spared=1),
    Column("ERROR", gives_way=12),
)
_EACH: Final = (
    Column("AGE", is_number=True, spared=2),
    Column("TRIES", is_number=True, spared=3),
    Column("NAME", gives_way=8),
    Column("ERROR", gives_way=8),
    Column("ID", spared=4),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the dead letters of a queue by error, retry them, or remove them."
    parser.add_argument("queue", metavar="QUEUE", help="queue that has the dead letters")
    parser.add_argument(
        "action",
        metavar="ACTION",
        nargs="?",
        default="list",
        choices=("list", "retry", "purge", "remove"),
        help="list, retry, purge (remove all) or remove (those named) (default: list)",
    )
    parser.add_argument("ids", metavar="ID", nargs="*", default=(), help="retry, remove: which dead letters")
    parser.add_argument("--each", action="store_true", help="list: one line for each instead of groups")
    parser.add_argument("--limit", type=int, metavar="N", help="list: lines at most (default: 20); retry: the N oldest")
    parser.add_argument(
        "--error", metavar="TEXT", help="list --each, retry, remove: only those with this in their error"
    )
    parser.add_argument(
        "--reason", metavar="REASON", help="retry: only those with this reason, such as stalled or timeout"
    )
    add_yes_flag(parser)
    add_client_flags(parser)
    parser.set_defaults(run=run)


_CHOICES: Final = {
    "list": ("--error",),
    "retry": ("ID", "--error", "--reason"),
    "remove": ("ID", "--error"),
    "purge": (),
}
"""How an action can be told which dead letters are meant."""


def run(arguments: argparse.Namespace) -> int:
    from headrace.client.queue import SyncQueue

    _check_choice(arguments)
    with connected(arguments) as client:
        return _ACTIONS[arguments.action](arguments, SyncQueue(client, arguments.queue))


def _check_choice(arguments: argparse.Namespace) -> None:
    """A choice that is not heeded would act on more than was meant, and nobody would notice."""
    chosen = {"ID": arguments.ids or None, "--error": arguments.error, "--reason": arguments.reason}
    given = [flag for flag, value in chosen.items() if value is not None]
    known = _CHOICES[arguments.action]
    if arguments.action == "purge" and (given or arguments.limit is not None):
        raise UsageError("purge removes all dead letters of a queue: `remove` takes ids or an --error")
    if strange := [flag for flag in given if flag not in known]:
        raise UsageError(f"{arguments.action} does not take {strange[0]}, only {' or '.join(known)}")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both say which dead letters are meant: give one of them")
    if arguments.action == "list" and given and not arguments.each:
        raise UsageError("--error chooses single dead letters, and these are groups of them: add --each")
    if arguments.limit is not None and arguments.limit < 1:
        raise UsageError("--limit must be at least 1")


def show(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    limit = 20 if arguments.limit is None else arguments.limit
    total = queue.dlq.stats().total
    if arguments.each:
        return _show_each(
            arguments, list(islice(_letters(queue, arguments.error, brief=not arguments.as_json), limit)), total
        )
    from headrace.commands.dashboard import DashboardFailures

    found = queue.call(DashboardFailures(queue=queue.name, limit=limit)).data
    if arguments.as_json:
        for group in found.groups:
            print_json_line(group)
    elif not total:
        note(f"{queue.name} has no dead letters")
    else:
        print_table(_GROUPS, [_group_row(group, found.timestamp) for group in found.groups])
        examined = "" if found.examined == found.total else f" (the newest {found.examined:,} of them were looked at)"
        note(f"{total:,} in all{examined}; --each shows each, `headrace dlq {queue.name} retry` runs them again")
    return 0


def _group_row(group: FailureGroup, now_ms: float) -> list[Cell]:
    count = Styled(notation.count(group.count), "red")
    return [count, notation.age(group.last_seen, now_ms), notation.one_line(group.error)]


def _show_each(arguments: argparse.Namespace, letters: list[DeadLetter], total: int) -> int:
    if arguments.as_json:
        for letter in letters:
            print_json_line(letter)
        return 0
    if not letters:
        note(f"{arguments.queue} has no such dead letters" if total else f"{arguments.queue} has no dead letters")
        return 0
    now_ms = time.time() * 1000
    print_table(_EACH, [_row(letter, now_ms) for letter in letters])
    if arguments.error is None and len(letters) < total:
        note(f"{len(letters):,} of {total:,}; more with --limit N")
    return 0


def _row(letter: DeadLetter, now_ms: float) -> list[Cell]:
    from headrace.client.job import decode_job

    job = decode_job(letter.job)
    return [
        notation.duration(max(0.0, now_ms - letter.entered_at)),
        str(job.attempts),
        notation.one_line(job.name),
        Styled(notation.first_line(letter.error) or _without_error(letter.reason), "red"),
        notation.one_line(job.id),
    ]


def _without_error(reason: str) -> str:
    return "(no error text)" if reason == "unknown" else reason


def _letters(queue: SyncQueue, error: str | None, *, brief: bool = True) -> Iterator[DeadLetter]:
    """All dead letters, or those whose error has this text in it, page by page."""
    offset = 0
    while page := queue.dlq.list(_PAGE, offset, brief=brief):
        yield from (letter for letter in page if error is None or error in (letter.error or ""))
        offset += len(page)


def _ids_with(queue: SyncQueue, arguments: argparse.Namespace) -> list[str]:
    from headrace.client.job import decode_job

    return [decode_job(letter.job).id for letter in islice(_letters(queue, arguments.error), arguments.limit)]


def retry(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    from headrace.commands.dlq import GivenFilter, RetryDeadLetters

    if arguments.error is not None:
        arguments.ids = _ids_with(queue, arguments)
    if arguments.ids or arguments.error is not None:
        missing = [job_id for job_id in arguments.ids if not queue.dlq.retry(job_id)]
        return _tell(arguments, queue, "retried", len(arguments.ids) - len(missing), missing)
    chosen = None if arguments.reason is None else GivenFilter(reason=arguments.reason)
    asked = RetryDeadLetters(queue=queue.name, count=arguments.limit, filter=chosen)
    with progress(f"retry {queue.name}", None):
        count = queue.call(asked, BULK_S).count
    return _tell(arguments, queue, "retried", count, [])


def remove(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    if arguments.error is not None:
        arguments.ids = _ids_with(queue, arguments)
        confirm(f"Remove {_count(len(arguments.ids))} of {queue.name}", arguments.yes)
    elif not arguments.ids:
        raise UsageError("which ones? Name their ids or an --error, or use `purge` for all")
    missing = [job_id for job_id in arguments.ids if not queue.dlq.remove(job_id)]
    return _tell(arguments, queue, "removed", len(arguments.ids) - len(missing), missing)


def purge(arguments: argparse.Namespace, queue: SyncQueue) -> int:
    from headrace.commands.dlq import PurgeDeadLetters

    confirm(f"Remove {_count(queue.dlq.stats().total)} of {queue.name}", arguments.yes)
    with progress(f"purge {queue.name}", None):
        count = queue.call(PurgeDeadLetters(queue=queue.name), BULK_S).count
    return _tell(arguments, queue, "removed", count, [])


def _count(number: int) -> str:
    return notation.counted(number, "dead letter")


def _tell(arguments: argparse.Namespace, queue: SyncQueue, verb: str, count: int, missing: list[str]) -> int:
    if arguments.as_json:
        print_json({"queue": queue.name, verb: count, "missing": missing})
    else:
        print_line(f"{verb} {_count(count)} of {queue.name}")
    if missing:
        raise NotFound(f"no dead letters of {queue.name}: {', '.join(missing)}")
    return Exit.OK


_ACTIONS: Final[dict[str, Callable[[argparse.Namespace, SyncQueue], int]]] = {
    "list": show,
    "retry": retry,
    "purge": purge,
    "remove": remove,
}
