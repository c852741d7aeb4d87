"""Providers for the tests of workflows: in process, on a file, and on a real server."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.workflows import Workflows
from headrace.workflows.testing.contract import QUICK
from tests.serverprocess import ServerProcess

_numbers = itertools.count()
MakeFlows = Callable[..., Workflows]


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://flows-{next(_numbers)}"
    return f"sqlite:///{tmp_path}/flows.db"


@pytest.fixture
def server_url(server: ServerProcess) -> str:
    return f"headrace://127.0.0.1:{server.port}"


@pytest.fixture
def make_flows(url: str) -> MakeFlows:
    """Providers on one store."""

    def make(**options: Any) -> Workflows:
        return Workflows(options.pop("url", url), **{"default_retry": QUICK, **options})

    return make
