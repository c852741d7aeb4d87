"""`headrace queues`: all queues at a glance, and what can be done to one of them.

What cannot be undone asks first and says how many jobs it is about. To add an action: a function here, its parser in
`prepare`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from headrace import notation
from headrace.cli.jobs import STATES
from headrace.cli.output import (
    Cell,
    Column,
    Styled,
    confirm,
    count_cell,
    note,
    print_fields,
    print_json,
    print_json_line,
    print_line,
    print_table,
    progress,
    state_cell,
)
from headrace.cli.session import BULK_S, UsageError, add_action, add_client_flags, add_yes_flag, advised, connected
from headrace.errors import InvalidCommand, NotFound

if TYPE_CHECKING:
    from headrace.client.client import Client
    from headrace.client.queue import SyncQueue
    from headrace.commands.dashboard import QueueRow

PAGE: Final = 500
CLEANABLE: Final = tuple(state for state in STATES if state != "active")
CLEANING: Final = 5000
"""Jobs that one command cleans away, so that the server is never busy for long."""
OFF: Final = "off"
_ALWAYS_SHOWN: Final = ("waiting", "active", "failed", "completed")


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "List all queues with their jobs by state, or do something to one of them."
    add_client_flags(parser)
    parser.set_defaults(run=show_all)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    _add(actions, "show", show, "one queue with its limits and settings")
    _add(actions, "pause", pause, "stop handing out its jobs; running ones continue")
    _add(actions, "resume", resume, "hand out its jobs again")
    limit = _add(actions, "limit", set_limits, "limit how fast its jobs are handed out, and how many run at once")
    limit.add_argument("--rate", metavar="N/SPAN", help=f"for example 100/s, 30/m or 500/10s; {OFF} for no limit")
    limit.add_argument(
        "--concurrency", metavar="N", help=f"jobs that run at once, across all workers; {OFF} for no limit"
    )
    drain_parser = _add(actions, "drain", drain, "remove all waiting and delayed jobs")
    clean_parser = _add(
        actions, "clean", clean, "remove waiting, delayed, completed and failed jobs, or those of one state, by age"
    )
    clean_parser.add_argument("--state", choices=CLEANABLE, metavar="STATE", help=f"one of {', '.join(CLEANABLE)}")
    clean_parser.add_argument("--older-than", metavar="SPAN", default="0s", help="only those older than this")
    clean_parser.add_argument("--limit", type=int, metavar="N", help="how many at most (default: all)")
    obliterate_parser = _add(actions, "obliterate", obliterate, "remove the queue with everything in it")
    for destructive in (drain_parser, clean_parser, obliterate_parser):
        add_yes_flag(destructive)


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
    parser = add_action(actions, name, summary)
    parser.add_argument("queue", metavar="NAME", help="of the queue")
    add_client_flags(parser)
    parser.set_defaults(run=run)
    return parser


# -- looking -----------------------------------------------------------------------------------------------------------

_COLUMNS: Final = (
    Column("QUEUE", gives_way=16),
    Column("WAITING", is_number=True),
    Column("ACTIVE", is_number=True, spared=3),
    Column("DELAYED", is_number=True, spared=6),
    Column("BLOCKED", is_number=True, spared=7),
    Column("FAILED", is_number=True, spared=1),
    Column("DONE", is_number=True, spared=5),
    Column("OLDEST", is_number=True, spared=4),
    Column("STATE", spared=2),
)


def show_all(arguments: argparse.Namespace) -> int:
    with connected(arguments) as client:
        rows = list(_rows(client))
        blocked = _blocked(client)
    if arguments.as_json:
        for row in rows:
            print_json_line(_document(row, blocked.get(row.name, 0)))
        return 0
    if not rows:
        note('no queues yet; the first job makes one: headrace push mail welcome \'{"to": "ada"}\'')
        return 0
    has_blocked = any(blocked.values())
    shown = [column for column in _COLUMNS if has_blocked or column.title != "BLOCKED"]
    print_table(shown, [_cells(row, blocked.get(row.name, 0) if has_blocked else None) for row in rows])
    return 0


def _rows(client: Client) -> Iterator[QueueRow]:
    """All queues, however many pages they fill."""
    from headrace.commands.dashboard import DashboardQueues

    offset = 0
    while True:
        page = client.ask_blocking(DashboardQueues(limit=PAGE, offset=offset)).data
        yield from page.queues
        offset += PAGE
        if offset >= page.total:
            return


def _blocked(client: Client) -> dict[str, int]:
    """Jobs that wait for their children."""
    from headrace.commands.queues import SummarizeQueues

    return {queue.name: queue.counts.waiting_children for queue in client.ask_blocking(SummarizeQueues()).queues}


def _document(row: QueueRow, blocked: int) -> dict[str, Any]:
    import msgspec

    return {**msgspec.to_builtins(row), "waitingChildren": blocked}


def _cells(row: QueueRow, blocked: int | None) -> list[Cell]:
    return [
        row.name,
        count_cell(row.waiting, "waiting"),
        count_cell(row.active, "active"),
        count_cell(row.delayed, "delayed"),
        *([] if blocked is None else [count_cell(blocked, "waiting-children")]),
        count_cell(row.dlq, "failed"),
        notation.count(row.completed),
        notation.duration(row.oldest_waiting_ms) if row.waiting else "",
        Styled("‖ paused" if row.paused else "", state_cell("paused").style),
    ]


def show(arguments: argparse.Namespace) -> int:
    from headrace.client.queue import SyncQueue

    with connected(arguments) as client:
        queue = SyncQueue(client, arguments.queue)
        known = _known(client, arguments.queue)
        limits, stalls, burial = queue.limits(), queue.stalls(), queue.dlq.config()
        counts = queue.counts()
    if arguments.as_json:
        settings = {"limits": limits, "stalls": stalls, "dlq": burial}
        print_json(_document(known, counts["waiting-children"]) | settings)
        return 0
    rate = limits.rate_limit
    print_fields(
        [
            ("queue", known.name),
            ("paused", "yes" if known.paused else ""),
            *((state, count_cell(counts[state], state)) for state in STATES if counts[state] or state in _ALWAYS_SHOWN),
            ("oldest", notation.duration(known.oldest_waiting_ms) if known.waiting else ""),
            ("rate limit", "" if rate is None else f"{rate.max:g} per {notation.duration(rate.duration)}"),
            ("at once", "" if limits.concurrency_limit is None else str(limits.concurrency_limit)),
            ("dead letters", f"kept for {notation.duration(burial.max_age)}" if burial.max_age else "kept for ever"),
        ]
    )
    return 0


def _known(client: Client, name: str) -> QueueRow:
    for row in _rows(client):
        if row.name == name:
            return row
    raise advised(NotFound(f"there is no queue {name}"), "`headrace queues` lists them; the first job makes one")


# -- steering ----------------------------------------------------------------------------------------------------------


def _done(arguments: argparse.Namespace, text: str, **facts: Any) -> int:
    if arguments.as_json:
        print_json({"queue": arguments.queue, **facts})
    else:
        print_line(text)
    return 0


def pause(arguments: argparse.Namespace) -> int:
    with _queue(arguments) as queue:
        queue.pause()
    return _done(arguments, f"paused {arguments.queue}", paused=True)


def resume(arguments: argparse.Namespace) -> int:
    with _queue(arguments) as queue:
        queue.resume()
    return _done(arguments, f"resumed {arguments.queue}", paused=False)


def set_limits(arguments: argparse.Namespace) -> int:
    if arguments.rate is None and arguments.concurrency is None:
        raise UsageError("limit what? Give --rate 100/s, --concurrency 5, or off to lift one")
    rate, concurrency = _rate(arguments.rate), _concurrency(arguments.concurrency)
    with _queue(arguments) as queue:
        if arguments.rate is not None:
            queue.limit_rate(rate)
        if arguments.concurrency is not None:
            queue.limit_concurrency(concurrency)
        limits = queue.limits()
    return _done(arguments, f"limits of {arguments.queue} are set", limits=limits)


def _rate(text: str | None) -> Any:
    from headrace.client.options import RateLimit
    from headrace.durations import seconds

    if text is None or text == OFF:
        return None
    number, slash, span = text.partition("/")
    try:
        per = seconds(span if span[:1].isdigit() else f"1{span}") if slash else 1.0
        limit = RateLimit(float(number), per)
    except (ValueError, InvalidCommand):
        raise UsageError(f"--rate {text!r} is not understood: write for example 100/s, 30/m or {OFF}") from None
    if not limit.max:
        raise _nothing_at_all(f"--rate {text}", "--rate")
    return limit


def _nothing_at_all(given: str, flag: str) -> Exception:
    """A limit of 0 looks like none at all and means the opposite: the server would hold every job back, in silence."""
    advice = f"to hold its jobs back: `headrace queues pause NAME`; to lift the limit: {flag} {OFF}"
    return advised(UsageError(f"{given} would let no job through"), advice)


def _concurrency(text: str | None) -> int | None:
    if text is None or text == OFF:
        return None
    if not text.isdecimal():
        raise UsageError(f"--concurrency {text!r} is not a whole number; {OFF} lifts the limit")
    if not int(text):
        raise _nothing_at_all(f"--concurrency {text}", "--concurrency")
    return int(text)


@contextmanager
def _queue(arguments: argparse.Namespace) -> Iterator[SyncQueue]:
    """The queue that is meant, connected."""
    from headrace.client.queue import SyncQueue

    with connected(arguments) as client:
        queue = SyncQueue(client, arguments.queue)
        _point_out_if_new(queue)
        yield queue


def _point_out_if_new(queue: SyncQueue) -> None:
    """A queue may be prepared before its first job, but a name that no queue has is more often a typing mistake."""
    from difflib import get_close_matches

    from headrace.commands.queues import ListQueues

    if any(queue.counts().values()):
        return
    names = [known.name for known in queue.call(ListQueues()).queues]
    if queue.name not in names:
        near = get_close_matches(queue.name, names, 1)
        note(f"there is no queue {queue.name} yet" + (f"; did you mean {near[0]}?" if near else ""))


# -- removing ----------------------------------------------------------------------------------------------------------


def drain(arguments: argparse.Namespace) -> int:
    from headrace.commands.queues import Drain

    with _queue(arguments) as queue:
        counts = queue.counts()
        waiting = notation.jobs(counts["waiting"] + counts["delayed"])
        confirm(f"Remove {waiting} of {arguments.queue}, waiting and delayed ones", arguments.yes)
        with progress(f"drain {arguments.queue}", None):
            removed = queue.call(Drain(queue=arguments.queue), BULK_S).count
    return _done(arguments, f"removed {notation.jobs(removed)} of {arguments.queue}", removed=removed)


def obliterate(arguments: argparse.Namespace) -> int:
    from headrace.commands.queues import Obliterate

    with _queue(arguments) as queue:
        counts = queue.counts()
        total = sum(number for state, number in counts.items() if state != "prioritized")
        confirm(f"Remove {arguments.queue} with all its {notation.jobs(total)}, limits and settings", arguments.yes)
        with progress(f"obliterate {arguments.queue}", None):
            queue.call(Obliterate(queue=arguments.queue), BULK_S)
    return _done(arguments, f"removed {arguments.queue} with {notation.jobs(total)}", removed=total)


def clean(arguments: argparse.Namespace) -> int:
    from headrace.durations import seconds

    older_than = seconds(arguments.older_than, "--older-than")
    with _queue(arguments) as queue:
        total = _cleanable(queue.counts(), arguments.state)
        most = total if arguments.limit is None else min(total, arguments.limit)
        which = f"{arguments.state} " if arguments.state else ""
        age = f", those older than {arguments.older_than}," if older_than else ""
        confirm(f"Remove up to {most:,} {which}jobs{age} of {arguments.queue}", arguments.yes)
        removed = 0
        with progress(f"clean {arguments.queue}", most) as advance:
            while removed < most:
                gone = queue.clean(older_than, arguments.state, min(CLEANING, most - removed))
                removed += len(gone)
                advance(removed, removed)
                if len(gone) < CLEANING:
                    break
    return _done(arguments, f"removed {notation.jobs(removed)} of {arguments.queue}", removed=removed)


def _cleanable(counts: dict[str, int], state: str | None) -> int:
    if state is not None:
        return counts[state]
    return sum(counts[state] for state in ("waiting", "delayed", "completed", "failed"))
