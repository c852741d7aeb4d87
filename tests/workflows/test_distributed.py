"""EW-172 to EW-206 between processes, kill -9 among them; the cases that need no process are in the contract.

EW-178's registry key belongs to Valkey; elsewhere the row of the flow answers.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from headrace.client.queue import Queue
from headrace.commands.flows import FlowCancel, FlowSignal
from headrace.errors import JobTimeout, WorkflowCancelledError, WorkflowRollbackError, WorkflowStepError
from headrace.propagation import Retry, propagate
from headrace.worker.failures import UnrecoverableError
from headrace.workflows import FlowStatus, StepContext, Workflows, step, watch, workflow
from headrace.workflows.testing import Saga, define
from headrace.workflows.testing.contract import eventually
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.workflows.conftest import MakeFlows
from tests.workflows.crew import RETRY, Hand, calls, crew, join, start_and_die, trip, wait_call

FATES = ("good", "bad")
UNDONE = [f"undo {name}" for name in "abcd"]

# -- several providers -------------------------------------------------------------------------------------------------


async def test_ew_200_x19_the_store_grows_with_the_data_only(tmp_path: Path) -> None:
    def size(steps: int) -> int:
        folder = tmp_path / f"{steps}"
        folder.mkdir()
        flows = Workflows(f"sqlite:///{folder}/flows.db")
        names = [f"s{n}" for n in range(steps)]
        saga = Saga(define(*names), results=dict.fromkeys(names, "x" * 10_000))

        async def run() -> None:
            async with flows:
                handle = await flows.execute(saga.definition, None)
                await handle.result(30)
                found = await flows.look(handle.id)
                sizes.append(sum(len(entry.body) for entry in found.steps))

        sizes: list[int] = []
        saga.join(flows)
        asyncio.run(run())
        return sizes[0]

    ten, forty = await asyncio.to_thread(size, 10), await asyncio.to_thread(size, 40)
    # on_complete of the test returns all results once more: that is the second time the data is there.
    assert forty < 2 * 40 * 10_000 * 1.1
    assert forty < 4.2 * ten


async def test_ew_206_a_flow_of_an_older_version_waits_for_code_of_its_version(make_flows: MakeFlows) -> None:
    old, new = Saga(define("a", name="grown", version=1)), Saga(define("a", "b", name="grown", version=2))
    flows = make_flows()
    old.join(flows)
    new.join(flows)
    async with flows:
        first, second = await flows.execute(old.definition, None), await flows.execute(new.definition, None)
        assert await first.result(10) == {"a": "a done"}
        assert await second.result(10) == {"a": "a done", "b": "b done"}
    newer, older = make_flows(), make_flows()
    new.join(newer)
    old.join(older)
    async with newer:
        handle = await newer.execute(old.definition, None)
        await (await newer.execute(new.definition, None)).result(10)
        # Operators see it as a queue that nobody works on.
        assert (await Queue(newer.client, "workflow.grown.steps").counts())["waiting"] == 1
        async with older:
            assert await handle.result(10) == {"a": "a done"}


async def test_code_that_lacks_a_step_or_its_rollback_leaves_the_job_to_code_that_has_it(
    make_flows: MakeFlows, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody changed a workflow and not its version; for the time of a deploy there are both."""
    old = Saga(workflow("changed").step(step("a")).build(), without_rollback=("a",))
    new = Saga(workflow("changed").step(step("a"), step("b")).wait("go").build())
    emitter, older, newer = make_flows(), make_flows(), make_flows()
    old.join(older)
    new.join(newer)

    def has_put_off(job: str) -> bool:
        return any(f"no code for version 1 of {job} here" in record.message for record in caplog.records)

    async with emitter:
        handle = await emitter.execute(new.definition, None, timeout=60)
        async with older:
            await eventually(lambda: has_put_off("b"))
        another = await emitter.execute(new.definition, None, timeout=60)
        async with newer:
            await handle.signal("go", 1)
            assert await handle.result(20) == {"a": "a done", "b": "b done", "go": 1}
            await eventually(lambda: new.calls.count("b") == 2)
        async with older:
            await another.cancel()
            await eventually(lambda: has_put_off("b:rollback"))
            assert await another.status() is FlowStatus.COMPENSATING
        async with newer:
            with pytest.raises(WorkflowCancelledError):
                await another.result(20)
    assert new.calls[-3:] == ["undo b", "undo a", "error"]
    assert old.calls == ["a"]


async def test_workers_that_take_turns_do_not_put_each_others_jobs_off_for_ever(make_flows: MakeFlows) -> None:
    """Without chance in the pauses, each can get the job of the other one every time."""
    one, other = Saga(define(*"abcde", name="forked")), Saga(define(*"vwxyz", name="forked"))
    first, second = make_flows(), make_flows()
    one.join(first)
    other.join(second)
    async with first, second:
        for _ in range(scaled(1, 20)):
            handles = [await first.execute(saga.definition, None) for _ in range(10) for saga in (one, other)]
            for handle in handles:
                assert len(await handle.result(30)) == 5


async def test_workers_of_two_versions_side_by_side_take_only_their_own_jobs(
    make_flows: MakeFlows, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_if_bad(ctx: StepContext[Any]) -> None:
        if ctx.data == "bad":
            raise UnrecoverableError("no")

    old, new = (
        Saga(define(*"abcde", name="rolling", version=version), meanwhile={"e": fail_if_bad}) for version in (1, 2)
    )
    older, newer = make_flows(), make_flows()
    old.join(older)
    new.join(newer)
    async with older, newer:
        handles = [
            await newer.execute(saga.definition, fate) for _ in range(5) for saga in (old, new) for fate in FATES
        ]
        outcomes = await asyncio.gather(*(handle.result(30) for handle in handles), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [dict, WorkflowStepError] * 10
    assert not [record for record in caplog.records if "no code" in record.message]
    for saga in (old, new):
        assert Counter(saga.calls) == {
            **dict.fromkeys("abcde", 10),
            **dict.fromkeys(UNDONE, 5),
            "complete": 5,
            "error": 5,
        }


# -- several processes on a real server --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def test_a_caller_whose_clock_is_wrong_waits_for_its_flow_all_the_same(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saga = Saga(workflow("skewed").wait("go").build())
    flows = Workflows(server_url)
    saga.join(flows)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 3600)
    monkeypatch.setattr(watch, "_SLICE", 0.05)
    async with flows:
        handle = await flows.execute(saga.definition, None)
        with pytest.raises(JobTimeout):
            await handle.result(0.5)
        await handle.signal("go", 1)
        assert await handle.result(10) == {"go": 1}


async def test_who_cannot_decide_leaves_a_wish_for_the_workers(
    server_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    saga = Saga(workflow("wished").step(step("a")).wait("go", int).step(step("b")).build())
    flows = Workflows(server_url)
    saga.join(flows)
    async with flows:
        good, bad = [await flows.execute(saga.definition, None) for _ in range(2)]
        await flows.client.ask(FlowSignal(id=good.id, name="nonsense"))
        await flows.client.ask(FlowSignal(id=good.id, name="go", payload=Raw(b"\xa2no")))
        await eventually(lambda: "payload of signal 'go'" in caplog.text)
        await flows.client.ask(FlowSignal(id=good.id, name="go", payload=Raw(b"\x07")))
        assert (await good.result(20))["go"] == 7
        await flows.client.ask(FlowCancel(id=bad.id, reason="enough"))
        with pytest.raises(WorkflowCancelledError, match="enough"):
            await bad.result(20)
    assert saga.calls.count("undo a") == 1


@pytest.mark.parametrize("count", [2, 3])
async def test_ew_172_steps_of_flows_spread_over_processes(server_url: str, folder: Path, count: int) -> None:
    flows = Workflows(server_url, default_retry=RETRY)
    with crew(server_url, folder, count) as hands:
        async with flows:
            with propagate(correlation_id="req-1"):
                handles = [await flows.execute(trip, {"pause": 0.05}) for _ in range(10)]
            results = await asyncio.gather(*(handle.result(30) for handle in handles))
    assert {pid for result in results for pid in result.values()} == {hand.pid for hand in hands}
    assert any(len(set(result.values())) > 1 for result in results), "one flow ran on several"
    assert {correlation for *_, correlation in calls(folder)} == {"req-1"}


async def test_ew_176_a_process_that_stops_leaves_its_flows_to_the_others(server_url: str, folder: Path) -> None:
    flows = Workflows(server_url, default_retry=RETRY)
    with crew(server_url, folder, 2) as hands:
        async with flows:
            handles = [await flows.execute(trip, {"pause": 0.05}) for _ in range(10)]
            await asyncio.to_thread(hands[0].stop)
            results = await asyncio.gather(*(handle.result(30) for handle in handles))
    assert len(results) == 10
    assert Counter(call for _, call, _, _ in calls(folder)) == dict.fromkeys([*"abcd", "complete"], 10)


async def test_ew_194_x16_after_kill_9_the_step_at_work_runs_again_and_no_other(server_url: str, folder: Path) -> None:
    (folder / "hang-d").touch()
    with crew(server_url, folder, 1) as hands:
        # The process that starts the flow is killed as well: another one reads the result.
        handle_id = await asyncio.to_thread(start_and_die, server_url, folder)
        await asyncio.to_thread(wait_call, folder, "d")
        hands[0].kill()
        killed = asyncio.get_running_loop().time()
        (folder / "hang-d").unlink()
        hands.append(await asyncio.to_thread(Hand, server_url, folder))
        async with Workflows(server_url) as reader:
            handle = await reader.get_handle(handle_id)
            result = await handle.result(30)
        assert asyncio.get_running_loop().time() - killed < 10, "within two leases"
        assert result["d"] == hands[1].pid
    assert Counter(call for _, call, _, _ in calls(folder)) == {"a": 1, "b": 1, "c": 1, "d": 2, "complete": 1}


async def test_ew_195_x17_a_step_whose_workers_always_die_is_compensated(server_url: str, folder: Path) -> None:
    (folder / "hang-d").touch()
    flows = Workflows(server_url, default_retry=RETRY, max_stalls=0)
    with crew(server_url, folder, 1) as hands:
        async with flows:
            handle = await flows.execute(trip, {}, timeout=60)
            await asyncio.to_thread(wait_call, folder, "d")
            hands[0].kill()
            hands.append(await asyncio.to_thread(Hand, server_url, folder))
            with pytest.raises(WorkflowStepError, match="its worker died 1 times") as caught:
                await handle.result(30)
    assert caught.value.__cause__.type_name == "StalledError"  # type: ignore[union-attr]
    told = Counter(call for _, call, _, _ in calls(folder))
    assert told == dict.fromkeys([*"abcd", "undo-a", "undo-b", "undo-c", "error"], 1)


async def test_ew_170_a_rollback_is_resumed_after_kill_9(server_url: str, folder: Path) -> None:
    (folder / "hang-undo-a").touch()
    flows = Workflows(server_url, default_retry=Retry(1))
    with crew(server_url, folder, 1) as hands:
        async with flows:
            (folder / "hang-d").touch()
            handle = await flows.execute(trip, {}, timeout=60)
            await asyncio.to_thread(wait_call, folder, "d")
            await handle.cancel()
            await asyncio.to_thread(wait_call, folder, "undo-a")
            hands[0].kill()
            (folder / "hang-undo-a").unlink()
            (folder / "hang-d").unlink()
            hands.append(await asyncio.to_thread(Hand, server_url, folder))
            await eventually(lambda: _is(handle, FlowStatus.CANCELLED), 20)
    told = Counter(call for _, call, _, _ in calls(folder))
    assert (told["undo-a"], told["undo-b"], told["undo-c"], told["error"]) == (2, 1, 1, 1)


async def _is(handle: Any, status: FlowStatus) -> bool:
    return await handle.status() is status


@pytest.mark.timeout(900)
async def test_random_failures_and_kills_never_break_a_promise(server_url: str, folder: Path) -> None:
    """(a) to (f) of the invariants over many flows, of which each may lose its worker at any moment."""
    waves, of_a_wave = scaled(4, 50), 10
    chance = random.Random(7)
    flows = Workflows(server_url, default_retry=RETRY, max_stalls=20)
    handles = []
    with crew(server_url, folder, 2) as hands:
        async with flows:
            for _ in range(waves):
                for n in range(of_a_wave):
                    data = {"failing": 0.5 if n < 2 else 0.1, "pause": 0.05}
                    handles.append(await flows.execute(trip, data, timeout=600))
                await asyncio.sleep(chance.uniform(0.05, 0.4))
                at = chance.randrange(2)
                hands[at].kill()
                hands[at] = await asyncio.to_thread(Hand, server_url, folder)
            ends = await asyncio.gather(*(handle.result(600) for handle in handles), return_exceptions=True)
            logs = [await flows.look(handle.id) for handle in handles]
    for log, end in zip(logs, ends, strict=True):
        _check_promises(log, end)
    assert {isinstance(end, dict) for end in ends} == {True, False}, "some fail and some do not"
    begun = sum(call in "abcd" for _, call, _, _ in calls(folder))
    told = sum(entry.kind in ("completed", "failed", "attempt-failed") for log in logs for entry in _forth(log))
    assert begun > told, "some workers were killed while they ran a step"


def _forth(found: Any) -> Any:
    """The part of its log before it was taken back."""
    return itertools.takewhile(lambda entry: entry.kind != "compensating", found.steps)


def _check_promises(found: Any, end: object) -> None:
    kinds = Counter(entry.kind for entry in found.steps)
    done = [entry.step for entry in found.steps if entry.kind == "completed"]
    undone = [entry.step for entry in found.steps if entry.kind in ("rolled-back", "rollback-failed")]
    assert found.flow.status.is_final, "(d)"
    assert kinds["result"] + kinds["ended"] == 1, "(c)"
    assert len(set(done)) == len(done), "(b)"
    assert len(found.steps) <= 6 + 4 * 4 + kinds["attempt-failed"], "(f)"
    assert sum(len(entry.body) for entry in found.steps if entry.kind == "completed") <= 200 * len(done), "(f)"
    if isinstance(end, dict):
        assert (kinds["compensating"], sorted(done)) == (0, ["a", "b", "c", "d"]), "(a)"
        assert set(end) == set(done), "(e)"
    else:
        assert isinstance(end, WorkflowStepError | WorkflowRollbackError), "(d)"
        assert kinds["compensating"] == kinds["reported"] == 1, "(a)"
        assert undone == done[::-1], "(b)"


async def test_ew_204_a_server_that_is_killed_and_started_again_goes_on_with_its_flows(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "flows.db")
    with server:
        url = f"headrace://127.0.0.1:{server.port}"
        flows = Workflows(url, default_retry=RETRY)
        join(flows, tmp_path)
        (tmp_path / "hang-b").touch()
        async with flows:
            handle = await flows.execute(trip, {}, timeout=60)
            await eventually(lambda: any(call == "b" for _, call, *_ in calls(tmp_path)))
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            (tmp_path / "hang-b").unlink()
            result = await handle.result(40)
        assert set(result) == set("abcd")
        told = Counter(call for _, call, _, _ in calls(tmp_path))
        assert told["a"] == told["d"] == told["complete"] == 1
        assert told["b"] <= 2
