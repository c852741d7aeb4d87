"""The cases of events once more where many processes meet: on a real server and on Valkey without one.

Delivery, answers, keys, groups, context and schedules, without exception. One server and one Valkey serve
them all: on the server every test begins with empty queues, on Valkey with a prefix of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from headrace.errors import RemoteError
from headrace.events import EventContext, Events, Retry
from tests.events import test_context, test_definitions, test_delivery, test_processes, test_schedules
from tests.events.conftest import Order, echo, placed
from tests.serverprocess import ServerProcess
from tests.valkeyserver import shared_server
from tests.waiting import until


def _is_here(name: str, test: Any) -> bool:
    """Every case that is about a store; the others have none, or bring a memory or a file of their own."""
    return name.startswith(("test_ew_", "test_x")) and bool({"events", "url"} & set(test.__annotations__))


for _module in (test_context, test_definitions, test_delivery, test_schedules):
    for _name, _value in vars(_module).items():
        if _is_here(_name, _value):
            globals()[_name] = _value

# Processes that ask and answer, kill -9 among them, are tested on a server there; here on Valkey.
for _name, _value in vars(test_processes).items():
    if _name.startswith("test_ew_") and "server" not in _value.__annotations__:
        globals()[_name] = _value


@pytest.fixture
def remote() -> str:
    return f"{shared_server().url}?prefix=events-{uuid4()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server") / "events.db") as process:
        yield process


@pytest.fixture(params=["server", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "valkey":
        return f"{shared_server().url}?prefix=events-{uuid4()}"
    running: ServerProcess = request.getfixturevalue("server")
    with running.client() as client:
        for cron in client.ok("CronList")["crons"]:
            client.ok("CronDelete", name=cron["name"])
        for queue in client.ok("ListQueues")["queues"]:
            client.ok("Obliterate", queue=queue["name"], force=True)
    return f"headrace://127.0.0.1:{running.port}"


async def test_a_question_to_one_broker_is_answered_at_another_in_full() -> None:
    valkey = f"{shared_server().url}?prefix=events-{uuid4()}"
    with ServerProcess(":memory:", "--backend", valkey) as one, ServerProcess(":memory:", "--backend", valkey) as two:
        async with Events(f"headrace://127.0.0.1:{one.port}") as asking:
            answering = Events(f"headrace://127.0.0.1:{two.port}")

            @answering.on(echo, retry=Retry(1))
            async def handle(ctx: EventContext[Any]) -> Any:
                if ctx.data == "bad":
                    raise LookupError("no such thing")
                return ctx.data

            async with answering:
                began = asyncio.get_running_loop().time()
                answers = await asyncio.gather(*(asking.emit(echo, n).wait() for n in range(50)))
                assert answers == list(range(50))
                assert await asking.emit(echo, {"raw": b"\x00"}) == {"raw": b"\x00"}
                with pytest.raises(RemoteError, match="no such thing"):
                    await asking.emit(echo, "bad")
                assert asyncio.get_running_loop().time() - began < 10, "nobody waits for the time to be up"


async def test_a_group_that_joins_in_one_process_gets_what_others_emit() -> None:
    seen: list[str] = []
    url = f"{shared_server().url}?prefix=events-{uuid4()}"
    async with Events(f"{url}&timeout=6") as emitter:
        await emitter.emit(placed, Order("before"))
        joining = Events(url)
        joining.on(placed, group="billing")(lambda ctx: seen.append(ctx.data.id))
        async with joining:
            await until(lambda: emitter.provider.groups.of("order.placed"))
            await emitter.emit(placed, Order("after"))
            await until(lambda: seen == ["after"])
