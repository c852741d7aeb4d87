"""Every place that jobs can be kept in, times both faces of the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.client.client import Client
from headrace.connect import open_client, release_client
from tests.client.faces import AsyncFace, SyncFace
from tests.serverprocess import ServerProcess
from tests.valkeyserver import ValkeyServer


@pytest.fixture(scope="module", params=["memory", "sqlite", "headrace", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = Path(tmp_path_factory.mktemp("client"))
    if request.param == "memory":
        yield f"memory://{folder.name}"
    elif request.param == "sqlite":
        yield f"sqlite:///{folder / 'jobs.db'}"
    elif request.param == "valkey":
        with ValkeyServer(folder, "--appendonly", "yes") as valkey:
            yield valkey.url
    else:
        with ServerProcess(folder / "jobs.db") as running:
            yield f"headrace://127.0.0.1:{running.port}"


@pytest.fixture(scope="module")
def shared_client(url: str) -> Iterator[Client]:
    client = open_client(url)
    yield client
    assert release_client(client)
    client.close().result(10)


@pytest.fixture(params=[AsyncFace, SyncFace], ids=["async", "sync"])
def face(request: pytest.FixtureRequest, shared_client: Client) -> Iterator[Any]:
    chosen = request.param(shared_client)
    yield chosen
    chosen.close()


@pytest.fixture
def q(face: Any, queue: str) -> Any:
    """A queue that no other test uses."""
    return face.queue(queue)
