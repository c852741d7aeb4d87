"""`headrace flow` against a real server, as somebody at a shell sees it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from headrace.errors import WorkflowStepError
from headrace.workflows import FlowStatus, Workflows, step, workflow
from headrace.workflows.testing import Saga, define
from headrace.workflows.testing.contract import QUICK, eventually


async def flow_command(url: str, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "headrace", "flow", *words, "--url", url]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr


async def test_a_compensated_flow_is_shown_and_retried(server_url: str) -> None:
    saga = Saga(define("charge", "ship", name="cli-order"), failing={"ship": 3})
    flows = Workflows(server_url, default_retry=QUICK)
    saga.join(flows)
    async with flows:
        with pytest.raises(WorkflowStepError):
            await (await flows.execute(saga.definition, None, id="cli-1")).result(10)
        code, shown, _ = await flow_command(server_url, "show", "cli-1")
        assert code == 0
        assert [line.split("|")[0].strip() for line in shown.splitlines()[1:-1]] == [
            "charge", "ship", "ship", "ship", "undo charge",
        ]  # fmt: skip
        assert "cli-order v1  failed" in shown
        assert shown.splitlines()[-1] == "cause: step: ValueError: ship failed"
        story = json.loads((await flow_command(server_url, "show", "cli-1", "--json"))[1])
        assert [bar["outcome"] for bar in story["bars"]][-2:] == ["failed", "rolled-back"]
        assert "raise ValueError" in story["error"]["traceback"]
        assert (await flow_command(server_url, "retry", "cli-1"))[1].strip() == "cli-1~2"
        assert set(await flows.get_result("cli-1~2", 10)) == {"charge", "ship"}
        assert "cli-1~2  cli-order  completed" in (await flow_command(server_url, "list", "--workflow", "cli-order"))[1]


async def test_flows_are_signalled_and_cancelled(server_url: str) -> None:
    saga = Saga(workflow("cli-waits").step(step("a")).wait("go").build())
    flows = Workflows(server_url, default_retry=QUICK)
    saga.join(flows)
    async with flows:
        first, second = [await flows.execute(saga.definition, None, id=f"cli-w{n}") for n in (1, 2)]
        assert (await flow_command(server_url, "signal", first.id, "go", '{"by": "ada"}'))[0] == 0
        assert (await first.result(10))["go"] == {"by": "ada"}
        assert "being stopped" in (await flow_command(server_url, "cancel", second.id, "--reason", "enough"))[1]
        await eventually(lambda: _is_cancelled(second))
        assert "cancelled already" in (await flow_command(server_url, "cancel", second.id))[1]


async def _is_cancelled(handle: object) -> bool:
    return await handle.status() is FlowStatus.CANCELLED  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["show", "nobody"], "Flow not found: nobody"),
        (["signal", "nobody", "go", "{"], "no JSON"),
        (["list", "--status", "odd"], "no status"),
    ],
)
async def test_what_cannot_be_done_is_said(server_url: str, words: list[str], text: str) -> None:
    code, _, errors = await flow_command(server_url, *words)
    assert code != 0
    assert text in errors
