"""`headrace flow` against a real server, as somebody at a shell sees it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from headrace.cli.flow import drawing
from headrace.errors import WorkflowStepError
from headrace.propagation import ErrorReport
from headrace.workflows import FlowStatus, Workflows, step, workflow
from headrace.workflows.testing import Saga, define
from headrace.workflows.testing.contract import QUICK, eventually
from headrace.workflows.timeline import Bar, Timeline


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
        assert shown.splitlines()[-1] == "a step failed: ValueError: ship failed"
        story = json.loads((await flow_command(server_url, "show", "cli-1", "--json"))[1])
        assert [bar["outcome"] for bar in story["bars"]][-2:] == ["failed", "rolled-back"]
        assert "raise ValueError" in story["error"]["traceback"]
        assert (await flow_command(server_url, "retry", "cli-1"))[1].strip() == "cli-1~2"
        assert set(await flows.get_result("cli-1~2", 10)) == {"charge", "ship"}
        listed = (await flow_command(server_url, "list", "--workflow", "cli-order"))[1].splitlines()
        assert [line.split()[:3] for line in listed] == [
            ["ID", "WORKFLOW", "STATUS"], ["cli-1~2", "cli-order", "completed"], ["cli-1", "cli-order", "failed"],
        ]  # fmt: skip


@pytest.mark.parametrize("columns", [None, 60, 80, 120])
def test_a_flow_is_drawn_within_the_terminal(columns: int | None) -> None:
    error = ErrorReport(type="ValueError", message="too heavy for the drone that was chosen, and there is no van today")
    bars = [
        Bar("reserve", "step", 0, 200, 1, "completed"),
        Bar("ship", "step", 200, 7_400_000, 1, "failed", error),
        Bar("reserve", "rollback", 7_400_000, 7_400_300, 1, "rolled-back"),
    ]
    lines = drawing(Timeline("o-1", "order", 1, FlowStatus.FAILED, 0, 7_400_300, [], bars, None, None), 0, columns)[1:]
    assert all(outcome in line for outcome, line in zip(("completed", "failed", "rolled back"), lines, strict=True))
    assert " 2.1 h  #1 failed" in lines[1]
    if columns is None:
        assert lines[1].endswith(error.message)
    else:
        assert max(map(len, lines)) <= columns


def test_what_is_under_way_is_drawn_until_now() -> None:
    bars = [Bar("ask", "step", 0, 400, outcome="completed"), Bar("ship", "step", 400, attempt=0)]
    drawn = drawing(Timeline("o-1", "order", 1, FlowStatus.RUNNING, 0, None, [], bars, None, "cancel"), 3_600_000)
    assert drawn[1:] == [
        f"  ask  |{'█'.ljust(40)}| 400 ms  completed",
        f"  ship |{'·' * 40}|    1 h  running",
        "it was cancelled",
    ]


def test_a_wait_that_the_end_of_its_flow_cut_short_is_not_drawn_as_waiting() -> None:
    bars = [Bar("approved", "step", 0, 35_000, outcome="waiting")]
    ended = Timeline("o-1", "order", 1, FlowStatus.FAILED, 0, 35_000, [], bars, None, "timeout")
    assert drawing(ended, 0)[1:] == [f"  approved |{'·' * 40}|   35 s  cut short", "it did not end in time"]


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


async def test_every_action_speaks_json(server_url: str) -> None:
    saga = Saga(workflow("cli-json").step(step("a")).wait("go").build())
    flows = Workflows(server_url, default_retry=QUICK)
    saga.join(flows)

    async def asked(*words: str) -> Any:
        code, shown, errors = await flow_command(server_url, *words, "--json")
        assert code == 0, errors
        return json.loads(shown)

    async with flows:
        first, second = [await flows.execute(saga.definition, None, id=f"cli-j{n}") for n in (1, 2)]
        assert await asked("signal", first.id, "go") == {"id": "cli-j1", "signal": "go"}
        await first.result(10)
        found = await asked("list", "--workflow", "cli-json", "--status", "completed")
        assert (found["id"], found["status"]) == ("cli-j1", "completed")
        assert (await asked("show", first.id))["status"] == "completed"
        stopped = await asked("cancel", second.id)
        assert (stopped["id"], stopped["cancelled"]) == ("cli-j2", True)
        await eventually(lambda: _is_cancelled(second))
        assert await asked("cancel", second.id) == {"id": "cli-j2", "cancelled": False, "status": "cancelled"}
        assert await asked("retry", second.id) == {"id": "cli-j2~2", "retryOf": "cli-j2"}
        assert (await flow_command(server_url, "list", "--workflow", "nobody", "--json"))[:2] == (0, "")
        assert "no such flows" in (await flow_command(server_url, "list", "--workflow", "nobody"))[2]


async def _is_cancelled(handle: object) -> bool:
    return await handle.status() is FlowStatus.CANCELLED  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["show", "nobody"], "Flow not found: nobody"),
        (["retry", "nobody"], "`headrace flow list` lists those that are there"),
        (["signal", "nobody", "go", "{"], "not JSON"),
        (["list", "--status", "odd"], "not a status"),
    ],
)
async def test_what_cannot_be_done_is_said(server_url: str, words: list[str], text: str) -> None:
    code, _, errors = await flow_command(server_url, *words)
    assert code != 0
    assert text in errors
