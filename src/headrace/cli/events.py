"""`headrace events`: what happens to jobs, line by line, as it happens. Ends with Ctrl-C, --count or --for."""

from __future__ import annotations

import argparse
import queue as queues
import sys
import time
from typing import TYPE_CHECKING, Final

from headrace import notation
from headrace.cli.output import STATE_STYLES, console, is_terminal, payload_of, print_json_line, print_line
from headrace.cli.session import add_client_flags, connected

if TYPE_CHECKING:
    from headrace.client.channel import EventView

_STYLES: Final = {
    "pushed": STATE_STYLES["waiting"],
    "pulled": STATE_STYLES["active"],
    "completed": STATE_STYLES["completed"],
    "failed": STATE_STYLES["failed"],
    "delayed": STATE_STYLES["delayed"],
    "stalled": STATE_STYLES["failed"],
    "gap": "reverse",
}


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Follow what happens to the jobs of one queue or of all, until Ctrl-C."
    parser.add_argument("queue", metavar="QUEUE", nargs="?", default="*", help="(default: all)")
    parser.add_argument("--count", type=int, metavar="N", help="exit after N events")
    parser.add_argument("--for", metavar="SPAN", dest="span", help="exit after this time")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.client.events import QueueEvents
    from headrace.durations import seconds

    end = None if arguments.span is None else time.monotonic() + seconds(arguments.span, "--for")
    heard = 0
    with connected(arguments) as client, QueueEvents(client, arguments.queue) as events:
        while arguments.count is None or heard < arguments.count:
            try:
                event = events.get(None if end is None else max(0.0, end - time.monotonic()))
            except queues.Empty:
                break
            heard += 1
            _show(event, arguments.as_json)
    return 0


def _show(event: EventView, as_json: bool) -> None:
    if as_json:
        import msgspec

        print_json_line({name: value for name, value in msgspec.to_builtins(event).items() if value is not None})
    else:
        width = console().width if is_terminal() else None
        print_line(notation.one_line(_line(event), width), _STYLES.get(event.event_type, ""))
    sys.stdout.flush()


def _line(event: EventView) -> str:
    at = notation.clock_time(event.timestamp or time.time() * 1000)
    return (
        f"{at}  {event.event_type:10}  {event.queue}  {notation.one_line(event.job_id)}  {_particulars(event)}".rstrip()
    )


def _particulars(event: EventView) -> str:
    if event.event_type == "gap":
        return "something is missing here: the connection was lost, or more happened than could be told"
    if event.error:
        return f"{'for good: ' if event.terminal else ''}{notation.first_line(event.error)}"
    if event.event_type == "progress":
        return f"{event.progress or 0:g} %"
    if event.event_type == "delayed":
        return notation.duration(event.delay)
    import msgspec

    return notation.excerpt(payload_of(msgspec.msgpack.encode(event.data)), 80)
