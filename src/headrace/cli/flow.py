"""`headrace flow`: workflows from the shell: list them, show one as a timeline, cancel, signal and retry it."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from headrace import notation
from headrace.cli.jobflags import read_data
from headrace.cli.output import (
    Cell,
    Column,
    Styled,
    console,
    is_terminal,
    note,
    print_json,
    print_json_line,
    print_line,
    print_table,
    state_cell,
)
from headrace.cli.session import add_client_flags, advised, connected, url_of
from headrace.errors import InvalidCommand, NotFound

if TYPE_CHECKING:
    from headrace.model import Flow, FlowStatus
    from headrace.workflows.provider import Workflows
    from headrace.workflows.timeline import Bar, Timeline

Action = Callable[["Workflows", argparse.Namespace], Awaitable[None]]
_COLUMNS: Final = (
    Column("ID", gives_way=12),
    Column("WORKFLOW", gives_way=12),
    Column("STATUS"),
    Column("AGE", is_number=True, spared=1),
    Column("TOOK", is_number=True, spared=2),
)
_CAUSES: Final = {
    "step": "a step failed",
    "timeout": "it did not end in time",
    "cancel": "it was cancelled",
    "complete": "all steps were done, but what runs on completion failed",
}
_STYLES: Final = {"running": "bright_blue", "compensating": "magenta", "cancelled": "bright_black"}
_WIDTH: Final = 40
_LEAST: Final = 10
_MARKS: Final = {
    "completed": "█",
    "failed": "▒",
    "retried": "░",
    "rolled-back": "◄",
    "rollback-failed": "!",
    "waiting": "·",
}


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Workflows: list and show them; cancel, signal or retry one."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listed = _add(actions, "list", "flows, by id", "List flows by id, the highest first.", _list)
    listed.add_argument("--workflow", metavar="NAME", help="only those of this workflow")
    listed.add_argument("--status", metavar="STATUS", help="only those that are running, failed and so on")
    listed.add_argument("--limit", type=int, default=20, metavar="N", help="lines at most (default: 20)")
    _add_for_one(actions, "show", "what happened in it", "What happened in a flow, and when.", _show)
    cancel = _add_for_one(actions, "cancel", "stop one", "Cancel a flow and roll back its completed steps.", _cancel)
    cancel.add_argument("--reason", metavar="TEXT", default="", help="kept in its log")
    cancel.add_argument("--keep", action="store_true", help="do not roll back what was done")
    signal = _add_for_one(actions, "signal", "let one go on", "Send a flow the signal it waits for.", _signal)
    signal.add_argument("name", metavar="NAME", help="of the signal")
    signal.add_argument("payload", metavar="JSON", nargs="?", help="its payload; @FILE reads a file, - reads stdin")
    _add_for_one(
        actions,
        "retry",
        "start one again",
        "Run a failed flow again, from the first step whose result was not kept.",
        _retry,
    )


def _add(actions: Any, name: str, summary: str, description: str, action: Action) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=description)
    add_client_flags(parser)
    parser.set_defaults(run=lambda arguments: _run(action, arguments))
    return parser


def _add_for_one(actions: Any, *given: Any) -> argparse.ArgumentParser:
    parser = _add(actions, *given)
    parser.add_argument("id", metavar="ID", help="of the flow")
    return parser


def _run(action: Action, arguments: argparse.Namespace) -> int:
    with connected(arguments):  # says in plain words when there is nobody to talk to
        asyncio.run(_act(action, arguments))
    return 0


async def _act(action: Action, arguments: argparse.Namespace) -> None:
    from headrace.workflows.provider import Workflows

    async with Workflows(url_of(arguments)) as flows:
        try:
            await action(flows, arguments)
        except NotFound as error:
            raise advised(error, "`headrace flow list` lists those that are there; --url names another place") from None


async def _list(flows: Workflows, arguments: argparse.Namespace) -> None:
    from headrace.model import FlowStatus

    status = None if arguments.status is None else _known_status(FlowStatus, arguments.status)
    found = await flows.list(arguments.workflow, status, arguments.limit)
    if arguments.as_json:
        for flow in found:
            print_json_line(flow)
    elif found:
        print_table(_COLUMNS, [_row(flow, time.time() * 1000) for flow in found])
    elif arguments.workflow is not None or status is not None:
        note("no such flows")
    else:
        note("no flows; start them with flows.execute(...), see docs/workflows.md")


def _row(flow: Flow, now: float) -> list[Cell]:
    took = None if flow.ended_at is None else flow.ended_at - flow.created_at
    return [
        notation.one_line(flow.id),
        notation.one_line(flow.workflow),
        _status_cell(flow.status),
        notation.age(flow.created_at, now),
        notation.duration(took),
    ]


def _status_cell(status: FlowStatus) -> Styled:
    word = status.value
    return Styled(word, _STYLES[word]) if word in _STYLES else state_cell(word)


def _known_status(kind: type[FlowStatus], given: str) -> FlowStatus:
    try:
        return kind(given)
    except ValueError:
        raise InvalidCommand(f"{given!r} is not a status; there are: {', '.join(kind)}") from None


async def _show(flows: Workflows, arguments: argparse.Namespace) -> None:
    timeline = await (await flows.get_handle(arguments.id)).timeline()
    if arguments.as_json:
        print_json(timeline)
        return
    for line in drawing(timeline, time.time() * 1000, console().width if is_terminal() else None):
        print_line(notation.one_line(line))


async def _cancel(flows: Workflows, arguments: argparse.Namespace) -> None:
    handle = await flows.get_handle(arguments.id)
    done = await handle.cancel(compensate=not arguments.keep, reason=arguments.reason)
    status = (await handle.status()).value
    if arguments.as_json:
        print_json({"id": arguments.id, "cancelled": done, "status": status})
    else:
        print_line(f"{arguments.id} is {'being stopped' if done else status + ' already'}")


async def _signal(flows: Workflows, arguments: argparse.Namespace) -> None:
    payload = read_data(arguments.payload, "the payload")
    await (await flows.get_handle(arguments.id)).signal(arguments.name, payload)
    if arguments.as_json:
        print_json({"id": arguments.id, "signal": arguments.name})
    else:
        print_line(f"{arguments.id} has the signal {arguments.name}")


async def _retry(flows: Workflows, arguments: argparse.Namespace) -> None:
    again = await flows.retry(arguments.id)
    if arguments.as_json:
        print_json({"id": again.id, "retryOf": arguments.id})
    else:
        print_line(again.id)


# -- drawing -----------------------------------------------------------------------------------------------------------


def drawing(timeline: Timeline, now: float, columns: int | None = None) -> list[str]:
    """The flow as lines of text: a bar for every attempt, rollbacks below the steps; within `columns`, if there are."""
    last = max((bar.ended_at or bar.began_at for bar in timeline.bars), default=timeline.began_at)
    until = timeline.ended_at or max(now, last)  # this clock may be behind the store's
    span = max(1.0, until - timeline.began_at)
    labels = max((len(_label(bar)) for bar in timeline.bars), default=0)
    outcomes = max((len(_outcome(bar, until)) for bar in timeline.bars), default=0)
    width = _WIDTH if columns is None else min(_WIDTH, max(_LEAST, columns - labels - outcomes - 6))
    began = notation.moment(timeline.began_at)
    lines = [f"{timeline.id}  {timeline.workflow} v{timeline.version}  {timeline.status.value}  {began}"]
    for bar in timeline.bars:
        drawn = _drawn(bar, timeline.began_at, until, width / span, width)
        why = f"  {bar.error.type}: {bar.error.message}" if bar.error is not None else ""
        lines.append(notation.one_line(f"  {_label(bar).ljust(labels)} |{drawn}| {_outcome(bar, until)}{why}", columns))
    if timeline.cause is not None:
        error = timeline.error
        told = () if error is None else (error.type, error.message)
        lines.append(": ".join(filter(None, (_CAUSES.get(timeline.cause, timeline.cause), *told))))
    return lines


def _label(bar: Bar) -> str:
    return f"{'undo ' if bar.role == 'rollback' else ''}{bar.step}"


def _outcome(bar: Bar, until: float) -> str:
    outcome = "cut short" if bar.outcome == "waiting" and bar.ended_at is not None else bar.outcome.replace("-", " ")
    took = notation.duration((bar.ended_at or until) - bar.began_at)
    return f"{took:>6}  {f'#{bar.attempt} ' if bar.attempt else ''}{outcome}"


def _drawn(bar: Bar, began: float, until: float, scale: float, width: int) -> str:
    first = min(width - 1, int((bar.began_at - began) * scale))
    length = max(1, min(width - first, round(((bar.ended_at or until) - bar.began_at) * scale)))
    return f"{' ' * first}{_MARKS.get(bar.outcome, '·') * length}".ljust(width)
