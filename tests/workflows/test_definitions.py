"""EW-134 to EW-148: definitions, the registry of steps, OriJS's trees of jobs and wrapped results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.errors import InvalidCommand, StepNotFoundError
from headrace.workflows import (
    FlowBuilder,
    Step,
    StepRegistry,
    Workflows,
    flatten_child_results,
    get_parent_job_id,
    is_parallel_result_wrapper,
    is_step_result_wrapper,
    step,
    workflow,
)
from headrace.workflows.results import wrap_parallel_results, wrap_step_result
from headrace.workflows.tree import FlowJobDefinition

a, b, c, d = (step(name) for name in "abcd")


def handler(ctx: Any) -> None: ...


def build(definition: Any, **options: Any) -> FlowJobDefinition:
    return FlowBuilder().build_flow("order", "flow-1", {"n": 1}, definition.step_groups, **options)


def chain(job: FlowJobDefinition) -> list[str]:
    names = [job.name]
    while job.children:
        (job,) = job.children
        names.append(job.name)
    return names


def test_ew_134_steps_are_registered_by_workflow_and_name() -> None:
    registry, other = StepRegistry(), StepRegistry()
    registry.register("order", "charge", handler)
    registry.register("order", "ship", handler)
    assert registry.has("order", "charge")
    assert not registry.has("refund", "charge")
    assert registry.get("order", "charge") is handler
    assert registry.get_workflow_steps("order") == ["charge", "ship"]
    assert list(registry) == ["order"]
    assert not other.has("order", "charge")
    registry.register("order", "charge", print)
    assert registry.get("order", "charge") is print
    registry.clear()
    assert registry.get_workflow_steps("order") == []


def test_ew_135_a_missing_step_is_named() -> None:
    registry = StepRegistry()
    with pytest.raises(StepNotFoundError, match=r"Step 'charge' of workflow 'order'") as caught:
        registry.get("order", "charge")
    assert (caught.value.workflow, caught.value.step) == ("order", "charge")
    assert registry.get_rollback("order", "charge") is None


def test_ew_136_a_step_has_a_rollback_only_when_it_was_given() -> None:
    registry = StepRegistry()
    registry.register("order", "charge", handler, print)
    registry.register("order", "ship", handler)
    assert registry.get_step("order", "charge").rollback is print
    assert registry.get_step("order", "ship").rollback is None
    assert registry.get_rollback("order", "charge") is print


def test_ew_137_the_root_of_a_tree() -> None:
    root = build(workflow("order").build())
    assert (root.name, root.queue_name) == ("order", "workflow.order")
    assert root.data == {
        "type": "workflow",
        "version": "1",
        "flowId": "flow-1",
        "workflowData": {"n": 1},
        "stepResults": {},
    }
    assert FlowBuilder("w").build_flow("order", "f", 1, ()).queue_name == "w.order"


def test_ew_138_the_first_step_is_the_deepest_leaf() -> None:
    root = build(workflow("order").step(a, b, c).build())
    assert chain(root) == ["order", "c", "b", "a"]
    assert root.children[0].queue_name == "workflow.order.steps"
    assert root.children[0].data["stepName"] == "c"


def test_ew_139_a_parallel_group_is_one_job_above_the_groups_before_it() -> None:
    assert chain(build(workflow("order").step(a).parallel(b, c).build())) == ["order", "__parallel__:b,c", "a"]


def test_ew_140_groups_nest_in_any_order() -> None:
    assert chain(build(workflow("order").parallel(a, b).step(c).build())) == ["order", "c", "__parallel__:a,b"]
    assert chain(build(workflow("order").step(a).build())) == ["order", "a"]
    assert build(workflow("order").build()).children == ()


def test_ew_141_step_jobs_fail_their_parents_and_all_jobs_are_kept_for_a_while() -> None:
    root = build(workflow("order").step(a).parallel(b, c).build())
    jobs = [root, root.children[0], root.children[0].children[0]]
    assert all(job.opts["removeOnComplete"]["count"] == 10_000 for job in jobs)
    assert [job.opts.get("failParentOnFailure", False) for job in jobs] == [False, True, True]


def test_ew_142_meta_is_there_only_when_it_was_given() -> None:
    definition = workflow("order").step(a).build()
    assert "meta" not in build(definition).data
    root = build(definition, meta={"userId": "u"})
    assert root.data["meta"] == root.children[0].data["meta"] == {"userId": "u"}


def test_ew_143_ids_are_known_before_anything_is_added() -> None:
    definition = workflow("order").step(a).build()
    assert get_parent_job_id("flow-1") == build(definition).opts["jobId"] == "flow-1"
    keyed = build(definition, idempotency_key="key")
    assert get_parent_job_id("flow-1", "key") == keyed.opts["jobId"] == "key"
    assert keyed.children[0].opts["jobId"] == "key-step-a"
    assert "jobId" not in build(definition).children[0].opts


def test_ew_144_the_id_of_a_parallel_group_has_no_colon() -> None:
    keyed = build(workflow("order").parallel(a, b).build(), idempotency_key="key")
    assert keyed.children[0].opts["jobId"] == "key-step-__parallel__-a,b"
    assert keyed.children[0].name == "__parallel__:a,b"


def test_ew_145_wrapped_results_are_merged_by_step() -> None:
    one = wrap_step_result("b", 2, {"a": 1, "b": "old"})
    both = wrap_parallel_results({"c": 3, "d": 4}, {"b": 2})
    assert is_step_result_wrapper(one)
    assert is_parallel_result_wrapper(both)
    assert not is_step_result_wrapper(both)
    assert not is_parallel_result_wrapper({"c": 3})
    flat = flatten_child_results({"q:1": one, "q:2": both, "q:3": {"x": 1}, "q:4": None})
    assert flat == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_ew_146_dangerous_keys_do_not_pass_at_any_depth() -> None:
    poison = {"ok": [{"__proto__": 1, "fine": {"constructor": 2, "x": 3}}]}
    flat = flatten_child_results({"1": wrap_step_result("prototype", poison, {"__proto__": 1})})
    assert flat == {"_sanitized_prototype": {"ok": [{"fine": {"x": 3}}]}}


@pytest.mark.parametrize("value", [None, False, 0, "", []])
def test_ew_147_results_that_are_nothing_are_kept(value: Any) -> None:
    assert flatten_child_results({"1": wrap_step_result("a", value, {"b": None})}) == {"a": value, "b": None}


@pytest.mark.parametrize("name", ["_a", "-a", "__x", "a.b", "a,b", "a:b", "a b", "", "x" * 129, "é"])
def test_ew_148_names_that_steps_cannot_have(name: str) -> None:
    with pytest.raises(InvalidCommand, match="no name of a step"):
        step(name)
    with pytest.raises(InvalidCommand, match="no name of a step"):
        StepRegistry().register("order", name, handler)


def test_ew_148_names_that_steps_can_have() -> None:
    assert step("x" * 128).name == "x" * 128
    assert step("0-a_B").name == "0-a_B"


def test_ew_148_two_steps_of_one_name_are_refused_when_the_workflow_is_built() -> None:
    with pytest.raises(InvalidCommand, match="two steps named 'a'"):
        workflow("order").step(a).parallel(b, step("a")).build()


def test_a_builder_can_be_the_beginning_of_several_workflows() -> None:
    beginning = workflow("order").step(a)
    assert list(beginning.step(b).build().steps) == ["a", "b"]
    assert list(beginning.build().steps) == ["a"]


@pytest.mark.parametrize(
    "wrong", [lambda: workflow("a b"), lambda: workflow("w", version=0), lambda: step("a", timeout=0)]
)
def test_definitions_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidCommand):
        wrong()


def test_a_parallel_group_needs_two_steps() -> None:
    with pytest.raises(InvalidCommand, match="at least 2"):
        workflow("order").parallel(a)


def test_definitions_can_be_imported_without_engine_and_server() -> None:
    code = (
        "import sys; from headrace.workflows.definition import step, workflow; "
        "workflow('w').step(step('a')).build(); "
        "print([m for m in sys.modules if m.startswith(('headrace.engine', 'headrace.server', 'apsw'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert out.stdout.strip() == "[]"


# -- code of a workflow ------------------------------------------------------------------------------------------------


def test_ew_189_code_that_lacks_a_step_is_refused() -> None:
    flows = Workflows("memory://")
    with pytest.raises(InvalidCommand, match="no code for: b"):
        flows.register_definition_consumer(workflow("order").step(a, b).build(), {"a": handler})
    with pytest.raises(InvalidCommand, match="has no step: z"):
        flows.register_definition_consumer(workflow("order").step(a).build(), {"a": handler, "z": handler})


@pytest.mark.parametrize("code", [5, (), (handler, handler, handler), (handler, 5), "handler", [None, handler]])
def test_code_that_is_none_is_refused_before_anything_runs(code: Any) -> None:
    with pytest.raises(InvalidCommand, match="'a'"):
        Workflows("memory://").register_definition_consumer(workflow("order").step(a).build(), {"a": code})


def test_code_that_is_a_generator_is_refused_before_anything_runs() -> None:
    """A rollback of that kind was taken for done, and none of its code had run."""

    async def undo(ctx: Any) -> AsyncIterator[None]:
        yield

    definition = workflow("order").step(a).build()
    for code in ({"a": undo}, {"a": (handler, undo)}):
        with pytest.raises(InvalidCommand, match="undo is a generator, and calling one runs none of its code"):
            Workflows("memory://").register_definition_consumer(definition, code)
    with pytest.raises(InvalidCommand, match="undo is a generator"):
        Workflows("memory://").register_definition_consumer(definition, {"a": handler}, on_error=undo)


def test_the_same_workflow_is_implemented_once() -> None:
    flows = Workflows("memory://")
    definition = workflow("order").step(a).build()
    flows.register_definition_consumer(definition, {"a": handler})
    with pytest.raises(InvalidCommand, match="implemented already"):
        flows.register_definition_consumer(definition, {"a": handler})


async def test_a_class_that_needs_arguments_is_refused_with_advice() -> None:
    charge: Step[Any] = step("charge")
    flows = Workflows("memory://needs-arguments")

    @flows.implement(workflow("order").step(charge).build())
    class Order:
        def __init__(self, bank: object) -> None: ...

        @charge.execute
        async def _charge(self, ctx: Any) -> None: ...

    with pytest.raises(InvalidCommand, match="give an object instead"):
        await flows.start()


async def test_two_methods_for_one_rollback_are_refused() -> None:
    """One of them was meant for another step, which would have none."""
    charge, reserve = step("charge"), step("reserve")
    flows = Workflows("memory://two-methods")

    @flows.implement(workflow("order").step(charge, reserve).build())
    class Order:
        @charge.execute
        @reserve.execute
        async def _do(self, ctx: Any) -> None: ...

        @charge.rollback
        async def _refund(self, ctx: Any) -> None: ...

        @charge.rollback
        async def _release(self, ctx: Any) -> None: ...

    with pytest.raises(InvalidCommand, match="two methods for the rollback of step 'charge': _refund and _release"):
        await flows.start()


def test_ew_185_a_stall_interval_below_five_seconds_is_refused() -> None:
    with pytest.raises(InvalidCommand, match="at least 5 s"):
        Workflows("memory://", stall_interval=4.9)


def test_without_a_url_the_one_of_the_environment_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", "memory://of-the-environment")
    assert Workflows().url == "memory://of-the-environment"
    monkeypatch.delenv("HEADRACE_URL")
    assert Workflows().url == "headrace://localhost:6789"
