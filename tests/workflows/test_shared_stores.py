"""The contract of workflows once more where many processes meet: on a real server and on Valkey without one.

One server and one Valkey serve all cases, for each uses workflows and ids of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workflows import Workflows
from headrace.workflows.testing.contract import WorkflowContract
from tests.valkeyserver import shared_server


class TestServer(WorkflowContract):
    @pytest.fixture(autouse=True)
    def _store(self, server_url: str) -> None:
        self.url = server_url

    def provider(self, **options: Any) -> Workflows:
        return Workflows(self.url, **options)


class TestValkey(WorkflowContract):
    def provider(self, **options: Any) -> Workflows:
        return Workflows(f"{shared_server().url}?prefix=flow-contract", **options)
