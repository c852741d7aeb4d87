"""Fixtures of the Valkey tests: our backend with a clock that stands still, and a foreign program on the same keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from headrace.client.client import Client
from headrace.connect import open_client
from tests.conformance.rig import VALKEY, Rig
from tests.serverprocess import ServerProcess
from tests.valkey.foreign import Foreign
from tests.valkeyserver import ValkeyServer, shared_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A broker on a Valkey of its own that keeps an append-only file, for a whole test module."""
    folder = tmp_path_factory.mktemp("valkey")
    with (
        ValkeyServer(folder, "--appendonly", "yes") as valkey,
        ServerProcess(":memory:", "--backend", valkey.url) as running,
    ):
        yield running


@pytest.fixture
def prefix() -> str:
    """Keys that no other test uses."""
    return f"test-{uuid4()}"


@pytest.fixture
async def clients(prefix: str) -> AsyncIterator[list[Client]]:
    """Two, as in two processes: the options differ, so they share nothing."""
    opened = [open_client(f"{shared_server().url}?prefix={prefix}&timeout={n}") for n in (5, 6)]
    yield opened
    for client in opened:
        await asyncio.wrap_future(client.close())


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(VALKEY, tmp_path)
    rig.is_checking = False
    yield rig
    rig.close()


@pytest.fixture
def foreign(rig: Rig) -> Foreign:
    return Foreign(shared_server().client(), rig.backend.url.prefix, rig.clock)
