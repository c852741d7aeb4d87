"""How jobs come in: ids, batches, custom ids and their generations, unique keys."""

from __future__ import annotations

import uuid
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.backends.base import Ack, FamilyNode
from headrace.backends.local import slices
from headrace.backends.local.slices import Breath, run_now
from headrace.errors import InvalidCommand, NotFound, Refused
from headrace.model import Dedup
from tests.conformance.rig import Rig, spec


class TestIds:
    def test_ids_are_uuid7_and_increase(self, rig: Rig) -> None:
        ids = [rig.push() for _ in range(20)]
        assert ids == sorted(set(ids))
        assert {uuid.UUID(job_id).version for job_id in ids} == {7}

    def test_a_batch_gives_ids_in_input_order(self, rig: Rig) -> None:
        ids = rig.push_many(*(spec(n) for n in range(300)))
        assert len(set(ids)) == 300
        assert [rig.look(job_id)["data"] for job_id in (ids[0], ids[150], ids[299])] == [0, 150, 299]

    def test_an_empty_batch_stores_nothing(self, rig: Rig) -> None:
        assert rig.push_many() == []
        assert rig.count() == {}

    def test_data_comes_back_byte_for_byte(self, rig: Rig) -> None:
        data = {"text": "ä" * 300, "list": [1, -1, 2**40, 1.5, None, True], "bytes": b"\x00\xff"}
        assert rig.look(rig.push(data=data))["data"] == data

    def test_a_given_timestamp_is_the_creation_time(self, rig: Rig) -> None:
        then = rig.clock.now_ms() - 5000
        job = rig.look(rig.push(timestamp=then))
        assert (job["createdAt"], job["runAt"], job["state"]) == (then, then, "waiting")

    def test_a_delay_counts_from_the_creation(self, rig: Rig) -> None:
        job_id = rig.push(delay=500)
        assert rig.look(job_id)["runAt"] == rig.clock.now_ms() + 500
        assert rig.state(job_id) == "delayed"


class TestBatches:
    def test_one_bad_entry_stores_nothing(self, rig: Rig) -> None:
        with pytest.raises(NotFound, match=r"^jobs\[1\]: Dependency job not found: nowhere$"):
            rig.push_many(spec(1), spec(2, depends_on=["nowhere"]))
        assert rig.count() == {}
        assert rig.take_words() == []

    def test_a_job_cannot_depend_on_itself(self, rig: Rig) -> None:
        with pytest.raises(InvalidCommand, match=r"^jobs\[0\]: Job cannot depend on itself: s$"):
            rig.push_many(spec(custom_id="s", depends_on=["s"]), spec())

    def test_entries_may_depend_on_each_other_in_any_order(self, rig: Rig) -> None:
        ids = rig.push_many(spec("last", depends_on=["a", "b"]), spec("a", custom_id="a"), spec("b", custom_id="b"))
        assert rig.states(*ids) == ["waiting-children", "waiting", "waiting"]
        assert rig.run().id == "a"
        assert rig.run().id == "b"
        assert rig.state(ids[0]) == "waiting"

    def test_a_custom_id_twice_in_a_batch_is_one_job(self, rig: Rig) -> None:
        first, second = rig.push_many(spec(1, custom_id="x"), spec(2, custom_id="x"))
        assert first == second == "x"
        assert rig.look("x")["data"] == 1

    def test_a_unique_key_twice_in_a_batch_is_one_job(self, rig: Rig) -> None:
        first, second, third = rig.push_many(
            spec(1, unique_key="k"), spec(2, unique_key="k"), spec(3, unique_key="other")
        )
        assert first == second != third
        assert rig.count() == {"waiting": 2}

    def test_a_repeated_entry_with_dependencies_waits_once(self, rig: Rig) -> None:
        dependency = rig.push()
        waiting = spec(custom_id="w", depends_on=[dependency])
        again = spec(custom_id="w", depends_on=[dependency])
        assert rig.push_many(waiting, again) == ["w", "w"]
        assert rig.push(custom_id="w", depends_on=[dependency]) == "w"
        rig.run()
        assert rig.state("w") == "waiting"
        assert rig.look("w")["childrenCompleted"] == 1


def begin(rig: Rig, batch: Coroutine[Any, Any, Any]) -> None:
    """Let a long batch get as far as writing its rows."""
    while not rig.backend._open_batches:
        assert isinstance(batch.send(None), Breath)


class TestLongBatches:
    """More than a tick takes: what others do between two slices counts."""

    LONG = 1200

    def test_they_are_taken_in_as_short_ones_are(self, local_rig: Rig) -> None:
        local_rig.push(custom_id="old")
        known = [spec(custom_id="old"), spec(custom_id="twice"), spec(unique_key="k")]
        again = [spec(custom_id="twice"), spec(unique_key="k"), spec(depends_on=["twice"])]
        ids = local_rig.push_many(*known, *(spec(n) for n in range(self.LONG)), *again)
        assert ids[:2] == ["old", "twice"]
        assert (ids[-3], ids[-2]) == ("twice", ids[2])
        assert local_rig.count() == {"waiting": self.LONG + 3, "waitingChildren": 1}
        assert local_rig.take_words().count("duplicated") == 3
        assert local_rig.pulled_ids(count=2000)[:3] == ["old", "twice", ids[2]], "in the order of the batch"

    def test_one_of_its_jobs_may_replace_another(self, local_rig: Rig) -> None:
        """Also when both are written with the last tick."""
        keyed = [spec(n, unique_key="k", dedup=Dedup(replace=True)) for n in range(2)]
        ids = local_rig.push_many(*(spec(n) for n in range(self.LONG)), *keyed)
        assert local_rig.states(*ids[-2:]) == ["unknown", "waiting"]
        assert local_rig.count() == {"waiting": self.LONG + 1}

    def test_durable_jobs_are_promised_to_be_on_the_disk(self, local_rig: Rig) -> None:
        local_rig.push_many(spec(durable=True), *(spec(n) for n in range(self.LONG)))
        assert local_rig.backend.sync_requests == 1

    def test_an_id_or_key_that_somebody_took_meanwhile_is_theirs(
        self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        specs = [spec(custom_id="here"), spec(custom_id="there"), spec(unique_key="k"), *[spec()] * self.LONG]
        work = local_rig.backend.insert("q", specs)
        begin(local_rig, work)
        local_rig.push(custom_id="here")
        local_rig.push("elsewhere", custom_id="there")
        owner = local_rig.push(unique_key="k")
        ids = run_now(work)
        local_rig.settle()
        assert (ids[0], ids[2]) == ("here", owner)
        assert ids[1] != "there", "ids are unique over all queues"
        assert local_rig.look(ids[1])["customId"] == "there"
        assert local_rig.count() == {"waiting": self.LONG + 3}

    def test_a_family_one_of_whose_ids_was_taken_meanwhile_leaves_nothing(
        self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        work = local_rig.backend.insert_family([FamilyNode(f"m{n}", "q", spec()) for n in range(self.LONG)])
        begin(local_rig, work)
        local_rig.push("elsewhere", custom_id="m7")
        with pytest.raises(Refused, match="flow job id already exists: m7"):
            run_now(work)
        local_rig.settle()
        assert local_rig.count() == {}
        if local_rig.kind.is_persistent:
            assert local_rig.backend._journal.db.execute("SELECT id FROM job").fetchall() == [("m7",)]
            local_rig.reopen()
            assert (local_rig.count(), local_rig.count("elsewhere")) == ({}, {"waiting": 1})

    def test_a_queue_that_is_obliterated_meanwhile_gets_the_batch_all_the_same(
        self, local_rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slices, "SLICE_SECONDS", -1)
        local_rig.push()
        work = local_rig.backend.insert("q", [spec(custom_id="one"), *[spec()] * self.LONG])
        begin(local_rig, work)
        local_rig.obliterate("q")
        assert len(run_now(work)) == self.LONG + 1
        local_rig.settle()
        assert local_rig.count() == {"waiting": self.LONG + 1}


class TestCustomIds:
    def test_the_custom_id_is_the_job_id(self, rig: Rig) -> None:
        assert rig.push(custom_id="mine") == "mine"
        assert rig.look("mine")["customId"] == "mine"

    @pytest.mark.parametrize("moment", ["waiting", "delayed", "active", "waiting-children"])
    def test_a_living_job_answers_for_its_id(self, rig: Rig, moment: str) -> None:
        other = rig.push("other")
        options = {"delayed": {"delay": 1000}, "waiting-children": {"depends_on": [other]}}.get(moment, {})
        rig.push(data="first", custom_id="x", **options)
        if moment == "active":
            rig.take()
        rig.take_words()
        assert rig.push(data="second", custom_id="x") == "x"
        assert rig.state("x") == moment
        assert rig.look("x")["data"] == "first"
        assert rig.take_words() == ["duplicated"]

    def test_a_completed_job_gives_way_to_a_new_generation(self, rig: Rig) -> None:
        rig.push(data="first", custom_id="x")
        rig.run(result="old")
        rig.add_log("x", "old line", "info")
        assert rig.push(data="second", custom_id="x") == "x"
        job = rig.look("x")
        assert (job["data"], job["state"]) == ("second", "waiting")
        assert "returnvalue" not in job
        assert rig.logs("x") == []
        assert rig.count() == {"waiting": 1}

    def test_a_dead_letter_gives_way_to_a_new_generation(self, rig: Rig) -> None:
        rig.push(data="first", custom_id="x")
        rig.bury()
        assert rig.push(data="second", custom_id="x") == "x"
        assert rig.count() == {"waiting": 1}
        assert rig.dlq_stats("q").total == 0
        assert rig.retry_dlq("q", "x", None, None) == 0

    def test_a_cancelled_id_is_free_again(self, rig: Rig) -> None:
        rig.push(custom_id="x")
        rig.cancel("x")
        assert rig.push(data="new", custom_id="x") == "x"
        assert rig.look("x")["data"] == "new"

    def test_the_same_id_in_two_queues_makes_two_jobs(self, rig: Rig) -> None:
        assert rig.push("a", "in a", custom_id="x") == "x"
        second = rig.push("b", "in b", custom_id="x")
        assert uuid.UUID(second).version == 7
        assert rig.push("b", "again", custom_id="x") == second
        assert rig.look(second)["customId"] == "x"
        assert (rig.count("a"), rig.count("b")) == ({"waiting": 1}, {"waiting": 1})

    def test_a_finished_job_is_found_by_its_custom_id(self, rig: Rig) -> None:
        rig.push("a", custom_id="x")
        second = rig.push("b", custom_id="y")
        rig.run("a", result=1)
        rig.bury("b")
        assert rig.look("x")["state"] == "completed"
        assert b"returnvalue" in bytes(rig.job_by_custom_id("x"))
        assert second.encode() in bytes(rig.job_by_custom_id("y"))
        with pytest.raises(NotFound, match=r"^Job not found$"):
            rig.job_by_custom_id("z")

    def test_a_custom_id_is_looked_for_in_the_queue_that_is_named(self, rig: Rig) -> None:
        rig.push("a", "in a", custom_id="x")
        rig.push("b", "in b", custom_id="x")
        assert b"in a" in bytes(rig.job_by_custom_id("x", "a"))
        assert b"in b" in bytes(rig.job_by_custom_id("x", "b"))
        rig.push("c")
        for elsewhere in ("c", "no such queue"):
            with pytest.raises(NotFound, match=r"^Job not found$"):
                rig.job_by_custom_id("x", elsewhere)

    def test_an_empty_custom_id_is_none(self, rig: Rig) -> None:
        first, second = rig.push(custom_id=""), rig.push(custom_id="")
        assert first != second
        assert rig.look(first)["customId"] is None

    def test_a_held_key_keeps_the_old_generation(self, rig: Rig) -> None:
        """The push is answered by the owner of the key, so nothing replaces the finished job."""
        rig.push(custom_id="x")
        rig.run(result="kept")
        owner = rig.push(unique_key="k")
        assert rig.push(custom_id="x", unique_key="k") == owner
        assert rig.look("x")["returnvalue"] == "kept"


class TestUniqueKeys:
    @pytest.mark.parametrize("moment", ["waiting", "delayed", "active"])
    def test_the_owner_answers_for_its_key(self, rig: Rig, moment: str) -> None:
        owner = rig.push(data="first", unique_key="k", delay=1000 if moment == "delayed" else 0)
        if moment == "active":
            rig.take()
        rig.take_words()
        assert rig.push(data="second", unique_key="k") == owner
        assert rig.unique_key_owner("q", "k") == owner
        assert rig.look(owner)["data"] == "first"
        assert rig.take_words() == ["duplicated"]

    def test_keys_belong_to_one_queue(self, rig: Rig) -> None:
        assert rig.push("a", unique_key="k") != rig.push("b", unique_key="k")

    def test_completion_releases_the_key(self, rig: Rig) -> None:
        first = rig.push(unique_key="k")
        rig.run()
        assert rig.unique_key_owner("q", "k") is None
        assert rig.push(unique_key="k") != first

    def test_burial_and_cancel_release_the_key(self, rig: Rig) -> None:
        rig.push(unique_key="k")
        rig.bury()
        second = rig.push(unique_key="k")
        rig.cancel(second)
        assert rig.unique_key_owner("q", "k") is None
        assert rig.push(unique_key="k") != second

    def test_the_key_is_held_while_a_retry_is_due(self, rig: Rig) -> None:
        owner = rig.push(unique_key="k")
        rig.nack(rig.take())
        assert rig.state(owner) == "delayed"
        assert rig.push(unique_key="k") == owner

    def test_a_ttl_frees_the_key_by_itself(self, rig: Rig) -> None:
        first = rig.push(unique_key="k", dedup=Dedup(ttl=1000))
        rig.advance(999)
        assert rig.push(unique_key="k", dedup=Dedup(ttl=1000)) == first
        rig.advance(1)
        assert rig.unique_key_owner("q", "k") is None
        second = rig.push(unique_key="k", dedup=Dedup(ttl=1000))
        assert second != first
        rig.run()  # the first one ends and must not take the second one's key along
        assert rig.unique_key_owner("q", "k") == second

    def test_extend_begins_the_ttl_anew(self, rig: Rig) -> None:
        extend = Dedup(ttl=1000, extend=True)
        first = rig.push(unique_key="k", dedup=extend)
        for _ in range(3):
            rig.advance(900)
            assert rig.push(unique_key="k", dedup=extend) == first
        rig.advance(1000)
        assert rig.push(unique_key="k", dedup=extend) != first

    @pytest.mark.parametrize("delay", [0, 1000])
    def test_replace_removes_an_owner_that_has_not_begun(self, rig: Rig, delay: int) -> None:
        first = rig.push(unique_key="k", delay=delay)
        second = rig.push(unique_key="k", dedup=Dedup(replace=True))
        assert rig.states(first, second) == ["unknown", "waiting"]
        assert rig.unique_key_owner("q", "k") == second

    def test_replace_takes_the_key_from_an_owner_at_work(self, rig: Rig) -> None:
        first = rig.push(unique_key="k")
        held = rig.take()
        second = rig.push(unique_key="k", dedup=Dedup(replace=True))
        assert rig.states(first, second) == ["active", "waiting"]
        rig.ack(held)
        assert rig.unique_key_owner("q", "k") == second

    def test_a_key_can_be_taken_away(self, rig: Rig) -> None:
        first = rig.push(unique_key="k")
        assert rig.remove_unique_key("q", "k") == 1
        assert rig.remove_unique_key("q", "k") == 0
        second = rig.push(unique_key="k")
        assert first != second
        assert rig.remove_job_unique_key(first) is False
        assert rig.remove_job_unique_key(second) is True
        assert rig.unique_key_owner("q", "k") is None

    def test_five_thousand_keys_are_all_exact(self, rig: Rig) -> None:
        rig.is_checking = False
        first = rig.push_many(*(spec(unique_key=f"k{n}") for n in range(5000)))
        rig.advance(60_000)
        assert rig.push_many(*(spec(unique_key=f"k{n}") for n in range(5000))) == first
        rig.is_checking = True
        assert rig.count() == {"waiting": 5000}


class TestOnce:
    @pytest.mark.parametrize("end", ["run", "bury"])
    def test_an_ended_job_still_stands_for_its_id(self, rig: Rig, end: str) -> None:
        first = rig.push(custom_id="x", id_ttl=0)
        getattr(rig, end)()
        state = rig.states(first)
        assert rig.push(custom_id="x", id_ttl=0) == first
        assert rig.states(first) == state
        assert rig.count().get("waiting", 0) == 0

    def test_a_batch_of_ids_is_used_once_until_their_time_is_over(self, local_rig: Rig) -> None:
        batch = [spec(n, custom_id=f"c{n}", id_ttl=1000, remove_on_complete=True) for n in range(100)]
        ids = local_rig.push_many(*batch)
        local_rig.complete([Ack(held.id, held.token) for held in local_rig.pull(count=100)])
        assert local_rig.push_many(*batch) == ids
        assert local_rig.count() == {}
        local_rig.advance(1001)
        local_rig.push_many(*batch)
        assert local_rig.count() == {"waiting": 100}

    def test_a_job_that_is_kept_answers_when_the_time_of_its_id_is_over(self, rig: Rig) -> None:
        first = rig.push(custom_id="x", id_ttl=1000)
        rig.run()
        rig.advance(2000)
        assert rig.push(custom_id="x", id_ttl=1000) == first
        assert rig.count().get("waiting", 0) == 0
