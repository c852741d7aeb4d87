"""`headrace flow`: workflows from the shell: list them, show one as a timeline, cancel, signal and retry it."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import InvalidCommand

if TYPE_CHECKING:
    from headrace.model import FlowStatus
    from headrace.workflows.handle import FlowHandle
    from headrace.workflows.provider import Workflows
    from headrace.workflows.timeline import Bar, Timeline

DEFAULT_URL: Final = "headrace://localhost:6789"
Action = Callable[["Workflows", argparse.Namespace], Awaitable[None]]
_WIDTH: Final = 40
_MARKS: Final = {
    "completed": "█",
    "failed": "▒",
    "retried": "░",
    "rolled-back": "◄",
    "rollback-failed": "!",
    "waiting": "·",
}


def prepare(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    _list(actions.add_parser("list", help="the latest flows"))
    _add(actions, "show", "what happened in a flow, and when", _show).add_argument(
        "--json", action="store_true", help="as JSON, with every error and traceback"
    )
    cancel = _add(actions, "cancel", "stop a flow and take back what it did", _cancel)
    cancel.add_argument("--reason", default="", help="kept in its log")
    cancel.add_argument("--keep", action="store_true", help="do not take back what was done")
    signal = _add(actions, "signal", "give a flow the signal it waits for", _signal)
    signal.add_argument("name")
    signal.add_argument("payload", nargs="?", default="null", help="JSON; null if left out")
    _add(actions, "retry", "begin a failed flow anew where its work was not kept", _retry)


def _list(parser: argparse.ArgumentParser) -> None:
    _connect(parser, _list_flows)
    parser.add_argument("--workflow")
    parser.add_argument("--status")
    parser.add_argument("--limit", type=int, default=20)


def _add(actions: argparse._SubParsersAction, name: str, text: str, action: Action) -> argparse.ArgumentParser:  # type: ignore[type-arg]
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text)
    parser.add_argument("id", help="the id of the flow")
    _connect(parser, action)
    return parser


def _connect(parser: argparse.ArgumentParser, action: Action) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"where the flows are (default: {DEFAULT_URL})")
    parser.set_defaults(run=lambda arguments: asyncio.run(_act(action, arguments)))


async def _act(action: Action, arguments: argparse.Namespace) -> int:
    from headrace.workflows.provider import Workflows

    async with Workflows(arguments.url or DEFAULT_URL) as flows:
        await action(flows, arguments)
    return 0


async def _list_flows(flows: Workflows, arguments: argparse.Namespace) -> None:
    from headrace.model import FlowStatus

    status = None if arguments.status is None else _known_status(FlowStatus, arguments.status)
    for flow in await flows.list(arguments.workflow, status, arguments.limit):
        print(f"{flow.id}  {flow.workflow}  {flow.status.value}  {_time(flow.created_at)}")


def _known_status(kind: type[FlowStatus], given: str) -> FlowStatus:
    try:
        return kind(given)
    except ValueError:
        raise InvalidCommand(f"{given!r} is no status; there are: {', '.join(kind)}") from None


async def _show(flows: Workflows, arguments: argparse.Namespace) -> None:
    import msgspec

    timeline = await (await flows.get_handle(arguments.id)).timeline()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(timeline)).decode())
    else:
        print("\n".join(drawing(timeline)))


async def _cancel(flows: Workflows, arguments: argparse.Namespace) -> None:
    handle: FlowHandle[Any] = await flows.get_handle(arguments.id)
    done = await handle.cancel(compensate=not arguments.keep, reason=arguments.reason)
    print(f"{arguments.id} is {'being stopped' if done else (await handle.status()).value + ' already'}")


async def _signal(flows: Workflows, arguments: argparse.Namespace) -> None:
    try:
        payload = json.loads(arguments.payload)
    except ValueError as error:
        raise InvalidCommand(f"the payload is no JSON: {error}; texts need quotes: '\"yes\"'") from None
    await (await flows.get_handle(arguments.id)).signal(arguments.name, payload)
    print(f"{arguments.id} has the signal {arguments.name}")


async def _retry(flows: Workflows, arguments: argparse.Namespace) -> None:
    print((await flows.retry(arguments.id)).id)


# -- drawing -----------------------------------------------------------------------------------------------------------


def drawing(timeline: Timeline) -> list[str]:
    """The flow as lines of text: a bar for every attempt, rollbacks below the steps."""
    last = max((bar.ended_at or bar.began_at for bar in timeline.bars), default=timeline.began_at)
    span = max(1.0, (timeline.ended_at or last) - timeline.began_at)
    width = max((len(_label(bar)) for bar in timeline.bars), default=0)
    head = (
        f"{timeline.id}  {timeline.workflow} v{timeline.version}  {timeline.status.value}  {_time(timeline.began_at)}"
    )
    lines = [head, *(_line(bar, timeline.began_at, span, width) for bar in timeline.bars)]
    if timeline.cause is not None:
        said = f": {timeline.error.type}: {timeline.error.message}" if timeline.error is not None else ""
        lines.append(f"cause: {timeline.cause}{said}")
    return lines


def _label(bar: Bar) -> str:
    return f"{'undo ' if bar.role == 'rollback' else ''}{bar.step}"


def _line(bar: Bar, began: float, span: float, width: int) -> str:
    first = min(_WIDTH - 1, int((bar.began_at - began) / span * _WIDTH))
    ended = bar.ended_at or bar.began_at
    length = max(1, min(_WIDTH - first, round((ended - bar.began_at) / span * _WIDTH)))
    drawn = f"{' ' * first}{_MARKS.get(bar.outcome, '·') * length}".ljust(_WIDTH)
    why = f"  {bar.error.type}: {bar.error.message}" if bar.error is not None else ""
    return f"  {_label(bar).ljust(width)} |{drawn}| {ended - bar.began_at:6.0f} ms  #{bar.attempt} {bar.outcome}{why}"


def _time(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
