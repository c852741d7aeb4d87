"""Schedules that a Node process wrote are fired here too, each slot once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.backends.valkey.schedulers import firing
from tests.conformance.rig import Rig
from tests.valkey.foreign import Foreign

MONDAY = 1_700_438_400_000  # 2023-11-20T00:00:00Z
HOUR = 3_600_000
DAY = 24 * HOUR


def write(rig: Rig, foreign: Foreign, **entry: Any) -> None:
    template = {"name": "report", "data": {"list": []}, "opts": {"attempts": 2}}
    stored = {"iterationCount": 0, "template": template, "nextRun": rig.clock.now_ms(), **entry}
    foreign.client.hset(foreign.key("schedulers"), "daily", json.dumps(stored, separators=(",", ":")))
    rig.wait(rig.backend._register("q"))


def stored(foreign: Foreign) -> dict[str, Any] | None:
    text = foreign.client.hget(foreign.key("schedulers"), "daily")
    return None if text is None else json.loads(text)


def test_a_due_schedule_adds_its_job_as_node_does(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, every=1000)
    rig.look_after()
    fields = foreign.hash("1")
    assert (fields["name"], fields["data"], fields["state"]) == ("report", '{"list":[]}', "waiting")
    assert (json.loads(fields["opts"]), fields["maxAttempts"]) == ({"attempts": 2}, "2")
    now = rig.clock.now_ms()
    after = stored(foreign)
    assert (after["nextRun"], after["lastRun"], after["iterationCount"]) == (now + 1000, now, 1)
    assert after["template"]["data"] == {"list": []}
    assert rig.take().id == "q:1"


def test_slots_that_passed_are_skipped_and_no_slot_fires_twice(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, every=1000)
    rig.advance(3500)
    for _ in range(3):
        rig.look_after()
    assert rig.count() == {"waiting": 1}
    assert stored(foreign)["nextRun"] == rig.clock.now_ms() + 500


def test_nothing_fires_while_a_node_worker_holds_the_lock(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, every=1000)
    foreign.client.set(foreign.key("schedulers:lock:__tick__"), "token", px=60_000)
    rig.look_after()
    assert rig.count() == {}
    foreign.client.delete(foreign.key("schedulers:lock:__tick__"))
    rig.look_after()
    assert rig.count() == {"waiting": 1}


def test_an_entry_that_changed_meanwhile_is_not_fired(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, every=1000)
    seen = foreign.client.hget(foreign.key("schedulers"), "daily").encode()
    fire = firing(b"daily", seen, rig.clock.now_ms())
    rig.look_after()
    assert fire is not None
    assert rig.wait(rig.backend._call("fireScheduler", "q", *fire)) == [b""]
    assert rig.count() == {"waiting": 1}


@pytest.mark.parametrize("last", ["limit", "endDate"])
def test_the_last_run_ends_the_schedule(rig: Rig, foreign: Foreign, last: str) -> None:
    write(rig, foreign, every=1000, **{last: 1 if last == "limit" else rig.clock.now_ms()})
    rig.look_after()
    assert stored(foreign) is None
    assert rig.count() == {"waiting": 1}


def test_a_schedule_whose_end_has_passed_does_not_run(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, every=1000, endDate=rig.clock.now_ms() - 1)
    rig.look_after()
    assert stored(foreign) is None
    assert rig.count() == {}


def test_a_schedule_that_waits_for_its_job_ends_with_its_time(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, repeatAfterComplete=500, endDate=rig.clock.now_ms() + 700)
    for _ in range(2):
        rig.look_after()
        rig.run()
        rig.advance(500)
    rig.look_after()
    assert stored(foreign) is None
    assert rig.count() == {"completed": 2}


def test_a_job_without_data_has_none_of_its_own(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, every=1000, template={"name": "report"})
    rig.look_after()
    assert foreign.hash("1")["data"] == "{}"


@pytest.mark.parametrize("end", ["expire", "cancel", "drain"])
def test_a_schedule_goes_on_when_the_job_that_it_waits_for_never_ran(rig: Rig, foreign: Foreign, end: str) -> None:
    write(rig, foreign, repeatAfterComplete=500, template={"name": "report", "opts": {"ttl": 50}})
    rig.look_after()
    rig.advance(100)
    if end == "expire":
        assert rig.pull() == []
    elif end == "cancel":
        rig.cancel("q:1")
    else:
        rig.drain("q")
    assert stored(foreign)["nextRun"] == rig.clock.now_ms() + 500


def test_a_schedule_that_was_planned_anew_meanwhile_is_left_alone(rig: Rig, foreign: Foreign) -> None:
    write(rig, foreign, repeatAfterComplete=500)
    rig.look_after()
    held = rig.take()
    write(rig, foreign, repeatAfterComplete=500, nextRun=rig.clock.now_ms() + 9999)
    rig.ack(held)
    assert stored(foreign)["nextRun"] == rig.clock.now_ms() + 9999


@pytest.mark.parametrize("end", ["complete", "fail"])
def test_a_schedule_that_waits_for_its_job_is_planned_by_its_end(rig: Rig, foreign: Foreign, end: str) -> None:
    write(rig, foreign, repeatAfterComplete=500)
    rig.look_after()
    assert stored(foreign)["nextRun"] == 0
    held = rig.take()
    rig.advance(100)
    if end == "complete":
        rig.ack(held)
    else:
        rig.nack(held, unrecoverable=True)
    assert stored(foreign)["nextRun"] == rig.clock.now_ms() + 500
    rig.advance(500)
    rig.look_after()
    assert rig.take().id == "q:2"


@pytest.mark.parametrize(
    ("entry", "following"),
    [
        ({"pattern": "30 6 * * *"}, MONDAY + 6 * HOUR + HOUR // 2),
        ({"pattern": "0 9 * * *", "tz": "America/New_York"}, MONDAY + 14 * HOUR),
        ({"pattern": "0 0 1 * 5"}, MONDAY + 11 * DAY),  # the first day of a month that is a Friday: 2023-12-01
    ],
)
def test_patterns_follow_their_zone_and_want_both_days(entry: dict[str, Any], following: int) -> None:
    text = json.dumps({**entry, "nextRun": MONDAY, "template": {}}).encode()
    fire = firing(b"x", text, MONDAY)
    assert fire is not None
    assert json.loads(fire[2])["nextRun"] == following


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"nextRun":"x"}', b'{"nextRun":1,"pattern":"never"}'])
def test_an_unreadable_entry_is_passed_over(text: bytes) -> None:
    assert firing(b"x", text, MONDAY) is None
