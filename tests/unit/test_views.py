"""The wire map of a job: every key, the right values, and no integer that JavaScript would take for a BigInt."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends.local.index import Queue
from headrace.backends.local.job import History, Job, Lease
from headrace.model import (
    DEFAULT_SETTINGS,
    MAX_SAFE_INTEGER,
    Backoff,
    Dedup,
    JobLinks,
    JobSettings,
    Repeat,
    TimelineEntry,
)
from headrace.states import State
from headrace.views import (
    HistoryView,
    encode,
    encode_claimed,
    encode_job,
    plain_history,
    rich_history,
)

NOW = 1_700_000_000_000
PLAIN = {
    "id": "j1",
    "queue": "q",
    "data": {"a": 1},
    "createdAt": NOW,
    "runAt": NOW,
    "startedAt": None,
    "completedAt": None,
    "lastHeartbeat": NOW,
    "attempts": 0,
    "priority": 0,
    "stallCount": 0,
    "maxAttempts": 3,
    "backoff": 1000,
    "backoffConfig": None,
    "ttl": None,
    "timeout": None,
    "stallTimeout": None,
    "lifo": False,
    "removeOnComplete": False,
    "removeOnFail": False,
    "durable": False,
    "stackTraceLimit": 10,
    "keepLogs": None,
    "sizeLimit": None,
    "failParentOnFailure": False,
    "removeDependencyOnFailure": False,
    "continueParentOnFailure": False,
    "ignoreDependencyOnFailure": False,
    "uniqueKey": None,
    "customId": None,
    "parentId": None,
    "groupId": None,
    "dependsOn": [],
    "childrenIds": [],
    "tags": [],
    "repeat": None,
    "deduplicationTtl": None,
    "deduplicationExtend": False,
    "deduplicationReplace": False,
    "debounceId": None,
    "debounceTtl": None,
    "childrenCompleted": 0,
    "progress": 0,
    "progressMessage": None,
    "stacktrace": None,
    "timeline": [{"state": "waiting", "timestamp": NOW}],
}


def job(**fields: Any) -> Job:
    given = {"settings": DEFAULT_SETTINGS, "links": None, "state": State.WAITING, "priority": 0, "name": None}
    given |= {"created": NOW, "run_at": NOW}
    return Job(seq=1, id="j1", queue=Queue("q"), **{"data": b"", **given, **fields})


def shown(record: Job, history: bytes | None = None, **extra: Any) -> dict[str, Any]:
    story = plain_history("waiting", NOW, None, None) if history is None else history
    raw = encode_job(record, encode("q"), encode({"a": 1}), story, **extra)
    return msgspec.msgpack.decode(bytes(raw))


def test_a_plain_job_has_every_key_of_the_reference() -> None:
    assert shown(job()) == PLAIN


def test_a_query_adds_state_result_and_reason() -> None:
    extra = {"state": "failed", "result": encode([1]), "failed_reason": "why"}
    assert shown(job(), **extra) == PLAIN | {"state": "failed", "returnvalue": [1], "failedReason": "why"}
    assert shown(job(), state="waiting") == PLAIN | {"state": "waiting"}


def test_a_rich_job() -> None:
    record = job(
        name="named",
        priority=-5,
        run_at=NOW + 10,
        started=NOW + 20,
        finished=NOW + 30,
        attempts=200,
        stalls=2,
        settings=JobSettings(
            max_attempts=500,
            backoff=Backoff("fixed", 250, 9000),
            ttl=5000,
            timeout=1.5,
            lifo=True,
            keep_logs=7,
            fail_parent_on_failure=True,
        ),
        links=JobLinks(
            unique_key="k",
            custom_id="c",
            parent_id="p",
            group_id="g",
            depends_on=["d"],
            children_ids=["x", "y"],
            tags=["t"],
            repeat=Repeat(every=1000, count=3),
            dedup=Dedup(ttl=60_000, extend=True),
            debounce_id="b",
            debounce_ttl=5,
        ),
    )
    timeline = [TimelineEntry("waiting", float(NOW)), TimelineEntry("failed", float(NOW + 1), "e", 1)]
    story = rich_history(HistoryView(2, 55.5, "half", ["at a"], timeline))
    assert shown(record, story) == PLAIN | {
        "name": "named",
        "priority": -5,
        "runAt": NOW + 10,
        "startedAt": NOW + 20,
        "completedAt": NOW + 30,
        "attempts": 200,
        "stallCount": 2,
        "maxAttempts": 500,
        "backoff": 250,
        "backoffConfig": {"type": "fixed", "delay": 250, "maxDelay": 9000},
        "ttl": 5000,
        "timeout": 1.5,
        "lifo": True,
        "keepLogs": 7,
        "failParentOnFailure": True,
        "uniqueKey": "k",
        "customId": "c",
        "parentId": "p",
        "groupId": "g",
        "dependsOn": ["d"],
        "childrenIds": ["x", "y"],
        "tags": ["t"],
        "repeat": {"every": 1000, "count": 3},
        "deduplicationTtl": 60_000,
        "deduplicationExtend": True,
        "debounceId": "b",
        "debounceTtl": 5,
        "childrenCompleted": 2,
        "progress": 55.5,
        "progressMessage": "half",
        "stacktrace": ["at a"],
        "timeline": [
            {"state": "waiting", "timestamp": NOW},
            {"state": "failed", "timestamp": NOW + 1, "error": "e", "attempt": 1},
        ],
    }


@pytest.mark.parametrize(
    ("started", "finished", "states"),
    [
        (None, None, ["delayed"]),
        (NOW + 1, None, ["delayed", "active"]),
        (NOW + 1, NOW + 2, ["delayed", "active", "completed"]),
    ],
)
def test_the_timeline_of_a_plain_job(started: int | None, finished: int | None, states: list[str]) -> None:
    timeline = shown(job(), plain_history("delayed", NOW, started, finished))["timeline"]
    assert [entry["state"] for entry in timeline] == states


@pytest.mark.parametrize("created", [NOW, NOW - 7])
def test_the_short_way_for_a_pull_says_the_same(created: int) -> None:
    def show(_: Job) -> msgspec.Raw:
        raise AssertionError("a fresh job goes the short way")

    earlier = job(started=NOW + 5, data=b"\xc0")
    record = job(started=NOW + 5, created=created, run_at=created, data=encode({"a": 1}))
    record.lease = Lease(1, None, None, 1000, 0, None, NOW + 5, 0, 0, None)
    long_way = encode_job(record, encode("q"), encode({"a": 1}), plain_history("waiting", created, NOW + 5, None))
    _, short_way = encode_claimed([earlier, record], encode("q"), NOW + 5, show)
    assert msgspec.msgpack.decode(short_way) == msgspec.msgpack.decode(long_way)


@pytest.mark.parametrize(
    "particulars",
    [
        {"data": None},
        {"name": "n"},
        {"priority": 1},
        {"attempts": 1},
        {"stalls": 1},
        {"run_at": NOW + 1},
        {"links": JobLinks()},
        {"history": History()},
        {"settings": JobSettings(lifo=True)},
    ],
)
def test_a_job_that_is_not_fresh_goes_the_long_way(particulars: dict[str, Any]) -> None:
    (view,) = encode_claimed([job(**particulars)], encode("q"), NOW, lambda _: msgspec.Raw(b"shown"))
    assert bytes(view) == b"shown"


# -- what JavaScript can count to ----------------------------------------------------------------------------


class Walker:
    """Goes through encoded MessagePack and refuses 64-bit integers, which JavaScript clients read as BigInt."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> int:
        value = int.from_bytes(self.data[self.at : self.at + count], "big")
        self.at += count
        return value

    def skip(self, count: int) -> None:
        self.at += count

    def value(self) -> None:
        byte = self.take(1)
        assert byte not in (0xCF, 0xD3), f"a 64-bit integer at byte {self.at - 1}"
        if byte <= 0x7F or byte >= 0xE0 or byte in (0xC0, 0xC2, 0xC3):
            return
        if 0x80 <= byte <= 0x8F or byte in (0xDE, 0xDF):
            self.many(2 * (byte & 15 if byte < 0x90 else self.take(2 if byte == 0xDE else 4)))
        elif 0x90 <= byte <= 0x9F or byte in (0xDC, 0xDD):
            self.many(byte & 15 if byte < 0xA0 else self.take(2 if byte == 0xDC else 4))
        elif 0xA0 <= byte <= 0xBF:
            self.skip(byte & 31)
        elif byte in (0xD9, 0xDA, 0xDB):
            self.skip(self.take({0xD9: 1, 0xDA: 2, 0xDB: 4}[byte]))
        else:
            self.skip({0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xD0: 1, 0xD1: 2, 0xD2: 4}[byte])

    def many(self, count: int) -> None:
        for _ in range(count):
            self.value()


def test_the_walker_sees_what_it_must_see() -> None:
    with pytest.raises(AssertionError, match="64-bit"):
        Walker(encode({"a": [1, 2**40]})).value()


numbers = st.one_of(
    st.integers(0, 300),
    st.sampled_from((2**31 - 1, 2**31, 2**32 - 1, 2**32, MAX_SAFE_INTEGER)),
    st.floats(0, float(MAX_SAFE_INTEGER)),
)
counts = st.integers(0, 2**31 - 1)


@settings(max_examples=150)
@given(
    st.integers(-1_000_000, 1_000_000),
    counts,
    st.builds(
        JobSettings,
        max_attempts=st.integers(1, 1000),
        backoff=st.one_of(numbers, st.builds(Backoff, st.just("fixed"), numbers, numbers)),
        ttl=numbers,
        timeout=numbers,
        stall_timeout=numbers,
        keep_logs=st.integers(0, 1_000_000),
        size_limit=st.integers(0, 10 * 1024 * 1024),
    ),
    st.builds(
        JobLinks,
        repeat=st.builds(
            Repeat,
            every=numbers.map(float),
            limit=counts,
            count=counts,
            start_date=numbers.map(float),
            end_date=numbers.map(float),
            prev_millis=numbers.map(float),
            offset=numbers.map(float),
        ),
        dedup=st.builds(Dedup, ttl=numbers),
        debounce_ttl=numbers,
    ),
    st.one_of(st.just(0), numbers),
)
def test_no_number_is_a_64_bit_integer(
    priority: int, count: int, settings_: JobSettings, links: JobLinks, progress: float
) -> None:
    far = 8_640_000_000_000_000
    record = job(priority=priority, created=far, run_at=far, settings=settings_, links=links, attempts=count)
    record.stalls = count
    record.started = record.finished = far
    entries = [TimelineEntry("failed", float(far), "e", count)]
    story = rich_history(HistoryView(count, min(progress, 100), None, None, entries))
    walker = Walker(bytes(encode_job(record, encode("q"), encode(None), story, state="completed")))
    walker.value()
    assert walker.at == len(walker.data)
