"""The fixtures of the client and worker tests, with queues on Valkey and no broker in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.valkeyserver import ValkeyServer
from tests.worker.conftest import app, make_app, marks  # noqa: F401


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey"), "--appendonly", "yes") as server:
        yield server.url
