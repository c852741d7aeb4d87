"""Flows by chance on a real store: what they call, how they end and what they take back is as the page says."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.propagation import Retry
from headrace.workflows import FlowStatus, StepContext, Workflows, step, workflow
from headrace.workflows.plan import Entry
from tests.scale import scaled

ATTEMPTS = 2
ERRORS = (ValueError("wrong"), SystemExit(3), asyncio.CancelledError("its own"), TimeoutError("late"))
RESULTS = (None, False, 0, "", [], {}, 1.5, 2**40, {"a": {"b": None}}, b"raw")
_numbers = itertools.count()


@dataclass(frozen=True)
class Deed:
    """What a step does: how often it fails, how, what it returns at last; how often its rollback fails, if any."""

    failures: int
    error: BaseException
    result: Any
    undo_failures: int | None

    @property
    def is_lost(self) -> bool:
        return self.failures >= ATTEMPTS


deeds = st.builds(
    Deed,
    st.sampled_from([0, 0, 0, 0, 1, 2]),
    st.sampled_from(ERRORS),
    st.sampled_from(RESULTS),
    st.sampled_from([None, 0, 0, 1, 2]),
)
plans = st.lists(st.lists(deeds, min_size=1, max_size=3), min_size=1, max_size=4)


def told(plan: list[list[Deed]]) -> tuple[FlowStatus, Counter[str], set[str]]:
    """How the flow of a plan ends, how often each call is made, and which steps are done."""
    calls: Counter[str] = Counter()
    done: set[str] = set()
    status = FlowStatus.COMPLETED
    for at, group in enumerate(plan):
        for place, deed in enumerate(group):
            calls[f"s{at}-{place}"] = min(deed.failures + 1, ATTEMPTS)
            if not deed.is_lost:
                done.add(f"s{at}-{place}")
        if any(deed.is_lost for deed in group):
            status = FlowStatus.FAILED
            break
    for name in done if status is FlowStatus.FAILED else ():
        undo_failures = _deed(plan, name).undo_failures
        if undo_failures is not None:
            calls[f"{name}:rollback"] = min(undo_failures + 1, ATTEMPTS)
    return status, calls, done


def _deed(plan: list[list[Deed]], name: str) -> Deed:
    at, place = name.removeprefix("s").split("-")
    return plan[int(at)][int(place)]


async def walk(plan: list[list[Deed]]) -> tuple[Any, FlowStatus, Counter[str], list[Entry]]:
    calls: Counter[str] = Counter()
    keys: dict[str, set[str]] = {}

    async def call(ctx: StepContext[Any], failures: int, deed: Deed) -> Any:
        calls[ctx.step] += 1
        keys.setdefault(ctx.step, set()).add(ctx.idempotency_key)
        assert ctx.attempt == calls[ctx.step]
        if calls[ctx.step] <= failures:
            raise deed.error
        return deed.result

    def code(deed: Deed) -> Any:
        undo = None if deed.undo_failures is None else lambda ctx: call(ctx, deed.undo_failures or 0, deed)
        return lambda ctx: call(ctx, deed.failures, deed), undo

    number = next(_numbers)
    builder, steps = workflow(f"walk-{number}"), {}
    for at, group in enumerate(plan):
        names = [f"s{at}-{place}" for place in range(len(group))]
        steps |= {name: code(deed) for name, deed in zip(names, group, strict=True)}
        builder = builder.parallel(*map(step, names)) if len(names) > 1 else builder.step(step(names[0]))
    flows = Workflows(f"memory://walk-{number}", default_retry=Retry(ATTEMPTS, backoff="fixed", delay=0.001))
    flows.register_definition_consumer(builder.build(), steps)
    async with flows:
        handle = await flows.execute(builder.build(), None)
        (result,) = await asyncio.gather(handle.result(20), return_exceptions=True)
        log = [entry async for entry in handle.events()]
        assert all(len(found) == 1 for found in keys.values())
        return result, await handle.status(), calls, log


@settings(max_examples=scaled(25, 300), deadline=None)
@given(plans)
def test_a_flow_by_chance_does_what_is_promised(plan: list[list[Deed]]) -> None:
    result, status, calls, log = asyncio.run(walk(plan))
    expected, expected_calls, done = told(plan)
    assert (status, calls) == (expected, expected_calls)
    assert {entry.step for entry in log if entry.kind == "completed"} == done
    assert [entry.kind for entry in log if entry.kind in ("result", "ended")] == [log[-1].kind]
    if status is FlowStatus.COMPLETED:
        assert result == {name: _deed(plan, name).result for name in done}
        return
    order = [
        entry.step for entry in log if entry.kind == "completed" and _deed(plan, entry.step).undo_failures is not None
    ]
    undone = [(entry.step, entry.kind) for entry in log if entry.kind in ("rolled-back", "rollback-failed")]
    assert [name for name, _ in undone] == order[::-1]
    for name, kind in undone:
        assert (kind == "rollback-failed") == ((_deed(plan, name).undo_failures or 0) >= ATTEMPTS)
