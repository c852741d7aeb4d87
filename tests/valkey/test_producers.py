"""What producers of other languages may rely on: the functions of glide-mq's protocol as we provide them."""

from __future__ import annotations

import base64
import gzip
import json
import time

import pytest
import redis

import valkey
from tests.conformance.rig import Rig
from tests.valkey.foreign import Foreign
from tests.valkeyserver import shared_server

BAND = 2**42


def test_the_example_of_the_protocol_runs_as_written_and_our_worker_completes_its_job(rig: Rig) -> None:
    """With redis-py and 17 arguments, on a server that only Headrace has prepared."""
    r = redis.Redis(host="localhost", port=shared_server().port, decode_responses=True)
    p = f"{rig.backend.url.prefix}:{{tasks}}"
    job_data = json.dumps({"to": "user@example.com", "subject": "Hello"})
    job_opts = json.dumps({})
    timestamp = str(int(time.time() * 1000))
    keys = (f"{p}:id", f"{p}:stream", f"{p}:scheduled", f"{p}:events")
    args = ("send-email", job_data, job_opts, timestamp, "0", "0", "", "0", "", *("0",) * 7, "")
    assert len(args) == 17
    result = r.fcall("glidemq_addJob", 4, *keys, *args)
    assert result == "1"
    job_hash = r.hgetall(f"{p}:job:{result}")
    assert (job_hash["name"], job_hash["data"], job_hash["state"]) == ("send-email", job_data, "waiting")
    assert r.xlen(f"{p}:stream") == 1

    held = rig.take("tasks")
    assert (held.id, held.job["data"]["to"], held.job["name"]) == ("tasks:1", "user@example.com", "send-email")
    rig.ack(held, {"sent": True})
    assert r.hgetall(f"{p}:job:1")["returnvalue"] == '{"sent":true}'
    assert (r.zcard(f"{p}:completed"), r.xlen(f"{p}:stream"), r.zcard(f"{p}:failed")) == (1, 0, 0)


class TestVersion:
    def test_it_answers_with_and_without_the_dummy_key(self, foreign: Foreign) -> None:
        version = foreign.client.fcall("glidemq_version", 1, "{glidemq}:_")
        assert version.startswith("40+headrace.")
        assert foreign.client.fcall("glidemq_version", 0) == version
        assert foreign.client.fcall_ro("glidemq_version", 0) == version


class TestAddJob:
    def test_the_hash_has_every_field_of_the_protocol(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add({"a": 1}, opts='{"attempts":3}', attempts=3)
        fields = foreign.hash(job_id)
        del fields["entry"]
        assert fields == {
            "id": "1",
            "name": "work",
            "data": '{"a": 1}',
            "opts": '{"attempts":3}',
            "timestamp": str(rig.clock.now_ms()),
            "attemptsMade": "0",
            "delay": "0",
            "priority": "0",
            "maxAttempts": "3",
            "state": "waiting",
        }
        ((_, entry),) = foreign.client.xrange(foreign.key("stream"))
        assert entry == {"jobId": "1", "name": "work"}
        assert foreign.events() == [{"event": "added", "jobId": "1", "name": "work"}]

    def test_delays_and_priorities_are_scores_of_the_scheduled_set(self, rig: Rig, foreign: Foreign) -> None:
        now = rig.clock.now_ms()
        delayed, urgent = foreign.add(delay=500), foreign.add(priority=3)
        both, most = foreign.add(delay=500, priority=2), foreign.add(priority=2048)
        scores = dict(foreign.client.zrange(foreign.key("scheduled"), 0, -1, withscores=True))
        assert scores == {delayed: now + 500, urgent: 3 * BAND, both: 2 * BAND + now + 500, most: 2048 * BAND}
        states = [foreign.hash(job_id)["state"] for job_id in (delayed, urgent, both, most)]
        assert states == ["delayed", "prioritized", "delayed", "prioritized"]

    def test_automatic_ids_pass_over_taken_ones(self, foreign: Foreign) -> None:
        assert foreign.add(custom_id="10") == "10"
        assert foreign.add() == "11"
        foreign.client.set(foreign.key("id"), 8)
        assert [foreign.add() for _ in range(3)] == ["9", "12", "13"]

    def test_too_many_taken_ids_are_an_error(self, foreign: Foreign) -> None:
        pipe = foreign.client.pipeline()
        for n in range(1, 1001):
            pipe.hset(foreign.key(f"job:{n}"), "id", n)
        pipe.execute()
        assert foreign.add() == "ERR:ID_EXHAUSTED"
        assert foreign.client.xlen(foreign.key("stream")) == 0

    def test_a_taken_custom_id_is_a_duplicate_and_changes_nothing(self, foreign: Foreign) -> None:
        assert foreign.add(1, custom_id="mine") == "mine"
        before = foreign.hash("mine")
        assert foreign.add(2, custom_id="mine") == "duplicate"
        assert foreign.hash("mine") == before
        assert foreign.client.xlen(foreign.key("stream")) == 1

    @pytest.mark.parametrize("custom_id", ["a:b", "a{b", "a}b", "a\x00b", "a\x7fb", "x" * 257])
    def test_bad_custom_ids_are_refused(self, foreign: Foreign, custom_id: str) -> None:
        with pytest.raises(valkey.ResponseError, match="custom job id"):
            foreign.add(custom_id=custom_id)
        assert foreign.client.keys(foreign.key("*")) == []

    def test_a_custom_id_has_256_characters_of_any_language(self, rig: Rig, foreign: Foreign) -> None:
        custom_id = "ö" * 256
        assert foreign.add(custom_id=custom_id) == custom_id
        assert rig.take().id == f"q:{custom_id}"
        with pytest.raises(valkey.ResponseError, match="custom job id"):
            foreign.add(custom_id=custom_id + "ö")

    @pytest.mark.parametrize(
        "given", [{"timestamp": "soon"}, {"timestamp": "nan"}, {"delay": "x"}, {"delay": "inf"}, {"priority": 3000}]
    )
    def test_bad_numbers_are_refused(self, foreign: Foreign, given: dict[str, object]) -> None:
        with pytest.raises(valkey.ResponseError, match=next(iter(given))):
            foreign.add(**given)
        assert foreign.client.keys(foreign.key("*")) == []

    def test_a_cost_above_the_capacity_consumes_nothing(self, foreign: Foreign) -> None:
        assert foreign.add(ordering="k", capacity=1000, refill=1000, cost=2000) == "ERR:COST_EXCEEDS_CAPACITY"
        assert foreign.client.keys(foreign.key("*")) == []

    def test_an_ordering_key_is_stored_as_group_key_with_its_number(self, foreign: Foreign) -> None:
        first, second = foreign.add(ordering="k", concurrency=2), foreign.add(ordering="k", concurrency=2)
        seqs = [foreign.hash(job_id)["orderingSeq"] for job_id in (first, second)]
        assert (seqs, foreign.hash(first)["groupKey"]) == (["1", "2"], "k")
        group = foreign.client.hgetall(foreign.key("group:k"))
        assert (group["maxConcurrency"], group["nextSeq"]) == ("2", "1")

    def test_a_child_that_does_not_say_where_its_parent_is_keeps_it_from_nothing(
        self, rig: Rig, foreign: Foreign
    ) -> None:
        """The child ends without telling anybody, so nobody may wait for it."""
        parent, child = foreign.flow([{}])
        keys, deps = foreign._keys("q"), foreign.key(f"deps:{parent}")
        foreign.client.fcall("glidemq_addJob", 5, *keys, deps, *foreign._seventeen(None, parent=parent))
        known = foreign._seventeen(None, parent=parent)
        another = foreign.client.fcall("glidemq_addJob", 5, *keys, deps, *known, "0", "q")
        assert set(foreign.client.smembers(deps)) == {foreign.key(child), foreign.key(another)}

    def test_the_appended_arguments_are_understood(self, foreign: Foreign) -> None:
        lifo = foreign.add(more=("1", "", "every-minute", "1"))
        assert foreign.client.lrange(foreign.key("lifo"), 0, -1) == [lifo]
        fields = foreign.hash(lifo)
        assert (fields["lifo"], fields["schedulerName"]) == ("1", "every-minute")
        assert foreign.events() == []

    def test_ttl_and_cost_are_stored_where_given(self, rig: Rig, foreign: Foreign) -> None:
        fields = foreign.hash(foreign.add(ttl=50, ordering="k", capacity=5000, refill=1000, cost=2500))
        assert (fields["expireAt"], fields["cost"]) == (str(rig.clock.now_ms() + 50), "2500")


class TestDedup:
    def test_simple_skips_while_the_job_lives(self, rig: Rig, foreign: Foreign) -> None:
        assert foreign.dedup("d", "simple") == "1"
        assert foreign.dedup("d", "simple") == "skipped"
        assert foreign.client.hget(foreign.key("dedup"), "d") == f"1:{rig.clock.now_ms()}"
        rig.ack(rig.take())
        assert foreign.dedup("d", "simple") == "2"

    def test_throttle_skips_within_its_time(self, rig: Rig, foreign: Foreign) -> None:
        assert foreign.dedup("d", "throttle", 100) == "1"
        rig.clock.advance(99)
        assert foreign.dedup("d", "throttle", 100) == "skipped"
        rig.clock.advance(1)
        assert foreign.dedup("d", "throttle", 100) == "2"
        assert foreign.dedup("d", "throttle", 0) == "3"

    def test_debounce_replaces_what_has_not_begun(self, rig: Rig, foreign: Foreign) -> None:
        assert foreign.dedup("d", "debounce", delay=100) == "1"
        assert foreign.dedup("d", "debounce", delay=100) == "2"
        assert foreign.hash("1") == {}
        assert foreign.client.zrange(foreign.key("scheduled"), 0, -1) == ["2"]
        assert [event["event"] for event in foreign.events()] == ["added", "removed", "added"]
        rig.clock.advance(100)
        rig.take()
        assert foreign.dedup("d", "debounce", delay=100) == "skipped"

    def test_debounce_of_an_ordered_job_leaves_no_hole(self, rig: Rig, foreign: Foreign) -> None:
        foreign.dedup("d", "debounce", delay=100, ordering="k")
        second = foreign.dedup("d", "debounce", delay=100, ordering="k")
        rig.clock.advance(100)
        assert rig.pulled_ids() == [f"q:{second}"]

    def test_debounce_lets_those_go_that_waited_behind_the_job(self, rig: Rig, foreign: Foreign) -> None:
        foreign.dedup("d", "debounce", delay=100, ordering="k")
        behind = foreign.add(ordering="k")
        assert rig.pull() == []
        last = foreign.dedup("d", "debounce", delay=100, ordering="k")
        assert rig.run().id == f"q:{behind}"
        rig.advance(100)
        assert rig.run().id == f"q:{last}"

    def test_debounce_of_a_retry_gives_its_slot_back(self, rig: Rig, foreign: Foreign) -> None:
        opts = '{"attempts":2,"backoff":{"type":"fixed","delay":1000}}'
        foreign.dedup("d", "debounce", delay=100, ordering="k", opts=opts)
        behind = foreign.add(ordering="k")
        rig.advance(100)
        rig.nack(rig.take())
        assert rig.pull() == []
        last = foreign.dedup("d", "debounce", delay=100, ordering="k")
        assert rig.run().id == f"q:{behind}"
        rig.advance(100)
        assert rig.run().id == f"q:{last}"
        assert foreign.client.hget(foreign.key("group:k"), "active") == "0"

    def test_a_taken_custom_id_leaves_the_entry_alone(self, foreign: Foreign) -> None:
        foreign.add(custom_id="x")
        assert foreign.dedup("d", "simple", custom_id="x") == "duplicate"
        assert foreign.client.hget(foreign.key("dedup"), "d") is None

    def test_an_unknown_mode_always_creates(self, foreign: Foreign) -> None:
        assert [foreign.dedup("d", "whatever") for _ in range(2)] == ["1", "2"]

    def test_entries_of_jobs_long_gone_are_dropped_by_and_by(self, rig: Rig, foreign: Foreign) -> None:
        for n in range(20):
            foreign.dedup(f"old{n}", "simple")
        rig.drain("q")
        for n in range(20):
            foreign.client.delete(foreign.key(f"job:{n + 1}"))
        rig.clock.advance(2 * 86_400_000)
        for _ in range(200):
            foreign.dedup("new", "throttle")
        assert foreign.client.hlen(foreign.key("dedup")) == 1


class TestFlows:
    def test_a_parent_runs_after_its_last_child(self, rig: Rig, foreign: Foreign) -> None:
        parent, first, second = foreign.flow([{}, {"queue": "other"}])
        assert foreign.hash(parent)["state"] == "waiting-children"
        prefix = rig.backend.url.prefix
        assert set(foreign.client.smembers(foreign.key(f"deps:{parent}"))) == {
            f"{prefix}:{{q}}:{first}",
            f"{prefix}:{{other}}:{second}",
        }
        assert foreign.hash(first)["parentQueue"] == "q"
        rig.ack(rig.take("other"), "b")
        assert foreign.hash(parent)["state"] == "waiting-children"
        rig.ack(rig.take("q"), "a")
        fields = foreign.hash(parent)
        assert (fields["state"], fields["depsCompleted"]) == ("waiting", "2")
        assert foreign.events()[-1] == {"event": "active", "jobId": parent}
        assert rig.pulled_ids() == [f"q:{parent}"]

    def test_children_are_told_of_before_their_parent(self, foreign: Foreign) -> None:
        parent, first, second = foreign.flow([{}, {}])
        assert [(event["event"], event["jobId"]) for event in foreign.events()] == [
            ("added", first),
            ("added", second),
            ("added", parent),
        ]

    @pytest.mark.parametrize(("child", "parent"), [(3000, 0), (0, 3000)])
    def test_bad_priorities_are_refused(self, foreign: Foreign, child: int, parent: int) -> None:
        with pytest.raises(valkey.ResponseError, match="priority"):
            foreign.flow([{"priority": child}], parent={"priority": parent})
        assert foreign.client.keys(foreign.key("*")) == []

    def test_extra_members_count_and_finished_ones_are_done(self, rig: Rig, foreign: Foreign) -> None:
        done, open_one = foreign.add(), foreign.add()
        rig.ack(rig.take())
        prefix = rig.backend.url.prefix
        (parent,) = foreign.flow([], extras=tuple(f"{prefix}:{{q}}:{job_id}" for job_id in (done, open_one)))
        assert foreign.hash(parent)["depsCompleted"] == "1"
        foreign.client.hset(foreign.key(f"job:{open_one}"), mapping={"parentId": parent, "parentQueue": "q"})
        rig.ack(rig.take())
        assert foreign.hash(parent)["state"] == "waiting"

    def test_no_children_mean_no_waiting(self, rig: Rig, foreign: Foreign) -> None:
        (parent,) = foreign.flow([])
        assert rig.pulled_ids() == [f"q:{parent}"]

    @pytest.mark.parametrize("taken", ["existing", "twice", "parent"])
    def test_taken_custom_ids_are_duplicates_and_store_nothing(self, foreign: Foreign, taken: str) -> None:
        if taken == "existing":
            foreign.add(custom_id="x")
        before = sorted(foreign.client.keys(foreign.key("*")))
        children = [{"custom_id": "x"}, {"custom_id": "x" if taken == "twice" else "y"}]
        parent = {"custom_id": "x"} if taken == "parent" else {}
        assert foreign.flow(children, parent=parent) == ["duplicate"]
        assert sorted(foreign.client.keys(foreign.key("*"))) == before

    def test_a_cost_above_the_capacity_leaves_no_orphan(self, foreign: Foreign) -> None:
        opts = {"ordering": {"key": "k", "tokenBucket": {"capacity": 1, "refillRate": 1}}, "cost": 2}
        assert foreign.flow([{}, {"opts": opts}]) == "ERR:COST_EXCEEDS_CAPACITY"
        assert foreign.client.keys(foreign.key("*")) == []

    def test_the_parents_own_delay_and_priority_count(self, rig: Rig, foreign: Foreign) -> None:
        late, _ = foreign.flow([{}], parent={"delay": 500})
        rig.ack(rig.take())
        assert foreign.hash(late)["state"] == "delayed"
        rig.clock.advance(500)
        assert rig.pulled_ids() == [f"q:{late}"]
        urgent, _ = foreign.flow([{}], parent={"priority": 2})
        rig.ack(rig.take())
        assert foreign.hash(urgent)["state"] == "prioritized"
        assert rig.pulled_ids() == [f"q:{urgent}"]

    @pytest.mark.parametrize(
        ("policy", "state"),
        [
            ("failParentOnFailure", "failed"),
            ("continueParentOnFailure", "waiting"),
            ("ignoreDependencyOnFailure", "waiting"),
            ("removeDependencyOnFailure", "waiting"),
            (None, "waiting-children"),
        ],
    )
    def test_a_failed_child_does_what_its_options_say(
        self, rig: Rig, foreign: Foreign, policy: str | None, state: str
    ) -> None:
        parent, _ = foreign.flow([{"opts": {policy: True} if policy else {}}])
        rig.nack(rig.take())
        assert foreign.hash(parent)["state"] == state


class TestGraphs:
    """Children with several parents, as `glidemq_registerParent` ties them."""

    def _tie(self, foreign: Foreign, child: str, parent: str, queue: str) -> None:
        foreign.client.sadd(foreign.key(f"parents:{child}"), foreign.key(parent, queue))
        foreign.client.sadd(foreign.key(f"deps:{parent}", queue), foreign.key(child))

    @pytest.mark.parametrize("queue", ["q", "other"])
    def test_all_parents_hear_of_the_end(self, rig: Rig, foreign: Foreign, queue: str) -> None:
        one, child = foreign.flow([{}])
        other, sibling = foreign.flow([{"queue": "siblings"}], queue=queue)
        self._tie(foreign, child, other, queue)
        assert rig.run().id == f"q:{child}"
        assert foreign.hash(one)["state"] == "waiting"
        assert foreign.hash(other, queue)["state"] == "waiting-children"
        assert rig.run("siblings").id == f"siblings:{sibling}"
        assert (foreign.hash(other, queue)["state"], foreign.hash(other, queue)["depsCompleted"]) == ("waiting", "2")

    def test_all_parents_hear_of_a_failure(self, rig: Rig, foreign: Foreign) -> None:
        one, child = foreign.flow([{"opts": {"failParentOnFailure": True}}])
        other, _ = foreign.flow([{"queue": "siblings"}])
        self._tie(foreign, child, other, "q")
        rig.bury()
        assert [foreign.hash(parent)["state"] for parent in (one, other)] == ["failed", "failed"]


class TestPause:
    def test_a_queue_paused_by_somebody_else_gives_nothing(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add()
        keys = (foreign.key("meta"), foreign.key("events"))
        assert foreign.client.fcall("glidemq_pause", 2, *keys) == 1
        assert rig.is_paused("q") is True
        assert rig.pull() == []
        foreign.client.fcall("glidemq_resume", 2, *keys)
        assert rig.pulled_ids() == [f"q:{job_id}"]
        assert [event for event in foreign.events() if event["jobId"] == "0"] == [
            {"event": "paused", "jobId": "0"},
            {"event": "resumed", "jobId": "0"},
        ]


def test_a_large_payload_packed_by_somebody_else_is_read(rig: Rig, foreign: Foreign) -> None:
    value = {"text": "x" * 5000}
    packed = gzip.compress(json.dumps(value).encode())
    job_id = foreign.add()
    foreign.client.hset(foreign.key(f"job:{job_id}"), "data", b"gz:" + base64.b64encode(packed))
    assert rig.take().job["data"] == value
