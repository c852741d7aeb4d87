"""What other programs write into our keys and leave behind in them: read as far as it makes sense, harming nobody."""

from __future__ import annotations

import json

import pytest

from headrace.backends.base import Ack, GroupDemand
from headrace.model import DlqConfig
from tests.conformance.rig import Rig, spec
from tests.valkey.foreign import Foreign
from tests.valkey.nodeworker import NodeWorker

LOCK_MS = 30_000
IN_TURN = GroupDemand()


@pytest.fixture
def node(foreign: Foreign) -> NodeWorker:
    return NodeWorker(foreign)


def age(foreign: Foreign, owner: str = "worker-1-abcdef12") -> None:
    """The server counts idle time by itself: claim all pending entries as old."""
    pending = foreign.client.xpending_range(foreign.key("stream"), "workers", "-", "+", 100)
    entries = [row["message_id"] for row in pending]
    foreign.client.xclaim(foreign.key("stream"), "workers", owner, 0, entries, idle=2 * LOCK_MS, justid=True)


class TestIds:
    """Ids of Node producers belong to one queue: everybody here knows the job by `<queue>:<id>`."""

    def test_a_job_with_a_custom_id_can_be_ended(self, rig: Rig, foreign: Foreign) -> None:
        foreign.add(custom_id="order-7", opts=json.dumps({"attempts": 3}))
        held = rig.take()
        assert held.id == "q:order-7"
        rig.nack(held)
        again = rig.take()
        rig.ack(again, "done")
        assert (rig.state("q:order-7"), rig.look("q:order-7")["returnvalue"]) == ("completed", "done")

    def test_equal_numbers_in_two_queues_are_two_jobs(self, rig: Rig, foreign: Foreign) -> None:
        held = []
        for queue in ("a", "b"):
            assert foreign.add(queue=queue) == "1"
            held.append(rig.take(queue))
        assert rig.complete([Ack(one.id, one.token) for one in held]) == []
        assert rig.states("a:1", "b:1") == ["completed", "completed"]

    @pytest.mark.parametrize("end", ["completed", "failed"])
    def test_events_name_the_job_as_those_know_it_who_wait_for_it(self, rig: Rig, foreign: Foreign, end: str) -> None:
        foreign.add()
        held = rig.take()
        if end == "completed":
            rig.ack(held)
        else:
            rig.nack(held)
        told = [event.job for event in rig.events if event.event in ("pulled", end)]
        assert told == ["q:1", "q:1"]

    def test_an_id_that_looks_like_a_refusal_is_an_id(self, rig: Rig) -> None:
        rig.push(custom_id="!", unique_key="k")
        assert rig.unique_key_owner("q", "k") == "!"

    def test_members_of_a_family_do_not_take_ids_of_jobs_in_other_queues(self, rig: Rig) -> None:
        rig.push("a", custom_id="x")
        with pytest.raises(Exception, match="flow job id already exists: x"):
            rig.push_family(("x", "b", {}))
        assert rig.look("x")["queue"] == "a"
        assert rig.count("b") == {}


class TestValues:
    @pytest.mark.parametrize(
        "fields",
        [
            {"timestamp": "nil", "delay": "", "attemptsMade": "x"},
            {"opts": '{"attempts":"x","timeout":[],"backoff":{"type":{},"delay":"soon"}}'},
            {"opts": "[" * 5000},
            {"opts": '{"attempts":1e300}', "timestamp": "1e300"},
            {"data": '{"n":18446744073709551616}'},
            {"data": "[" * 5000 + "]" * 5000},
        ],
        ids=["numbers", "options", "depth of options", "size of numbers", "integers", "depth"],
    )
    def test_a_job_that_makes_little_sense_comes_with_those_that_were_claimed_with_it(
        self, rig: Rig, foreign: Foreign, fields: dict[str, str]
    ) -> None:
        job_id = foreign.add()
        foreign.client.hset(foreign.key(f"job:{job_id}"), mapping=fields)
        foreign.add()
        held = rig.pull(count=2)
        assert [one.id for one in held] == ["q:1", "q:2"]
        for one in held:
            rig.ack(one)


class TestLeftBehind:
    @pytest.mark.timeout(20)
    @pytest.mark.parametrize("group", ["g", None])
    def test_a_member_of_a_group_whose_hash_is_gone_holds_nobody_up(
        self, rig: Rig, foreign: Foreign, group: str | None
    ) -> None:
        gone, stays = rig.push(group_id=group, priority=1), rig.push(group_id=group, priority=1)
        foreign.client.delete(foreign.key(f"job:{gone}"))
        assert rig.pulled_ids(group=IN_TURN) == [stays]
        assert foreign.client.zcard(foreign.key(f"hr:group:{group or ''}")) == 0

    @pytest.mark.parametrize(("way", "given"), [("lifo", {"more": ("1",)}), ("priority", {"priority": 4})])
    def test_a_list_is_searched_past_what_is_gone(
        self, rig: Rig, foreign: Foreign, node: NodeWorker, way: str, given: dict[str, object]
    ) -> None:
        ids = [foreign.add(**given) for _ in range(3)]
        node.promote()
        foreign.client.delete(foreign.key(f"job:{ids[0]}"), foreign.key(f"job:{ids[2]}"))
        assert rig.pulled_ids() == [f"q:{ids[1]}"]

    def test_a_claim_of_one_finds_the_job_behind_entries_that_are_there_for_nothing(
        self, rig: Rig, foreign: Foreign
    ) -> None:
        gone, old, expired, last = foreign.add(), foreign.add(), foreign.add(ttl=50), foreign.add()
        foreign.client.delete(foreign.key(f"job:{gone}"))
        foreign.client.hset(foreign.key(f"job:{old}"), "state", "completed")
        rig.clock.advance(60)
        assert rig.take().id == f"q:{last}"
        assert foreign.hash(expired)["failedReason"] == "expired"

    def test_a_claim_passes_over_so_many_and_asks_to_be_made_again(self, rig: Rig, foreign: Foreign) -> None:
        for _ in range(500):
            foreign.add(ttl=50)
        last = foreign.add()
        rig.clock.advance(60)
        calls = 0
        while not (held := rig.pull()):
            calls += 1
            assert "q" in rig.backend.take_ready()
        assert (held[0].id, calls) == (f"q:{last}", 2)

    def test_a_job_in_a_list_that_has_ended_does_not_run(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add(more=("1",))
        foreign.client.hset(foreign.key(f"job:{job_id}"), "state", "failed")
        assert rig.pull() == []
        assert foreign.hash(job_id)["state"] == "failed"

    def test_an_entry_of_a_job_that_has_ended_does_not_bring_it_back(
        self, rig: Rig, foreign: Foreign, node: NodeWorker
    ) -> None:
        job_id = foreign.add()
        taken = node.take()
        assert taken is not None
        foreign.client.hset(foreign.key(f"job:{job_id}"), "state", "completed")
        rig.wait(rig.backend._register("q"))
        age(foreign)
        rig.advance(LOCK_MS)
        rig.look_after()
        assert rig.pull() == []
        assert foreign.counts()["active"] == 0

    def test_a_key_of_a_job_that_node_ended_is_free(self, rig: Rig, node: NodeWorker) -> None:
        first = rig.push(unique_key="k")
        assert rig.push(unique_key="k") == first
        taken = node.take()
        assert taken is not None
        node.complete(*taken, None)
        assert rig.unique_key_owner("q", "k") is None
        assert rig.push(unique_key="k") != first


class TestTakenOver:
    """A Node worker takes a silent job over, and leaves our lease in its hash."""

    def test_a_job_comes_back_from_one_who_dies_too(self, rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
        job_id = rig.push()
        rig.take(lease_ms=1000)
        rig.clock.advance(2 * LOCK_MS)
        assert node.reclaim() == [job_id]
        foreign.client.hset(foreign.key(f"job:{job_id}"), "stalledCount", 0)
        assert node.take() is not None
        age(foreign)
        rig.advance(2 * LOCK_MS)
        rig.look_after()
        assert rig.pulled_ids() == [job_id]

    def test_a_lease_that_was_left_there_ends_nothing(self, rig: Rig, foreign: Foreign, node: NodeWorker) -> None:
        rig.push()
        held = rig.take(lease_ms=1000)
        rig.clock.advance(2 * LOCK_MS)
        node.reclaim()
        taken = node.take()
        assert taken is not None
        node.complete(*taken, None)
        rig.clock.advance(1)
        assert rig.retry_completed("q", held.id, None, None) == 1
        assert node.take() is not None
        with pytest.raises(Exception, match="not in processing state"):
            rig.ack(held)

    def test_a_lease_of_which_nobody_knew_when_to_look_ends_too(self, rig: Rig, foreign: Foreign) -> None:
        job_id = rig.push()
        rig.take(lease_ms=1000)
        foreign.client.delete(foreign.key("hr:active"))
        age(foreign, "headrace")
        rig.clock.advance(LOCK_MS)
        rig.look_after()
        rig.advance(1)
        assert rig.pulled_ids() == [job_id]


def test_a_broker_whose_clock_is_behind_takes_no_lease_away(rig: Rig) -> None:
    rig.push()
    held = rig.take()
    rig.clock.advance(-50)
    rig.set_progress(held.id, 10, None)
    assert rig.extend(held.id, held.token, 30_000)
    rig.ack(held)
    assert rig.state(held.id) == "completed"


class TestGrowth:
    def test_whoever_reads_the_stream_is_one_consumer(self, rig: Rig, foreign: Foreign) -> None:
        for n in range(3):
            rig.backend.broker = f"headrace-{n}"
            rig.push()
            rig.run()
            rig.look_after()
        assert [row["name"] for row in foreign.client.xinfo_consumers(foreign.key("stream"), "workers")] == ["headrace"]

    def test_minutes_of_a_quiet_queue_are_kept_for_a_day(self, rig: Rig, foreign: Foreign) -> None:
        day = 24 * 60
        old = {f"m:{minute * 60_000}:{kind}": 1 for minute in range(2 * day) for kind in "cd"}
        foreign.client.hset(foreign.key("metrics:completed"), mapping=old)
        rig.push()
        rig.run()
        assert foreign.client.hlen(foreign.key("metrics:completed")) == 1

    def test_groups_without_jobs_are_not_in_turn_whatever_kind_of_pull_took_them(
        self, rig: Rig, foreign: Foreign
    ) -> None:
        rig.push_many(*(spec(n, group_id=f"g{n}") for n in range(20)))
        assert len(rig.pull(count=20)) == 20
        assert foreign.client.zcard(foreign.key("hr:turn")) == 0

    def test_limits_of_groups_that_are_over_are_forgotten_by_and_by(self, rig: Rig, foreign: Foreign) -> None:
        limited = GroupDemand(limit_max=1, limit_duration=10)
        for n in range(200):
            rig.rate_limit_group("q", f"g{n}", 5)
            rig.push(group_id=f"h{n}")
            rig.clock.advance(20)
            assert len(rig.pull(group=limited)) == 1
        assert foreign.client.hlen(foreign.key("hr:held")) < 20
        assert foreign.client.hlen(foreign.key("hr:buckets")) < 20

    def test_an_obliterated_queue_leaves_its_events_for_a_while_and_nothing_else(
        self, rig: Rig, foreign: Foreign
    ) -> None:
        foreign.add(ordering="k")
        rig.run()
        rig.obliterate("q")
        left = foreign.client.keys(f"{foreign.prefix}:*")
        assert left == [foreign.key("events")]
        assert 0 < foreign.client.pttl(foreign.key("events")) <= 3_600_000

    def test_events_of_a_queue_that_is_used_again_after_an_obliteration_stay(self, rig: Rig, foreign: Foreign) -> None:
        rig.push()
        rig.obliterate("q")
        rig.push()
        rig.run()
        assert foreign.client.pttl(foreign.key("events")) == -1

    def test_a_pull_of_a_queue_that_has_had_no_job_leaves_nothing(self, rig: Rig, foreign: Foreign) -> None:
        assert rig.pull() == rig.pull(group=IN_TURN) == []
        assert foreign.client.keys(f"{foreign.prefix}:*") == []

    @pytest.mark.parametrize("is_used", [False, True], ids=["never used", "obliterated"])
    def test_who_waited_at_a_queue_that_is_not_there_leaves_nothing(
        self, rig: Rig, foreign: Foreign, is_used: bool
    ) -> None:
        if is_used:
            rig.push()
        rig.announce_waiting("q", 1000)
        if is_used:
            rig.obliterate("q")
        rig.look_after()
        assert foreign.client.exists(foreign.key("meta"))
        rig.clock.advance(3_600_000)
        rig.look_after()
        assert not foreign.client.exists(foreign.key("meta"))

    def test_what_another_broker_announced_stays_when_nobody_waits_here_any_more(
        self, rig: Rig, foreign: Foreign
    ) -> None:
        rig.announce_waiting("q", 1000)
        rig.clock.advance(60_000)
        later = str(rig.clock.now_ms() + 1)
        foreign.client.hset(foreign.key("meta"), "hrParked", later)
        rig.look_after()
        assert foreign.client.hget(foreign.key("meta"), "hrParked") == later
        rig.announce_waiting("q", 1000)
        assert foreign.client.hget(foreign.key("meta"), "hrParked") > later

    def test_very_many_dead_letters_beyond_the_kept_number_go_by_and_by(self, rig: Rig, foreign: Foreign) -> None:
        rig.set_dlq_config("q", DlqConfig(max_entries=10))
        for n in range(2500):
            foreign.client.hset(foreign.key(f"job:{n}"), mapping={"id": n, "state": "failed", "timestamp": n})
        foreign.client.zadd(foreign.key("failed"), {str(n): n for n in range(2500)})
        left = []
        for _ in range(3):
            rig.push()
            rig.bury()
            left.append(rig.count()["failed"])
        assert left == [1501, 502, 10]
        assert len(foreign.client.keys(foreign.key("job:*"))) == 10

    def test_the_order_of_a_key_holds_anew_after_an_obliteration(self, rig: Rig, foreign: Foreign) -> None:
        for _ in range(5):
            foreign.add(ordering="k")
            rig.run()
        rig.obliterate("q")
        for _ in range(3):
            foreign.add(ordering="k")
        assert len(rig.pull(count=3)) == 1
