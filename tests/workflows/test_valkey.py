"""Workflows on Valkey without any server: processes that share flows, kill -9 among them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from headrace.errors import WorkflowStepError
from headrace.propagation import Retry
from headrace.workflows import FlowHandle, FlowStatus, StepContext, Workflows
from headrace.workflows.testing import Saga, define
from headrace.workflows.testing.contract import QUICK
from tests.scale import IS_FULL
from tests.serverprocess import ServerProcess
from tests.valkeyserver import ValkeyServer, shared_server
from tests.workflows import test_distributed

# Both wait for leases to end, as the random kills do, which are always run.
FULL_ONLY = {
    "test_ew_170_a_rollback_is_resumed_after_kill_9",
    "test_ew_195_x17_a_step_whose_workers_always_die_is_compensated",
}

for _name, _value in vars(test_distributed).items():
    _is_wanted = _name.startswith("test_") and "server_url" in _value.__annotations__
    if _is_wanted and (IS_FULL or _name not in FULL_ONLY):
        globals()[_name] = _value


@pytest.fixture
def server_url() -> str:
    """Where the processes of test_distributed meet: here on Valkey."""
    return f"{shared_server().url}?prefix=flows-{uuid4()}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def _kinds(handle: FlowHandle[Any]) -> list[str]:
    return [entry.kind async for entry in handle.events()]


async def test_ew_204_a_valkey_that_is_killed_and_started_again_goes_on_with_its_flows(tmp_path: Path) -> None:
    async def hang(ctx: StepContext[Any]) -> None:
        begun.set()
        await may_end.wait()

    begun, may_end = asyncio.Event(), asyncio.Event()
    saga = Saga(define("a", "b", "c"), meanwhile={"b": hang})
    with ValkeyServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as valkey:
        flows = Workflows(valkey.url, default_retry=QUICK)
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None, timeout=60)
            watching = asyncio.create_task(_kinds(handle))
            async with asyncio.timeout(10):
                await begun.wait()
            await asyncio.to_thread(valkey.kill)
            late = asyncio.create_task(_kinds(handle))
            await asyncio.to_thread(valkey.start)
            may_end.set()
            assert set(await handle.result(40)) == {"a", "b", "c"}
            assert await watching == await late == ["started", *["completed"] * 3, "completing", "result"]
    assert saga.calls.count("a") == saga.calls.count("c") == saga.calls.count("complete") == 1
    assert saga.calls.count("b") <= 2


async def test_a_step_that_ends_while_valkey_is_away_is_told_when_it_is_back_and_runs_once(tmp_path: Path) -> None:
    async def end_alone(ctx: StepContext[Any]) -> None:
        await asyncio.to_thread(valkey.kill)
        asyncio.get_running_loop().call_later(1.0, threading.Thread(target=valkey.start).start)

    saga = Saga(define("a", "b"), meanwhile={"a": end_alone})
    with ValkeyServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as valkey:
        flows = Workflows(valkey.url, default_retry=Retry(1))
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None, timeout=60)
            assert set(await handle.result(40)) == {"a", "b"}
    assert saga.calls == ["a", "b", "complete"]


async def test_a_flow_that_begins_at_one_broker_runs_at_another_and_outlives_both() -> None:
    url = f"{shared_server().url}?prefix=flows-{uuid4()}"
    saga, late = Saga(define("a", ["b", "c"], "d"), failing={"d": 1}), Saga(define("a", "fails"), failing={"fails": 9})
    with ServerProcess(":memory:", "--backend", url) as first, ServerProcess(":memory:", "--backend", url) as second:
        emitter = Workflows(f"headrace://127.0.0.1:{first.port}", default_retry=QUICK)
        worker = Workflows(f"headrace://127.0.0.1:{second.port}", default_retry=QUICK)
        saga.join(worker)
        late.join(worker)
        async with emitter, worker:
            handle = await emitter.execute(saga.definition, None)
            assert set(await handle.result(20)) == {"a", "b", "c", "d"}
            failing = await emitter.execute(late.definition, None)
            with pytest.raises(WorkflowStepError):
                await failing.result(20)
        first.kill()
        second.kill()
    async with Workflows(url) as reader:
        assert await reader.get_status(handle.id) is FlowStatus.COMPLETED
        assert await reader.get_status(failing.id) is FlowStatus.FAILED
    assert late.calls[-2:] == ["undo a", "error"]
