"""What a worker must leave behind so that every other program sees it right: looked at with a plain client."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

import valkey
from headrace.backends.base import Ack
from headrace.errors import LeaseLost
from tests.conformance.rig import Rig, pack, spec
from tests.valkey.foreign import Foreign

BAND = 2**42


def without(events: list[dict[str, str]], *names: str) -> list[dict[str, str]]:
    return [event for event in events if event["event"] not in names]


class TestCompletion:
    def test_the_hash_the_sets_the_stream_the_event_and_the_metrics(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add({"n": 1})
        rig.advance(5)
        held = rig.take()
        started = rig.clock.now_ms()
        assert foreign.counts() == {"waiting": 0, "active": 1, "delayed": 0, "completed": 0, "failed": 0}
        active = foreign.hash(job_id)
        assert (active["state"], active["processedOn"]) == ("active", str(started))
        assert int(active["lastActive"]) >= started
        rig.advance(30)
        rig.ack(held, {"ok": [1, "ä"]})
        done = foreign.hash(job_id)
        now = str(rig.clock.now_ms())
        assert (done["state"], done["finishedOn"], done["processedOn"]) == ("completed", now, str(started))
        assert json.loads(done["returnvalue"]) == {"ok": [1, "ä"]}
        assert foreign.client.zscore(foreign.key("completed"), job_id) == float(now)
        assert foreign.client.xlen(foreign.key("stream")) == 0
        assert foreign.events()[-1] == {"event": "completed", "jobId": job_id, "returnvalue": done["returnvalue"]}
        minute = rig.clock.now_ms() // 60_000 * 60_000
        assert foreign.client.hgetall(foreign.key("metrics:completed")) == {f"m:{minute}:c": "1", f"m:{minute}:d": "30"}
        assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": 1, "failed": 0}

    def test_no_result_is_null(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add()
        rig.ack(rig.take())
        assert foreign.hash(job_id)["returnvalue"] == "null"

    @pytest.mark.parametrize(("way", "given"), [("lifo", {"more": ("1",)}), ("priority", {"priority": 4})])
    def test_jobs_from_lists_are_counted_and_the_count_goes_back(
        self, rig: Rig, foreign: Foreign, way: str, given: dict[str, object]
    ) -> None:
        foreign.add(**given)
        held = rig.take()
        assert foreign.client.get(foreign.key("list-active")) == "1"
        assert rig.count() == {"active": 1}
        rig.ack(held)
        assert foreign.client.get(foreign.key("list-active")) == "0"
        assert rig.count() == {"completed": 1}

    @pytest.mark.parametrize(
        ("keep", "left"),
        [
            (True, []),
            (2, ["3", "4"]),
            ({"count": 1}, ["4"]),
            ({"age": 1}, ["3", "4"]),
            (0, ["1", "2", "3", "4"]),
            ({"age": 0, "count": 0}, ["1", "2", "3", "4"]),
        ],
    )
    def test_what_the_producer_wants_kept_is_kept(
        self, rig: Rig, foreign: Foreign, keep: object, left: list[str]
    ) -> None:
        for _ in range(4):
            foreign.add(opts=json.dumps({"removeOnComplete": keep}))
            rig.ack(rig.take())
            rig.advance(700)
        assert foreign.client.zrange(foreign.key("completed"), 0, -1) == left
        assert [n for n in "1234" if foreign.hash(n)] == left

    def test_what_is_old_goes_and_then_what_is_too_many(self, rig: Rig, foreign: Foreign) -> None:
        for keep in (False, False, False, {"age": 1, "count": 2}):
            job_id = foreign.add(opts=json.dumps({"removeOnComplete": keep}))
            rig.ack(rig.take())
            rig.advance(400)
        assert foreign.client.zrange(foreign.key("completed"), 0, -1) == ["3", job_id]

    def test_its_result_goes_with_its_event_when_ticks_end_while_the_call_is_under_way(self, rig: Rig) -> None:
        async def complete_while_a_tick_ends() -> None:
            await rig.backend.insert_one("q", spec(1))
            completing = asyncio.create_task(rig.backend.complete([Ack(held.id, held.token, bytes(pack("done")))]))
            await asyncio.sleep(0)
            rig.backend.commit()
            await completing

        rig.push()
        held = rig.take()
        rig.backend.wants_bodies = True
        rig.wait(complete_while_a_tick_ends())
        (event,) = rig.backend.uncommitted_events()
        assert (event.event, rig.backend.body_of(event)) == ("completed", bytes(pack("done")))


class TestFailure:
    def test_a_retry_is_told_and_scheduled(self, rig: Rig, foreign: Foreign) -> None:
        opts = {"attempts": 2, "backoff": {"type": "fixed", "delay": 400}}
        job_id = foreign.add(opts=json.dumps(opts), attempts=2)
        rig.nack(rig.take(), "boom")
        assert foreign.events()[-1] == {
            "event": "retrying",
            "jobId": job_id,
            "failedReason": "boom",
            "attemptsMade": "1",
            "delay": "400",
        }
        fields = foreign.hash(job_id)
        assert (fields["state"], fields["attemptsMade"], fields["failedReason"]) == ("delayed", "1", "boom")
        assert foreign.client.zscore(foreign.key("scheduled"), job_id) == rig.clock.now_ms() + 400
        assert foreign.counts()["active"] == 0
        rig.advance(400)
        assert foreign.events()[-1] == {"event": "promoted", "jobId": job_id}
        rig.nack(rig.take(), "again")
        assert foreign.events()[-1] == {"event": "failed", "jobId": job_id, "failedReason": "again"}
        failed = foreign.hash(job_id)
        assert (failed["state"], failed["attemptsMade"]) == ("failed", "2")
        assert failed["finishedOn"] == str(rig.clock.now_ms())
        assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": 0, "failed": 1}
        minute = rig.clock.now_ms() // 60_000 * 60_000
        assert foreign.client.hget(foreign.key("metrics:failed"), f"m:{minute}:c") == "1"

    def test_the_metrics_have_how_long_a_failed_attempt_took(self, rig: Rig, foreign: Foreign) -> None:
        foreign.add()
        held = rig.take()
        rig.advance(30)
        rig.nack(held)
        minute = rig.clock.now_ms() // 60_000 * 60_000
        assert foreign.client.hgetall(foreign.key("metrics:failed")) == {f"m:{minute}:c": "1", f"m:{minute}:d": "30"}

    def test_a_retry_goes_on_to_the_next_fallback(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add(opts=json.dumps({"attempts": 3, "fallbacks": [{"model": "a"}, {"model": "b"}]}))
        for n in ("1", "2"):
            rig.nack(rig.take())
            assert foreign.hash(job_id)["fallbackIndex"] == n

    def test_exponential_backoff_doubles_as_nodes_does(self, rig: Rig, foreign: Foreign) -> None:
        opts = {"attempts": 4, "backoff": {"type": "exponential", "delay": 100}}
        job_id = foreign.add(opts=json.dumps(opts))
        waits = []
        for _ in range(3):
            rig.nack(rig.take())
            waits.append(int(foreign.client.zscore(foreign.key("scheduled"), job_id)) - rig.clock.now_ms())
            rig.advance(waits[-1])
        assert waits == [100, 200, 400]

    def test_a_retry_keeps_the_band_of_its_priority(self, rig: Rig, foreign: Foreign) -> None:
        opts = {"attempts": 2, "backoff": {"type": "fixed", "delay": 50}}
        job_id = foreign.add(opts=json.dumps(opts), priority=3)
        rig.nack(rig.take())
        assert foreign.client.zscore(foreign.key("scheduled"), job_id) == 3 * BAND + rig.clock.now_ms() + 50
        rig.clock.advance(50)
        assert rig.pulled_ids() == [f"q:{job_id}"]

    @pytest.mark.parametrize("attempts", [0, 1])
    def test_no_attempts_asked_for_means_one(self, rig: Rig, foreign: Foreign, attempts: int) -> None:
        job_id = foreign.add(opts=json.dumps({"attempts": attempts} if attempts else {}))
        rig.nack(rig.take())
        assert (foreign.hash(job_id)["state"], foreign.hash(job_id)["attemptsMade"]) == ("failed", "1")


class TestOtherEvents:
    def test_progress_delay_priority_and_removal_are_told_with_their_fields(self, rig: Rig, foreign: Foreign) -> None:
        job_id = rig.push(data=1)
        held = rig.take()
        rig.set_progress(job_id, 40, None)
        rig.move_to_delayed(job_id, 250, held.token)
        rig.change_priority(job_id, 5, None)
        rig.promote(job_id)
        rig.cancel(job_id)
        assert without(foreign.events(), "added") == [
            {"event": "progress", "jobId": job_id, "data": "40"},
            {"event": "delay-changed", "jobId": job_id, "delay": "250"},
            {"event": "priority-changed", "jobId": job_id, "priority": "5"},
            {"event": "promoted", "jobId": job_id},
            {"event": "removed", "jobId": job_id},
        ]

    def test_drain_clean_and_retry_tell_how_many(self, rig: Rig, foreign: Foreign) -> None:
        rig.push_many(spec(1), spec(2), spec(3))
        rig.bury()
        rig.retry_dlq("q", None, None, None)
        rig.run()
        rig.clean("q", 0, "completed", 10)
        rig.drain("q")
        told = {event["event"]: event["jobId"] for event in foreign.events()}
        assert (told["retried"], told["cleaned"], told["drained"]) == ("1", "1", "2")

    def test_a_stalled_job_is_told(self, rig: Rig, foreign: Foreign) -> None:
        job_id = rig.push()
        rig.take(lease_ms=1000)
        rig.advance(1100)
        assert foreign.events()[-1] == {"event": "stalled", "jobId": job_id}

    def test_the_stream_is_trimmed(self, rig: Rig, foreign: Foreign) -> None:
        for _ in range(15):
            rig.push_many(*(spec(n) for n in range(200)))
        assert 1000 <= foreign.client.xlen(foreign.key("events")) < 1300


def test_workers_are_listed_while_they_live(rig: Rig, foreign: Foreign) -> None:
    rig.push()
    rig.take()
    rig.look_after()
    (key,) = foreign.client.keys(foreign.key("w:*"))
    shown = json.loads(foreign.client.get(key))
    assert {"addr", "pid", "startedAt", "activeJobs"} == set(shown)
    assert isinstance(shown["addr"], str)
    assert isinstance(shown["pid"], int)
    assert 0 < foreign.client.pttl(key) <= 30_000
    rig.wait(rig.backend._unregister_worker())
    assert foreign.client.keys(foreign.key("w:*")) == []


class TestTakingOverFromOthers:
    """Jobs that a Node worker took: it reads the stream with a consumer of its own and notes when it was last alive."""

    def _take_as_node(self, rig: Rig, foreign: Foreign, count: int = 1) -> list[str]:
        stream = foreign.key("stream")
        with suppress(valkey.ResponseError):  # the group is there already
            foreign.client.xgroup_create(stream, "workers", "0", mkstream=True)
        reply = foreign.client.xreadgroup("workers", "worker-1-abc", {stream: ">"}, count=count)
        entries = reply[0][1] if isinstance(reply, list) else next(iter(reply.values()))[0]
        ids = [fields["jobId"] for _, fields in entries]
        for job_id in ids:
            fields = {"state": "active", "processedOn": rig.clock.now_ms(), "lastActive": rig.clock.now_ms()}
            foreign.client.hset(foreign.key(f"job:{job_id}"), mapping=fields)
        return ids

    def _age(self, foreign: Foreign, count: int) -> None:
        """The server counts idle time by itself: claim the entries as old."""
        pending = foreign.client.xpending_range(foreign.key("stream"), "workers", "-", "+", count)
        ids = [row["message_id"] for row in pending]
        foreign.client.xclaim(foreign.key("stream"), "workers", "worker-1-abc", 0, ids, idle=60_000, justid=True)

    def test_what_a_living_worker_has_is_left_alone(self, rig: Rig, foreign: Foreign) -> None:
        foreign.add()
        (job_id,) = self._take_as_node(rig, foreign)
        self._age(foreign, 10)
        rig.advance(10_000)
        rig.look_after()
        assert foreign.hash(job_id)["state"] == "active"

    def test_hundreds_of_jobs_of_a_dead_worker_come_back_in_one_round(self, rig: Rig, foreign: Foreign) -> None:
        for _ in range(250):
            foreign.add()
        ids = self._take_as_node(rig, foreign, 250)
        assert len(ids) == 250
        self._age(foreign, 250)
        rig.advance(31_000)
        rig.announce_waiting("q", 1000)  # somebody waits: from now on the queue is looked after
        rig.look_after()
        assert foreign.counts()["waiting"] == 250
        assert {foreign.hash(job_id)["stalledCount"] for job_id in ids} == {"1"}
        assert foreign.events()[-1]["event"] == "stalled"

    def test_a_job_that_stalls_again_fails(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add()
        rig.wait(rig.backend._register("q"))
        for _ in range(2):
            self._take_as_node(rig, foreign)
            self._age(foreign, 1)
            rig.advance(31_000)
            rig.look_after()
        fields = foreign.hash(job_id)
        assert (fields["state"], fields["failedReason"]) == ("failed", "job stalled more than maxStalledCount")


class TestRevocation:
    def test_a_revoked_job_that_waits_is_failed_instead_of_run(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add()
        foreign.client.hset(foreign.key(f"job:{job_id}"), "revoked", "1")
        assert rig.pull() == []
        assert (foreign.hash(job_id)["state"], foreign.hash(job_id)["failedReason"]) == ("failed", "revoked")

    def test_a_revoked_job_at_work_cannot_complete_and_its_holder_is_told(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add()
        held = rig.take()
        foreign.client.hset(foreign.key(f"job:{job_id}"), "revoked", "1")
        with pytest.raises(LeaseLost, match="revoked"):
            rig.ack(held)
        assert rig.extend(held.id, held.token, None) is False
        assert (foreign.hash(job_id)["state"], foreign.hash(job_id)["failedReason"]) == ("failed", "revoked")
        assert foreign.counts()["active"] == 0


class TestTimeToLive:
    def test_an_expired_job_fails_with_its_own_event(self, rig: Rig, foreign: Foreign) -> None:
        job_id = foreign.add(ttl=50)
        rig.advance(50)
        assert rig.pull() == []
        fields = foreign.hash(job_id)
        assert (fields["state"], fields["failedReason"]) == ("failed", "expired")
        assert foreign.events()[-1] == {"event": "expired", "jobId": job_id}
        assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": 0, "failed": 1}
