"""Read by type checkers and never run: each comment says what its line must be, by both of them."""

from __future__ import annotations

from typing import Any, reveal_type

import msgspec

from headrace import StepContext, Workflows, step, workflow
from headrace.workflows import WorkflowProvider


class Order(msgspec.Struct):
    total: int


class Charge(msgspec.Struct):
    id: str


charge = step("charge", Charge, timeout=20)
ship = step("ship")
order = workflow("order", data=Order, result=list[str]).step(charge).parallel(ship, step("tell")).build()
loose = workflow("loose").step(ship).build()
flows = Workflows("memory://")


@flows.implement(order)
class Code:
    @charge.execute
    async def _charge(self, ctx: StepContext[Order]) -> Charge:
        reveal_type(ctx.data.total)  # is: int
        return Charge("c")

    @charge.rollback
    async def _refund(self, ctx: StepContext[Order]) -> None:
        reveal_type(ctx.result(charge))  # is: Charge


async def asynchronous() -> None:
    handle = await flows.execute(order, Order(5), id="o-5")
    reveal_type(handle)  # is: FlowHandle[list[str]]
    reveal_type(await handle.result(timeout=5))  # is: list[str]
    reveal_type(await flows.get_handle("o-5", order))  # is: FlowHandle[list[str]]
    reveal_type(await flows.get_handle("o-5"))  # is: FlowHandle[Any]
    reveal_type(await (await flows.execute(loose, {"any": "thing"})).result())  # is: Any
    await flows.execute(order, "five")  # error


def synchronous() -> None:
    with flows.sync() as face:
        reveal_type(face.execute(order, Order(5)).result())  # is: list[str]
        reveal_type(face.get_handle("o-5"))  # is: SyncFlowHandle[Any]


async def injected(provider: WorkflowProvider) -> None:
    reveal_type(await (await provider.execute(order, Order(5), timeout=3)).result())  # is: list[str]


async def served() -> None:
    await injected(flows)


def declared(given: Any) -> None:
    reveal_type(step("a", given))  # is: Step[Any]
