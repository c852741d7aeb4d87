"""What commands check beyond the types of their fields: sizes, lengths, combinations, the shape of a flow."""

from __future__ import annotations

import time

import msgspec
import pytest
from msgspec import UNSET, Raw

from headrace.commands.families import MAX_FAMILY_JOBS, FamilyEntry, check_family
from headrace.commands.jobs import (
    AcknowledgeBatch,
    PushEntry,
    check_batch,
    check_lengths,
    check_options,
    given_result,
    needs_check,
)
from headrace.commands.queues import DlqConfigChange, merged
from headrace.errors import InvalidCommand
from headrace.model import MAX_DATA_BYTES, UNDEFINED, DlqConfig, Repeat

NIL = Raw(b"\xc0")


def entry(**options: object) -> PushEntry:
    return PushEntry(**{"data": NIL, **options})  # type: ignore[arg-type]


def node(job_id: str, **options: object) -> FamilyEntry:
    return FamilyEntry(job_id, "q", entry(**options))


def refusal(check: object, *arguments: object) -> str:
    with pytest.raises(InvalidCommand) as refused:
        check(*arguments)  # type: ignore[operator]
    return str(refused.value)


# -- one job -------------------------------------------------------------------------------------------------


def test_data_may_be_10_mib_of_messagepack_and_no_more() -> None:
    check_options(entry(data=Raw(bytes(MAX_DATA_BYTES))))
    too_large = entry(data=Raw(bytes(MAX_DATA_BYTES + 1)))
    assert needs_check(too_large)
    assert refusal(check_options, too_large) == "Job data too large (max 10MB)"


def test_a_plain_job_is_spared_the_checks() -> None:
    assert not needs_check(entry(priority=3, unique_key="k", custom_id="c"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"repeat": Repeat()}, "repeat requires exactly one of every or pattern"),
        ({"repeat": Repeat(every=0)}, "repeat.every must be a positive finite number"),
        (
            {"repeat": Repeat(every=5), "custom_id": "x"},
            "repeat jobs cannot use JobOptions.jobId; use repeat.jobId instead",
        ),
        (
            {"repeat": Repeat(every=5), "parent_id": "p"},
            "repeat jobs cannot participate in parent or dependency relationships",
        ),
        ({"custom_id": "s", "depends_on": ["s"]}, "Job cannot depend on itself: s"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], text: str) -> None:
    assert needs_check(entry(**options))
    assert refusal(check_options, entry(**options)) == text


def test_an_error_in_a_batch_names_the_entry() -> None:
    batch = [entry(), entry(repeat=Repeat())]
    assert refusal(check_batch, batch) == "jobs[1]: repeat requires exactly one of every or pattern"


# -- settling ------------------------------------------------------------------------------------------------


def test_null_is_a_result_and_undefined_is_none() -> None:
    assert given_result(UNSET) is None
    assert given_result(Raw(UNDEFINED)) is None
    assert given_result(NIL) == b"\xc0"


def test_parallel_lists_must_be_as_long_as_the_ids() -> None:
    check_lengths("ACKB", ["a"], tokens=None, results=["r"])
    with pytest.raises(InvalidCommand, match=r"^ACKB results length must match ids length$"):
        check_lengths("ACKB", ["a"], tokens=["t"], results=[])


def test_a_batch_of_acknowledgements_keeps_what_belongs_together() -> None:
    command = AcknowledgeBatch(
        ids=["a", "b"],
        results=[Raw(UNDEFINED), NIL],
        tokens=["", "t"],
        remove_on_completes=[True, False],
    )
    first, second = command.acks()
    assert (first.id, first.token, first.result, first.remove) == ("a", None, None, True)
    assert (second.id, second.token, second.result, second.remove) == ("b", "t", b"\xc0", None)


# -- settings ------------------------------------------------------------------------------------------------


def test_a_change_of_settings_leaves_the_rest_alone() -> None:
    changed = merged(DlqConfig(max_entries=5), DlqConfigChange(auto_retry=True, max_age=None))
    assert changed == DlqConfig(auto_retry=True, max_age=None, max_entries=5)


# -- flows ---------------------------------------------------------------------------------------------------


def test_a_family_a_chain_and_nothing_are_flows() -> None:
    check_family([])
    check_family(
        [
            node("c1", parent_id="p", fail_parent_on_failure=True),
            node("c2", parent_id="p"),
            node("p", children_ids=["c1", "c2"], depends_on=["c1", "c2"]),
        ]
    )
    check_family([node("a"), node("b", depends_on=["a"]), node("c", depends_on=["b"])])


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([node("a"), node("a")], "duplicate flow job id: a"),
        ([node("a:b")], "flow job id cannot contain a colon"),
        ([node("a", custom_id="b")], "custom id does not match planned id: a"),
        ([node("a", depends_on=["x"])], "flow dependency not found: x"),
        ([node("a", depends_on=["a"])], "flow job cannot depend on itself: a"),
        ([node("a", depends_on=["b"]), node("b", depends_on=["a"])], "flow contains a dependency cycle"),
        (
            [node("c"), node("p", children_ids=["c"], depends_on=["c"])],
            "flow child c does not point back to parent p",
        ),
        (
            [node("c", parent_id="p"), node("p", children_ids=["c"])],
            "flow child is missing from dependencies: c",
        ),
        ([node("c", parent_id="p"), node("p")], "flow parent p does not own child c"),
        ([node("c", parent_id="p")], "flow parent not found: p"),
        ([node("a", repeat=Repeat(every=5))], "repeat is not supported inside an atomic flow"),
        ([node("a", unique_key="k")], "deduplication is not supported inside an atomic flow"),
        ([node("a", debounce_id="d")], "debounce is not supported inside an atomic flow"),
        (
            [node("a", fail_parent_on_failure=True, ignore_dependency_on_failure=True)],
            "flow failure policies are mutually exclusive",
        ),
        ([node("a", fail_parent_on_failure=True)], "a flow failure policy requires a parent"),
    ],
)
def test_a_flow_that_does_not_fit_together_is_refused(nodes: list[FamilyEntry], text: str) -> None:
    assert refusal(check_family, nodes) == text


def test_a_flow_has_a_largest_size_and_is_checked_in_linear_time() -> None:
    children = [f"c{i}" for i in range(MAX_FAMILY_JOBS - 1)]
    wide = [node(child, parent_id="p") for child in children]
    wide.append(node("p", children_ids=children, depends_on=children))
    begun = time.process_time()
    check_family(wide)
    assert time.process_time() - begun < 1.0  # 0.02 s on a slow machine; a quadratic check needs several seconds
    assert refusal(check_family, [*wide, node("more")]) == f"flow exceeds the {MAX_FAMILY_JOBS} job limit"


def test_entries_of_a_batch_are_decoded_with_the_same_limits_as_a_push() -> None:
    with pytest.raises(msgspec.ValidationError, match="priority"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"data": 1, "priority": 1_000_001}), type=PushEntry)
