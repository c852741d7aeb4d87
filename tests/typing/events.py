"""Read by type checkers and never run: each comment says what its line must be, by both of them."""

from __future__ import annotations

from typing import reveal_type

from headrace.events import Emitter, EventContext, Events, event

placed = event("order.placed", str)
check = event("fraud.check", str, bool)
events = Events("memory://")


@events.on(check)
async def checked(ctx: EventContext[str]) -> bool:
    reveal_type(ctx.data)  # is: str
    reveal_type(await ctx.emit(placed, ctx.data))  # is: None
    return True


async def service(emitter: Emitter) -> None:
    reveal_type(await emitter.emit(check, "o1", timeout=5))  # is: bool
    reveal_type(emitter.emit(placed, "o1", key="o1"))  # is: EventSubscription[None]
    emitter.emit(check, 5)  # error


async def served() -> None:
    await service(events)
