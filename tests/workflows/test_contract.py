"""The contract of workflows in process and on a file, and what of it only we can look into."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.workflows import Workflows
from headrace.workflows.testing import Saga, define
from headrace.workflows.testing.contract import WorkflowContract, run
from tests.workflows.conftest import MakeFlows

_numbers = itertools.count()


class TestInProcess(WorkflowContract):
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.url = f"memory://contract-{next(_numbers)}"

    def provider(self, **options: Any) -> Workflows:
        return Workflows(self.url, **options)


class TestFile(TestInProcess):
    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path) -> None:
        self.url = f"sqlite:///{tmp_path}/flows.db"


async def test_one_line_sums_up_all_rollbacks(make_flows: MakeFlows, caplog: pytest.LogCaptureFixture) -> None:
    saga = Saga(define("a", "b", "c"), failing={"c": 9, "undo b": 9})
    await run(make_flows(), saga)
    lines = [record.message for record in caplog.records if "rolled back" in record.message]
    assert len(lines) == 1
    assert "1 steps were rolled back, 1 rollbacks failed" in lines[0]


async def test_ew_193_without_a_context_the_flow_id_correlates(
    make_flows: MakeFlows, caplog: pytest.LogCaptureFixture
) -> None:
    saga = Saga(define("a"))
    with caplog.at_level(logging.DEBUG, "headrace.workflows"):
        await run(make_flows(), saga, id="flow-x")
    assert saga.contexts["a"].correlation_id == "flow-x"
    assert any("without a context" in record.message for record in caplog.records)


def test_a_contract_without_a_provider_says_so() -> None:
    with pytest.raises(NotImplementedError, match="how a provider is made"):
        WorkflowContract().flows()
