"""Where events live in these tests: in memory, in a file, and (for the core) on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest

from headrace.client.client import Client
from headrace.connect import open_client, release_client
from headrace.events import Events, event
from tests.serverprocess import ServerProcess


class Order(msgspec.Struct):
    id: str = "o1"
    total: int = 1


class Verdict(msgspec.Struct):
    ok: bool


placed = event("order.placed", Order)
check = event("fraud.check", Order, Verdict)
echo = event("echo", object, object)


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid4()}" if request.param == "memory" else f"sqlite:///{tmp_path}/events.db"


@pytest.fixture
def memory() -> str:
    return f"memory://{uuid4()}"


@pytest.fixture
async def events(url: str) -> AsyncIterator[Events]:
    made = Events(url)
    yield made
    await made.stop()


@pytest.fixture
async def client(memory: str) -> AsyncIterator[Client]:
    opened = open_client(memory)
    yield opened
    release_client(opened)
    await asyncio.wrap_future(opened.close())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "server.db") as process:
        yield process
