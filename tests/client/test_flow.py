"""Families of jobs: stored whole, run from the leaves up."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.client.flow import FlowJob
from headrace.errors import InvalidCommand, JobFailed
from tests.client.faces import bury, complete


async def test_a_parent_runs_after_its_children_and_sees_what_they_returned(face: Any, q: Any) -> None:
    leaves = face.queue(f"{q.name}.leaves")
    tree = await face.flows().add(
        FlowJob(
            queue=q.name,
            name="report",
            data={"title": "x"},
            options={"priority": 3},
            children=[FlowJob(queue=leaves.name, name="page", data=number) for number in (1, 2)],
        )
    )
    assert [job.name for job in tree] == ["report", "page", "page"]
    assert await tree.job.state() == "waiting-children"
    first = await complete(leaves, "one")
    second = await complete(leaves, "two")
    assert await tree.job.children_values() == {f"{leaves.name}:{first}": "one", f"{leaves.name}:{second}": "two"}
    assert await complete(q, "all") == tree.job.id
    assert await tree.job.result(5) == "all"
    assert (await tree.job.info()).priority == 3
    assert (await tree.children[0].job.info()).parent_id == tree.job.id


async def test_a_chain_runs_in_the_order_given(face: Any, q: Any) -> None:
    steps = await face.flows().add_chain([FlowJob(queue=q.name, name=name) for name in ("a", "b", "c")])
    assert [job.name for job in steps] == ["a", "b", "c"]
    assert [await complete(q) for _ in steps] == [job.id for job in steps]
    assert await face.flows().add_chain([]) == []


async def test_a_step_of_a_chain_waits_for_its_own_children_too(face: Any, q: Any) -> None:
    leaves = face.queue(f"{q.name}.leaves")
    last = FlowJob(queue=q.name, name="last", children=[FlowJob(queue=leaves.name, name="leaf")])
    _, job = await face.flows().add_chain([FlowJob(queue=q.name, name="first"), last])
    first = await complete(q, 1)
    assert await job.state() == "waiting-children"
    leaf = await complete(leaves, 2)
    assert await job.state() == "waiting"
    assert await job.children_values() == {f"{q.name}:{first}": 1, f"{leaves.name}:{leaf}": 2}


async def test_a_chain_may_be_longer_than_python_may_nest(face: Any, q: Any) -> None:
    steps = await face.flows().add_chain([FlowJob(queue=q.name, name="n", data=n) for n in range(1500)])
    assert [await complete(q) for _ in range(3)] == [job.id for job in steps[:3]]


@pytest.mark.parametrize(
    ("on_failure", "state"),
    [("block", "waiting-children"), ("fail", "failed"), ("continue", "waiting"), ("ignore", "waiting")],
)
async def test_a_failed_child_means_what_was_chosen(face: Any, q: Any, on_failure: Any, state: str) -> None:
    leaves = face.queue(f"{q.name}.leaves")
    child = FlowJob(queue=leaves.name, name="c", on_failure=on_failure)
    tree = await face.flows().add(FlowJob(queue=q.name, name="p", children=[child]))
    child_id = await bury(leaves, "broken leaf")
    assert await tree.job.state() == state
    if on_failure == "continue":
        assert await tree.job.failed_children() == {f"{leaves.name}:{child_id}": "broken leaf"}
    if on_failure == "fail":
        with pytest.raises(JobFailed):
            await tree.job.result(5)


async def test_a_flow_with_one_bad_job_leaves_nothing_behind(face: Any, q: Any) -> None:
    flow = FlowJob(queue=q.name, name="p", children=[FlowJob(queue=q.name, name="c", options={"priority": 10**9})])
    with pytest.raises(InvalidCommand, match="priority"):
        await face.flows().add(flow)
    assert await q.get_jobs() == []


async def test_jobs_of_a_flow_may_have_ids_of_their_own(face: Any, q: Any) -> None:
    job_id = f"mine-{q.name}"
    tree = await face.flows().add(FlowJob(queue=q.name, name="p", options={"job_id": job_id}))
    assert tree.job.id == job_id
    assert await tree.job.state() == "waiting"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"options": {"parent": "j"}}, "cannot be given 'parent'"),
        ({"options": {"depends_on": ["j"]}}, "cannot be given 'depends_on'"),
        ({"on_failure": "explode"}, "on_failure is one of block, fail, continue, ignore, remove, not 'explode'"),
    ],
)
async def test_a_job_that_has_no_place_in_a_flow_is_refused(face: Any, queue: str, wrong: Any, says: str) -> None:
    child = FlowJob(queue=queue, name="child", **wrong)
    with pytest.raises(InvalidCommand, match=says):
        await face.flows().add(FlowJob(queue=queue, name="parent", children=[child]))
