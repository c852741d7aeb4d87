"""`headrace cron`: schedules of the server, and when an expression runs next (for that no server is needed)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from headrace import notation
from headrace.cli.jobflags import read_data
from headrace.cli.output import Cell, Column, note, print_json, print_json_line, print_line, print_table
from headrace.cli.session import add_client_flags, advised, connected
from headrace.errors import NotFound

if TYPE_CHECKING:
    from headrace.commands.cron import CronView
    from headrace.schedules import Schedule

_COLUMNS: Final = (
    Column("NAME", gives_way=12),
    Column("QUEUE", gives_way=8, spared=3),
    Column("SCHEDULE", gives_way=11, spared=2),
    Column("ZONE", spared=5),
    Column("NEXT", is_number=True, spared=1),
    Column("RUNS", is_number=True, spared=4),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Schedules: jobs that are added at set times."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _prepare_list(actions)
    _prepare_add(actions)
    _prepare_delete(actions)
    _prepare_next(actions)


def _prepare_list(actions: Any) -> None:
    parser = actions.add_parser("list", help="all schedules", description="List all schedules.")
    parser.add_argument("--queue", metavar="QUEUE", help="only those of this queue")
    add_client_flags(parser)
    parser.set_defaults(run=show_all)


def _prepare_add(actions: Any) -> None:
    parser = actions.add_parser("add", help="create or replace one", description="Create or replace a schedule.")
    parser.add_argument("name", metavar="NAME", help="unique over all queues")
    parser.add_argument("queue", metavar="QUEUE", help="where its jobs go")
    timing = parser.add_mutually_exclusive_group(required=True)
    timing.add_argument("--schedule", metavar="EXPR", help="cron expression: '*/5 * * * *', '0 9 * * mon', @daily")
    timing.add_argument("--every", metavar="SPAN", help="an interval instead: 30s, 5m")
    parser.add_argument("--tz", metavar="ZONE", help="time zone of the expression, such as Europe/Berlin")
    parser.add_argument("--data", metavar="JSON", help="data of its jobs; @FILE reads a file")
    parser.add_argument("--job-name", metavar="NAME", help="name of its jobs (default: that of the schedule)")
    parser.add_argument("--priority", type=int, default=0, metavar="N", help="of its jobs (default: 0)")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N runs")
    parser.add_argument(
        "--overlap", action="store_true", help="run even while the job of the previous run has not ended"
    )
    parser.add_argument("--catch-up", action="store_true", help="make up for runs missed while no server was running")
    add_client_flags(parser)
    parser.set_defaults(run=add)


def _prepare_delete(actions: Any) -> None:
    parser = actions.add_parser("delete", help="delete one", description="Delete a schedule; its jobs stay.")
    parser.add_argument("name", metavar="NAME", help="of the schedule")
    add_client_flags(parser)
    parser.set_defaults(run=delete)


def _prepare_next(actions: Any) -> None:
    parser = actions.add_parser(
        "next",
        help="when an expression runs",
        description="When a cron expression runs next, daylight saving included. Needs no server.",
    )
    parser.add_argument("expression", metavar="EXPR", help="5 fields, 6 with leading seconds, or @daily and the like")
    parser.add_argument("--tz", metavar="ZONE", help="such as Europe/Berlin (default: that of this machine)")
    parser.add_argument("-n", type=int, default=5, dest="number", metavar="N", help="how many (default: 5)")
    add_client_flags(parser)
    parser.set_defaults(run=show_next)


def show_all(arguments: argparse.Namespace) -> int:
    from headrace.commands.cron import CronList

    with connected(arguments) as client:
        found = client.ask_blocking(CronList()).crons
    crons = [cron for cron in found if arguments.queue in (None, cron.queue)]
    if arguments.as_json:
        for cron in crons:
            print_json_line(cron)
        return 0
    if not crons:
        note("no schedules; add one with: headrace cron add NAME QUEUE --schedule '0 9 * * *' --tz Europe/Berlin")
        return 0
    print_table(_COLUMNS, [_row(cron, time.time() * 1000) for cron in crons])
    return 0


def _row(cron: CronView, now_ms: float) -> list[Cell]:
    from msgspec import UNSET

    from headrace.durations import written

    runs = notation.count(cron.executions)
    return [
        notation.one_line(cron.name),
        cron.queue,
        notation.one_line(cron.schedule or f"every {written(cron.repeat_every or 0)}"),
        "" if cron.timezone is UNSET else str(cron.timezone),
        notation.age(cron.next_run, now_ms),
        runs if cron.max_limit is UNSET else f"{runs} of {cron.max_limit}",
    ]


def add(arguments: argparse.Namespace) -> int:
    from headrace.client.queue import SyncQueue

    data = read_data(arguments.data, "--data")
    with connected(arguments, may_create=True) as client:
        cron = SyncQueue(client, arguments.queue).schedule(
            arguments.name,
            data,
            cron=arguments.schedule,
            every=arguments.every,
            tz=arguments.tz,
            job_name=arguments.job_name,
            priority=arguments.priority,
            limit=arguments.limit,
            overlap=arguments.overlap,
            catch_up=arguments.catch_up,
        )
    if arguments.as_json:
        print_json(cron)
    else:
        due = f"{notation.moment(cron.next_run)} ({notation.age(cron.next_run, time.time() * 1000)})"
        print_line(f"{cron.name} pushes to {cron.queue}, next {due}")
    return 0


def delete(arguments: argparse.Namespace) -> int:
    from headrace.commands.cron import CronDelete

    with connected(arguments) as client:
        try:
            client.ask_blocking(CronDelete(name=arguments.name))
        except NotFound:
            hint = "`headrace cron list` lists those that are there"
            raise advised(NotFound(f"there is no schedule {arguments.name}"), hint) from None
    if arguments.as_json:
        print_json({"name": arguments.name, "deleted": True})
    else:
        print_line(f"deleted {arguments.name}; the jobs it pushed stay")
    return 0


def show_next(arguments: argparse.Namespace) -> int:
    from headrace.schedules import parse_schedule

    schedule = parse_schedule(arguments.expression, arguments.tz)
    now_ms = time.time() * 1000
    for due in _runs(schedule, now_ms, arguments.number):
        if arguments.as_json:
            print_json_line({"at": due, "time": notation.moment(due, schedule.zone)})
        else:
            print_line(f"{notation.moment(due, schedule.zone)}  {notation.age(due, now_ms)}")
    return 0


def _runs(schedule: Schedule, after_ms: float, number: int) -> Iterator[int]:
    due = after_ms
    for _ in range(number):
        due = schedule.next_after(due)
        yield due
