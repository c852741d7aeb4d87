"""Apps on every kind of engine: in memory, on a file, behind a real server, on Valkey."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import Headrace
from tests.serverprocess import ServerProcess
from tests.valkeyserver import shared_server
from tests.worker.workerprocess import Marks

MakeApp = Callable[..., Headrace]


@pytest.fixture(params=["memory", "sqlite", "server", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where queues live. What a test says of one of these holds for all of them."""
    if request.param == "server":
        return f"headrace://127.0.0.1:{request.getfixturevalue('server').port}"
    if request.param == "valkey":
        return shared_server().url
    return f"sqlite:///{tmp_path}/jobs.db" if request.param == "sqlite" else f"memory://{tmp_path.name}"


@pytest.fixture
async def make_app(url: str, queue: str) -> AsyncIterator[MakeApp]:
    apps: list[Headrace] = []

    def make(**options: Any) -> Headrace:
        apps.append(Headrace(url, **{"queue": queue, **options}))
        return apps[-1]

    yield make
    for app in apps:
        await app.close()


@pytest.fixture
async def app(make_app: MakeApp) -> Headrace:
    return make_app()


@pytest.fixture
async def server_app(server: ServerProcess, queue: str) -> AsyncIterator[Headrace]:
    app = Headrace(f"headrace://127.0.0.1:{server.port}", queue=queue)
    yield app
    await app.close()


@pytest.fixture
def marks(tmp_path: Path, queue: str) -> Marks:
    return Marks(tmp_path / "marks", queue)
