"""The fixtures of the worker tests, with queues on Valkey and no broker in between."""

from __future__ import annotations

import pytest

from tests.valkeyserver import shared_server
from tests.worker.conftest import app, make_app, marks  # noqa: F401


@pytest.fixture
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"{shared_server().url}?prefix={tmp_path_factory.mktemp('prefix').name}"
