"""Jobs that belong together: dependsOn, parents and children, what a child's failure means, ties made and cut later."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import Raw

from headrace.backends.base import Ack
from headrace.backends.local import slices
from headrace.backends.local.slices import Breath, run_now
from headrace.commands.jobs import PushEntry
from headrace.errors import InvalidCommand, NotFound, Refused
from headrace.model import CronEntry, Dedup, DlqFilter
from tests.conformance.rig import Rig, spec, unpack

POLICIES = (
    "fail_parent_on_failure",
    "continue_parent_on_failure",
    "ignore_dependency_on_failure",
    "remove_dependency_on_failure",
)


def family(rig: Rig, children: int = 2, **options: object) -> tuple[str, list[str]]:
    """A parent in `parents` that waits for children in `q`, as an atomic flow makes them."""
    ids = [f"child-{n}" for n in range(children)]
    child = {"parent_id": "parent", "max_attempts": 1, **options}
    parent = {"children_ids": ids, "depends_on": ids}
    rig.push_family(*((job_id, "q", child) for job_id in ids), ("parent", "parents", parent))
    return "parent", ids


class TestDependencies:
    def test_a_job_waits_for_all_its_dependencies(self, rig: Rig) -> None:
        first, second = rig.push(), rig.push()
        last = rig.push("other", depends_on=[first, second])
        assert rig.state(last) == "waiting-children"
        rig.run()
        assert rig.state(last) == "waiting-children"
        rig.run()
        assert rig.state(last) == "waiting"
        assert rig.take("other").job["childrenCompleted"] == 2

    def test_completed_dependencies_count(self, rig: Rig) -> None:
        done = rig.push()
        rig.run()
        assert rig.state(rig.push(depends_on=[done])) == "waiting"

    def test_dependencies_that_were_not_kept_count(self, rig: Rig) -> None:
        done = rig.push(remove_on_complete=True)
        rig.run()
        assert rig.state(rig.push(depends_on=[done])) == "waiting"

    def test_an_unknown_dependency_is_refused(self, rig: Rig) -> None:
        with pytest.raises(NotFound, match=r"^Dependency job not found: nobody$"):
            rig.push(depends_on=["nobody"])
        assert rig.count() == {}

    def test_a_custom_id_stands_for_the_job_of_its_queue(self, rig: Rig) -> None:
        rig.push("a", custom_id="x")
        here = rig.push("b", custom_id="y")
        rig.push("a", custom_id="y")
        waiting = rig.push("b", depends_on=["y"])
        rig.run("b")
        assert rig.states(here, waiting) == ["completed", "waiting"]

    def test_a_delay_counts_after_the_dependencies(self, rig: Rig) -> None:
        first = rig.push()
        last = rig.push(depends_on=[first], delay=1000)
        rig.run()
        assert rig.state(last) == "delayed"
        rig.advance(1000)
        assert rig.state(last) == "waiting"

    def test_a_delay_counts_after_dependencies_in_another_queue(self, rig: Rig) -> None:
        first = rig.push("a")
        last = rig.push("b", depends_on=[first], delay=1000)
        rig.run("a")
        assert rig.state(last) == "delayed"
        rig.advance(1000)
        assert rig.state(last) == "waiting"

    def test_a_failed_dependency_blocks_for_ever_until_it_is_retried(self, rig: Rig) -> None:
        first = rig.push()
        last = rig.push(depends_on=[first])
        rig.bury()
        rig.advance(10_000_000)
        assert rig.state(last) == "waiting-children"
        rig.retry_dlq("q", first, None, None)
        rig.run()
        assert rig.state(last) == "waiting"

    def test_a_chain_runs_step_by_step(self, rig: Rig) -> None:
        ids = [rig.push()]
        for _ in range(5):
            ids.append(rig.push(depends_on=[ids[-1]]))
        for job_id in ids:
            (held,) = rig.pull(count=10)
            assert held.id == job_id
            rig.ack(held)

    def test_a_blocked_job_can_be_cancelled_but_not_promoted(self, rig: Rig) -> None:
        first = rig.push()
        blocked = rig.push(depends_on=[first])
        with pytest.raises(Refused, match=r"^Job not found or not delayed$"):
            rig.promote(blocked)
        rig.cancel(blocked)
        rig.run()
        assert rig.state(blocked) == "unknown"

    def test_one_dependency_may_release_many(self, rig: Rig) -> None:
        first = rig.push()
        rest = rig.push_many(*(spec(n, depends_on=[first]) for n in range(30)))
        rig.run()
        assert rig.pulled_ids() == rest

    @pytest.mark.parametrize(
        ("tie", "what"), [("depends_on", "Dependency"), ("parent_id", "Parent")], ids=["dependency", "parent"]
    )
    def test_a_long_batch_is_refused_as_a_whole_if_one_is_removed_meanwhile(
        self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch, tie: str, what: str
    ) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        rig, backend = local_rig, local_rig.backend
        target = rig.push("other")
        tied = spec(**{tie: [target] if tie == "depends_on" else target})
        work = backend.insert("q", [*(spec(custom_id=str(n)) for n in range(1500)), tied])
        while not backend._open_batches:
            assert isinstance(work.send(None), Breath)
        rig.cancel(target)
        with pytest.raises(NotFound, match=rf"jobs\[1500\]: {what} job not found: {target}"):
            run_now(work)
        rig.settle()
        assert rig.count() == {}
        assert rig.push(custom_id="7") == "7"


class TestParents:
    def test_a_parent_waits_for_its_children_and_sees_their_values(self, rig: Rig) -> None:
        parent, _ = family(rig)
        assert rig.state(parent) == "waiting-children"
        rig.run(result={"n": 0})
        rig.run(result={"n": 1})
        assert rig.state(parent) == "waiting"
        values = rig.children_values(parent)
        assert {key: unpack(raw) for key, raw in values.items()} == {
            "q:child-0": {"n": 0},
            "q:child-1": {"n": 1},
        }
        assert rig.children_values("nobody") == {}

    def test_a_flow_is_all_or_none(self, rig: Rig) -> None:
        rig.push(custom_id="taken")
        with pytest.raises(Refused, match=r"^flow job id already exists: taken$"):
            rig.push_family(("new", "q", {}), ("taken", "q", {}))
        assert rig.state("new") == "unknown"

    def test_an_id_that_an_existing_job_answers_for_is_refused(self, rig: Rig) -> None:
        def push() -> None:
            child = {"parent_id": "p", "custom_id": "c", "id_ttl": 1000}
            rig.push_family(("c", "q", child), ("p", "q", {"children_ids": ["c"], "depends_on": ["c"]}))

        rig.push("other", custom_id="c")
        rig.push(custom_id="c")  # its own id is another one
        rig.cancel("c")
        with pytest.raises(Refused, match=r"^flow job id already exists: c$"):
            push()
        rig.drain("q")
        push()
        rig.cancel("c")
        rig.cancel("p")
        with pytest.raises(Refused, match=r"^flow job id already exists: c$"):
            push()
        assert rig.count() == {}
        rig.advance(1001)
        push()
        assert rig.count() == {"waiting": 1, "waitingChildren": 1}

    def test_a_flow_answers_with_its_jobs(self, rig: Rig) -> None:
        jobs = rig.push_family(("a", "q", {"data": 1}), ("b", "q", {"depends_on": ["a"]}))
        assert [job["id"] for job in jobs] == ["a", "b"]
        assert jobs[0]["data"] == 1

    @pytest.mark.parametrize("delay", [0, 500])
    def test_a_parent_that_has_not_begun_waits_for_a_child_that_is_pushed_later(self, rig: Rig, delay: int) -> None:
        parent = rig.push("parents", delay=delay)
        children = [rig.push(parent_id=parent), rig.push(parent_id=parent)]
        job = rig.look(parent)
        assert (job["childrenIds"], job["dependsOn"], job["state"]) == (children, children, "waiting-children")
        rig.advance(500)
        rig.run(result=1)
        assert rig.pull("parents") == []
        rig.run(result=2)
        assert rig.take("parents").id == parent
        assert len(rig.children_values(parent)) == 2

    def test_a_parent_at_work_does_not_wait_for_a_child_that_is_pushed_meanwhile(self, rig: Rig) -> None:
        parent = rig.push("parents")
        held = rig.take("parents")
        child = rig.push(parent_id=parent)
        assert rig.look(parent)["childrenIds"] == [child]
        rig.ack(held)
        assert rig.state(parent) == "completed"

    def test_a_child_that_waits_for_its_parent_is_not_waited_for(self, rig: Rig) -> None:
        parent = rig.push("parents")
        child = rig.push(parent_id=parent, depends_on=[parent])
        assert (rig.state(parent), rig.state(child)) == ("waiting", "waiting-children")
        rig.run("parents")
        assert rig.state(child) == "waiting"

    def test_a_blocked_parent_waits_for_a_whole_batch_of_children(self, local_rig: Rig) -> None:
        local_rig.push("others", custom_id="first")
        local_rig.push("parents", custom_id="parent", depends_on=["first"])
        ids = local_rig.push_many(*(spec(n, parent_id="parent") for n in range(1200)))
        assert local_rig.look("parent")["childrenIds"] == ids
        local_rig.run("others")
        local_rig.complete([Ack(held.id, held.token) for held in local_rig.pull(count=1199)])
        assert local_rig.state("parent") == "waiting-children"
        local_rig.run()
        assert local_rig.state("parent") == "waiting"

    def test_an_unknown_parent_is_refused(self, rig: Rig) -> None:
        with pytest.raises(NotFound, match=r"^Parent job not found: nobody$"):
            rig.push(parent_id="nobody")


class TestFailurePolicies:
    @pytest.mark.parametrize("policy", [None, *POLICIES])
    def test_what_a_failed_child_does_to_its_parent(self, rig: Rig, policy: str | None) -> None:
        parent, _ = family(rig, **({policy: True} if policy else {}))
        rig.bury(error="bad day")
        expected = {
            None: "waiting-children",
            "fail_parent_on_failure": "failed",
            "continue_parent_on_failure": "waiting",
        }
        assert rig.state(parent) == expected.get(policy, "waiting-children")
        rig.run()
        after = {None: "waiting-children", "fail_parent_on_failure": "failed"}
        assert rig.state(parent) == after.get(policy, "waiting")
        failed = rig.children_failures(parent, ignored=False)
        ignored = rig.children_failures(parent, ignored=True)
        wanted = {"q:child-0": "bad day"}
        assert failed == (wanted if policy == "continue_parent_on_failure" else {})
        assert ignored == (wanted if policy == "ignore_dependency_on_failure" else {})

    def test_a_failing_parent_says_why(self, rig: Rig) -> None:
        family(rig, fail_parent_on_failure=True)
        rig.bury(error="bad day")
        (letter,) = rig.dead_letters("parents", DlqFilter(), None)
        assert (letter.reason, letter.error) == ("unknown", "Child job child-0 failed: bad day")

    def test_grandparents_fail_too(self, rig: Rig) -> None:
        fail = {"fail_parent_on_failure": True}
        rig.push_family(
            ("c", "q", {"parent_id": "p", **fail}),
            ("p", "q", {"parent_id": "g", "children_ids": ["c"], "depends_on": ["c"], **fail}),
            ("g", "q", {"children_ids": ["p"], "depends_on": ["p"]}),
        )
        rig.bury()
        assert rig.states("c", "p", "g") == ["failed"] * 3
        assert rig.look("g")["failedReason"] == "Child job p failed: Child job c failed: boom"

    def test_a_grandparent_goes_on_when_the_parent_may_be_ignored(self, rig: Rig) -> None:
        rig.push_family(
            ("c", "q", {"parent_id": "p", "fail_parent_on_failure": True}),
            (
                "p",
                "q",
                {
                    "parent_id": "g",
                    "children_ids": ["c"],
                    "depends_on": ["c"],
                    "ignore_dependency_on_failure": True,
                },
            ),
            ("g", "q", {"children_ids": ["p"], "depends_on": ["p"]}),
        )
        rig.bury()
        assert rig.states("p", "g") == ["failed", "waiting"]
        assert list(rig.children_failures("g", ignored=True)) == ["q:p"]

    def test_a_very_long_chain_fails_to_its_end(self, rig: Rig) -> None:
        rig.is_checking = False
        depth = 2000
        nodes = [("j0", "q", {"fail_parent_on_failure": True, "parent_id": "j1"})]
        for n in range(1, depth):
            below = f"j{n - 1}"
            options = {"depends_on": [below], "children_ids": [below], "fail_parent_on_failure": True}
            nodes.append((f"j{n}", "q", options | ({"parent_id": f"j{n + 1}"} if n + 1 < depth else {})))
        rig.push_family(*nodes)
        rig.bury()
        rig.is_checking = True
        assert rig.count() == {"failed": depth}

    @pytest.mark.parametrize("way", ["expiry", "timeout", "discard", "remove"])
    def test_however_the_child_ends(self, rig: Rig, way: str) -> None:
        parent, children = family(rig, 1, fail_parent_on_failure=True, timeout=100 if way == "timeout" else None)
        held = rig.take(lease_ms=1000)
        if way == "discard":
            rig.discard(held.id, held.token)
        elif way == "remove":
            rig.nack(held, remove=True)
        else:
            rig.advance(1100)
        assert rig.state(parent) == "failed"
        assert rig.state(children[0]) == ("unknown" if way == "remove" else "failed")

    @pytest.mark.parametrize("policy", [None, *POLICIES])
    @pytest.mark.parametrize("way", ["cancel", "force", "drain", "clean", "obliterate", "expiry"])
    def test_a_child_that_is_gone_before_it_has_ended_has_failed(self, rig: Rig, way: str, policy: str | None) -> None:
        parent, children = family(rig, 1, ttl=100 if way == "expiry" else None, **({policy: True} if policy else {}))
        if way == "expiry":
            rig.advance(200)
            assert rig.pull() == []
        elif way in ("cancel", "force"):
            if way == "force":
                rig.take()
            rig.cancel(children[0], force=way == "force")
        else:
            getattr(rig, way)("q", *((0, None, 10) if way == "clean" else ()))
        assert rig.state(children[0]) == "unknown"
        after = {None: "waiting-children", "fail_parent_on_failure": "failed"}
        assert rig.state(parent) == after.get(policy, "waiting")
        if policy == "fail_parent_on_failure":
            reason = "expired" if way == "expiry" else "removed"
            assert rig.look(parent)["failedReason"] == f"Child job {children[0]} failed: {reason}"

    @pytest.mark.parametrize("way", ["cancel", "bury"])
    def test_who_waits_for_a_job_that_is_gone_waits_for_the_next_one_of_its_id(self, rig: Rig, way: str) -> None:
        rig.push(custom_id="a")
        last = rig.push("others", depends_on=["a"])
        rig.bury() if way == "bury" else rig.cancel("a")
        assert rig.state(last) == "waiting-children"
        rig.push(custom_id="a")
        rig.run()
        assert rig.state(last) == "waiting"

    @pytest.mark.parametrize("policy", POLICIES)
    def test_a_child_that_failed_before_anybody_waited_counts_too(self, rig: Rig, policy: str) -> None:
        child = rig.push(**{policy: True})
        rig.bury(error="early")
        parent = rig.push("parents", depends_on=[child])
        expected = "failed" if policy == "fail_parent_on_failure" else "waiting"
        assert rig.state(parent) == expected


class TestTiesMadeLater:
    def test_update_parent_links_both_ways(self, rig: Rig) -> None:
        child = rig.push(data={"x": 1}, parent_id="pending")
        parent = rig.push("parents", depends_on=[child])
        rig.update_parent(child, parent)
        assert rig.look(child)["parentId"] == parent
        assert rig.look(child)["data"] == {"x": 1, "__parentId": parent, "__parentQueue": "parents"}
        assert rig.look(parent)["childrenIds"] == [child]
        rig.run(result="v")
        assert rig.state(parent) == "waiting"
        assert list(rig.children_values(parent)) == [f"q:{child}"]

    def test_a_parent_waits_for_a_child_that_is_linked_later_unless_that_is_done(self, rig: Rig) -> None:
        parent, done = rig.push("parents"), rig.push()
        rig.run()
        rig.update_parent(done, parent)
        assert rig.state(parent) == "waiting"
        child = rig.push()
        rig.update_parent(child, parent)
        assert rig.state(parent) == "waiting-children"
        rig.run()
        assert rig.state(parent) == "waiting"
        assert rig.look(parent)["childrenIds"] == [done, child]

    def test_data_that_is_no_map_stays_as_it_is(self, rig: Rig) -> None:
        child, parent = rig.push(data=[1, 2]), rig.push()
        rig.update_parent(child, parent)
        assert rig.look(child)["data"] == [1, 2]

    @pytest.mark.parametrize(
        "odd",
        [
            b"\xd4\xff\x00",  # a date that is none
            b"\xc7\x0c\xff" + bytes(5) + b"\x09" + bytes(6),  # one in the year 300,000
            b"\xa7cut \xed\xa0\xbd",  # a text that was cut in the middle of a character
            b"\xd4\x00\x00",
            b"\xcb\x7f\xf0" + bytes(6),
        ],
    )
    def test_the_rest_of_the_data_stays_as_it_is(self, rig: Rig, odd: bytes) -> None:
        child = rig.insert_one("q", PushEntry(data=Raw(b"\x82\xa1x" + odd + b"\xaa__parentId\xa7pending")))
        rig.update_parent(child, parent := rig.push())
        shown = bytes(rig.job(child))
        assert b"\x83\xa1x" + odd + b"\xaa__parentId" + msgspec.msgpack.encode(parent) in shown
        assert b"\xaa__parentId\xa7pending" not in shown

    def test_a_blocked_parent_waits_for_the_new_child_as_well(self, rig: Rig) -> None:
        first, late = rig.push(), rig.push("other")
        parent = rig.push("parents", depends_on=[first])
        rig.update_parent(late, parent)
        rig.run()
        assert rig.state(parent) == "waiting-children"
        rig.run("other")
        assert rig.state(parent) == "waiting"

    def test_what_cannot_be_linked(self, rig: Rig) -> None:
        child, parent, other = rig.push(), rig.push(), rig.push()
        with pytest.raises(InvalidCommand, match=r"^A flow job cannot be its own parent$"):
            rig.update_parent(child, child)
        with pytest.raises(NotFound, match=r"^Child job not found: nobody$"):
            rig.update_parent("nobody", parent)
        with pytest.raises(NotFound, match=r"^Parent job not found: nobody$"):
            rig.update_parent(child, "nobody")
        rig.update_parent(child, parent)
        rig.update_parent(child, parent)
        with pytest.raises(Refused, match=f"^Child job {child} already belongs to parent {parent}$"):
            rig.update_parent(child, other)
        rig.discard(other, None)
        with pytest.raises(Refused, match=f"^Parent job {other} is not linkable$"):
            rig.update_parent(parent, other)

    def test_an_active_parent_steps_back_for_its_children(self, rig: Rig) -> None:
        parent = rig.push("parents")
        held = rig.take("parents")
        child = rig.push(parent_id=parent)
        assert rig.move_to_waiting_children(parent, held.token) is True
        assert rig.state(parent) == "waiting-children"
        rig.run(result=1)
        assert rig.state(parent) == "waiting"
        assert rig.take("parents").job["attempts"] == 0
        assert rig.look(parent)["childrenIds"] == [child]

    def test_a_parent_whose_children_are_done_goes_on_at_once(self, rig: Rig) -> None:
        parent = rig.push("parents")
        held = rig.take("parents")
        rig.push(parent_id=parent)
        rig.run()
        rig.move_to_waiting_children(parent, held.token)
        assert rig.state(parent) == "waiting"

    @pytest.mark.parametrize("policy", POLICIES)
    def test_stepping_back_hears_of_children_that_failed(self, rig: Rig, policy: str) -> None:
        parent = rig.push("parents")
        held = rig.take("parents")
        rig.push(parent_id=parent, **{policy: True})
        rig.bury()
        rig.move_to_waiting_children(parent, held.token)
        assert rig.state(parent) == ("failed" if policy == "fail_parent_on_failure" else "waiting")

    def test_what_a_parent_waited_for_before_it_failed_is_not_waited_for_again(self, local_rig: Rig) -> None:
        hard = {"fail_parent_on_failure": True, "max_attempts": 1}
        local_rig.push(custom_id="first", **hard)
        local_rig.push(custom_id="second", **hard)
        local_rig.push("parents", custom_id="parent", depends_on=["first", "second"])
        local_rig.bury()
        assert local_rig.retry_dlq("parents", "parent", None, None) == 1
        held = local_rig.take("parents")
        local_rig.move_to_waiting_children(held.id, held.token)
        local_rig.bury()
        assert local_rig.state("parent") == "waiting-children"

    def test_only_an_active_job_steps_back(self, rig: Rig) -> None:
        with pytest.raises(Refused, match=r"^Job is not active$"):
            rig.move_to_waiting_children(rig.push(), None)


class TestReplacing:
    """`dedup.replace` of jobs that others wait for."""

    @pytest.mark.parametrize("family", [False, True])
    def test_a_job_that_others_wait_for_is_not_replaced(self, rig: Rig, family: bool) -> None:
        if family:
            rig.push("parents", custom_id="parent")
            rig.move_to_waiting_children("parent", rig.take("parents").token)
        first = rig.push(unique_key="k", parent_id="parent" if family else None)
        last = "parent" if family else rig.push("others", depends_on=[first])
        newer = {"unique_key": "k", "dedup": Dedup(replace=True)}
        refusal = f"Cannot replace deduplicated job {first} because live jobs depend on it$"
        with pytest.raises(Refused, match=f"^{refusal}"):
            rig.push(**newer)
        with pytest.raises(Refused, match=rf"^jobs\[1\]: {refusal}"):
            rig.push_many(spec(), spec(**newer))
        assert rig.count() == {"waiting": 1}
        held = rig.take()
        assert rig.push(**newer) != first  # an owner at work merely loses the key
        rig.ack(held)
        assert rig.state(last) == "waiting"

    def test_a_long_batch_is_refused_as_a_whole(self, rig: Rig) -> None:
        first = rig.push(unique_key="k700")
        rig.push("others", depends_on=[first])
        newer = [spec(n, unique_key=f"k{n}", dedup=Dedup(replace=True)) for n in range(800)]
        with pytest.raises(Refused, match=rf"^jobs\[700\]: Cannot replace deduplicated job {first} "):
            rig.push_many(*newer)
        assert rig.count() == {"waiting": 1}

    def test_a_dead_letter_that_once_waited_for_a_job_does_not_keep_it(self, rig: Rig) -> None:
        first = rig.push(unique_key="k")
        rig.discard(rig.push("others", depends_on=[first]), None)
        second = rig.push(unique_key="k", dedup=Dedup(replace=True))
        assert rig.states(first, second) == ["unknown", "waiting"]

    def test_a_job_does_not_replace_what_it_depends_on(self, rig: Rig) -> None:
        first = rig.push(unique_key="k", custom_id="a")
        newer = {"unique_key": "k", "dedup": Dedup(replace=True)}
        with pytest.raises(Refused, match=f"^Cannot replace deduplicated job {first} "):
            rig.push(depends_on=[first], **newer)
        batch = [spec(unique_key="j", custom_id="b"), spec(depends_on=["b"]), spec(**newer | {"unique_key": "j"})]
        with pytest.raises(Refused, match=r"^jobs\[2\]: Cannot replace deduplicated job b "):
            rig.push_many(*batch)
        assert rig.count() == {"waiting": 1}

    def test_a_dependency_on_the_job_of_another_queue_does_not_keep_the_one_of_this(self, rig: Rig) -> None:
        rig.push("others", custom_id="a")
        first = rig.push(unique_key="k", custom_id="a")
        second = rig.push(unique_key="k", dedup=Dedup(replace=True), depends_on=["a"])
        assert rig.states("a", first, second) == ["waiting", "unknown", "waiting-children"]

    def test_the_same_push_again_is_answered_by_its_job_whoever_waits_for_that(self, rig: Rig) -> None:
        again = {"unique_key": "k", "custom_id": "a", "dedup": Dedup(replace=True)}
        first = rig.push(**again)
        rig.push(depends_on=[first])
        assert rig.push(**again) == first

    def test_a_parent_does_not_wait_for_what_was_replaced_within_a_batch(self, rig: Rig) -> None:
        rig.push("parents", custom_id="parent")
        rig.move_to_waiting_children("parent", rig.take("parents").token)
        child = {"unique_key": "k", "parent_id": "parent", "dedup": Dedup(replace=True)}
        _, second = rig.push_many(spec(**child), spec(**child))
        assert rig.look("parent")["childrenIds"] == [second]
        rig.run()
        assert rig.state("parent") == "waiting"

    def test_a_schedule_keeps_a_job_that_others_wait_for(self, rig: Rig) -> None:
        first = rig.push(unique_key="k")
        rig.push("others", depends_on=[first])
        rig.put_cron(CronEntry("nightly", "q", b"\x01", None, 1000.0, 5000.0))
        fired = CronEntry("nightly", "q", b"\x01", None, 1000.0, 6000.0, last_slot=5000.0)
        assert rig.fire_cron(fired, spec(unique_key="k", dedup=Dedup(replace=True))) == first


class TestTiesCut:
    def test_a_child_may_be_let_go(self, rig: Rig) -> None:
        parent, children = family(rig)
        assert rig.remove_child_dependency(children[0]) is True
        assert rig.look(children[0])["parentId"] is None
        rig.bury()
        assert rig.state(parent) == "waiting-children"
        rig.run()
        assert rig.state(parent) == "waiting"

    def test_letting_the_last_one_go_releases_the_parent(self, rig: Rig) -> None:
        parent, children = family(rig, 1)
        rig.remove_child_dependency(children[0])
        assert rig.state(parent) == "waiting"
        assert rig.look(parent)["childrenIds"] == []

    def test_what_cannot_be_cut(self, rig: Rig) -> None:
        job_id = rig.push()
        with pytest.raises(Refused, match=f"^Job {job_id} has no parent$"):
            rig.remove_child_dependency(job_id)
        with pytest.raises(NotFound, match=r"^Job not found: nobody$"):
            rig.remove_child_dependency("nobody")

    def test_unprocessed_children_can_be_removed(self, rig: Rig) -> None:
        parent, children = family(rig, 3)
        rig.run(result="kept")
        held = rig.take()
        rig.remove_unprocessed_children(parent)
        assert rig.states(*children) == ["completed", "active", "unknown"]
        assert rig.state(parent) == "waiting-children"
        rig.ack(held)
        assert rig.state(parent) == "waiting"

    def test_children_that_wait_for_each_other_can_be_removed(self, rig: Rig) -> None:
        fails = {"parent_id": "parent", "fail_parent_on_failure": True}
        first, second = ("a", "q", fails), ("b", "q", {**fails, "depends_on": ["a"], "remove_on_fail": True})
        rig.push_family(first, second, ("parent", "q", {"children_ids": ["a", "b"], "depends_on": ["a", "b"]}))
        rig.remove_unprocessed_children("parent")
        assert rig.states("a", "b", "parent") == ["unknown", "unknown", "waiting"]

    def test_removing_the_parent_leaves_the_children(self, rig: Rig) -> None:
        parent, children = family(rig)
        rig.cancel(parent)
        rig.run()
        rig.bury()
        assert rig.states(*children) == ["completed", "failed"]
