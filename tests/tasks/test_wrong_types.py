"""What a type checker would have caught says what is wanted, where it is written; what is plain is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from headrace import Headrace, Queue, Worker
from headrace.client.flow import FlowJob
from headrace.errors import HeadraceError
from headrace.events import Events, event
from headrace.tasks.app import Flow
from headrace.workflows import Workflows, step

app: Any = Headrace("memory://wrong-types")
asked = event("asked", dict)


@app.task()
async def pack(order: int = 1) -> int:
    return order


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *((lambda kind=kind: kind(Path("jobs.db")), 'f"sqlite:///{path}"') for kind in (Headrace, Workflows)),
        (lambda: Events(Path("jobs.db")).provider, "a URL is a text, not PosixPath"),  # type: ignore[arg-type]
        (lambda: Queue(app, "q"), "a queue needs a client, as app.queue"),
        (lambda: Worker(app, "q", print), "a worker needs a client, such as app.client"),
        (lambda: Worker(app.client, "q", "print"), "a handler is a function, not 'print'"),  # type: ignore[arg-type]
        (lambda: app.worker(pack), "the names of its queues, not <Task pack"),
        (lambda: app.worker(concurrency="5"), "a concurrency of at least 1"),
        (lambda: app.task(rate_limit=5), "rate_limit is a RateLimit"),
        (lambda: Events("memory://").on(asked, retry=3), "Retry(attempts, ...), not 3"),  # type: ignore[arg-type]
        (lambda: Events("memory://").on(asked)(5), "a handler is a function, not 5"),  # type: ignore[type-var]
        (lambda: step("charge", retry=3), "Retry(attempts, ...), not 3"),  # type: ignore[call-overload]
        (lambda: Flow(pack).plan(app), "Flow(pack.s(order))"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_is_refused_by_what_is_wanted(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        make()
    assert says in str(caught.value)


def test_names_of_queues_may_come_from_a_generator() -> None:
    assert app.worker(name for name in ("mails", "bills")).queues == ["mails", "bills"]


async def test_jobs_may_be_given_where_their_ids_are_wanted() -> None:
    async with Headrace(f"memory://{uuid4()}") as own:
        queue = own.queue()
        first, second = await queue.add("first", {}), await queue.add("second", {})
        last = await (await queue.add("last", {}, depends_on=[first, second.id])).info()
        assert last.depends_on == [first.id, second.id]
        only = await (await queue.add("only", {}, depends_on=first)).info()
        assert only.depends_on == [first.id]
        child = await (await queue.add("child", {}, parent=only.id)).info()
        again = await (await queue.add("child", {}, parent=queue.job(only.id))).info()
        assert child.parent_id == again.parent_id == only.id


async def test_a_flow_of_something_else_is_refused() -> None:
    async with Headrace(f"memory://{uuid4()}") as own:
        for wrong in ({"name": "x"}, pack):
            with pytest.raises(HeadraceError, match="a flow is made of FlowJob"):
                await own.flows.add(wrong)
            with pytest.raises(HeadraceError, match="a flow is made of FlowJob"):
                await own.flows.add(FlowJob(queue="q", name="parent", children=[wrong]))
