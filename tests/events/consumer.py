"""A consumer in a process of its own: `python -m tests.events.consumer URL ROLE`. Prints a line for all it handles."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from headrace.events import EventContext, Events, event

ask = event("ask", object, object)
first = event("chain.first", object, object)
second = event("chain.second", object, object)


def say(*words: object) -> None:
    print(*words, flush=True)


def handlers(events: Events, role: str) -> None:
    if role in ("hang", "answer"):

        @events.on(ask)
        async def handle(ctx: EventContext[Any]) -> Any:
            say("handling", ctx.data, ctx.attempt)
            if role == "hang":
                await asyncio.Event().wait()
            return {"pid": os.getpid(), "attempt": ctx.attempt}

    if role == "first":

        @events.on(first)
        async def handle_first(ctx: EventContext[Any]) -> Any:
            return {"first": dict(ctx.meta), "id": ctx.event_id, "then": await ctx.emit(second, 1)}

    if role == "second":

        @events.on(second)
        async def handle_second(ctx: EventContext[Any]) -> Any:
            return {"second": dict(ctx.meta), "cause": ctx.causation_id}


async def main(url: str, role: str) -> None:
    events = Events(url)
    handlers(events, role)
    async with events:
        say("ready")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
