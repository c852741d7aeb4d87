"""Servers with their HTTP side on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http.webserver import Http, WebServer


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """One server on a real file for a whole module; tests use queues of their own."""
    with WebServer(Path(tmp_path_factory.mktemp("web")) / "headrace.db", "--webhook-allow", "127.0.0.0/8") as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[WebServer]:
    """One server that asks for a token."""
    with WebServer(":memory:", "--auth-tokens", "sesame,open-up") as running:
        yield running


@pytest.fixture
def http(web: WebServer) -> Iterator[Http]:
    with web.http() as connected:
        yield connected
