"""EW-076 to EW-090: the CompletionTracker, on a real queue where ends come from and on a listener of ours elsewhere."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from headrace.client.channel import EventView
from headrace.client.client import Client
from headrace.client.job import JobInfo
from headrace.client.payloads import encode_payload
from headrace.errors import (
    CommandTimeout,
    EventCancelledError,
    EventTimeoutError,
    HeadraceError,
    ProviderStoppedError,
    StorageUnavailable,
)
from headrace.events import completion
from headrace.events.completion import EARLY_SECONDS, MAX_EARLY, CompletionTracker
from tests.scale import scaled
from tests.waiting import until


class Stream:
    """The events of a queue, said by the test."""

    made: list[Stream]

    def __init__(self, client: Client, queue: str) -> None:
        self.queue = queue
        self.said: asyncio.Queue[EventView] = asyncio.Queue()
        self.is_open = False
        Stream.made.append(self)

    async def __aenter__(self) -> Stream:
        self.is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False

    async def __aiter__(self) -> Any:
        while True:
            yield await self.said.get()


@pytest.fixture
async def tracker(client: Client) -> Any:
    Stream.made = []
    made = CompletionTracker(client, queue_events_class=Stream)
    yield made
    await made.stop()


def say(kind: str, job_id: str, **fields: Any) -> None:
    Stream.made[0].said.put_nowait(EventView(event_type=kind, queue="q", job_id=job_id, **fields))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_ew_076_one_listener_per_queue(tracker: CompletionTracker) -> None:
    for subscription in ("a", "b"):
        tracker.register("q", subscription, print)
    tracker.register("r", "c", print)
    await tracker.listening("q")
    await tracker.listening("r")
    assert sorted(stream.queue for stream in Stream.made) == ["q", "r"]


async def test_ew_077_080_082_the_end_reaches_its_callback_once(tracker: CompletionTracker) -> None:
    seen: list[Any] = []
    tracker.register("q", "a", seen.append)
    tracker.map_job_id("q", "j1", "a")
    assert tracker.subscriptions_of("q", "j1") == {"a"}
    await tracker.listening("q")
    say("completed", "of-somebody-else", data=1)
    say("completed", "j1", data={"ok": True})
    say("completed", "j1", data=2)
    await settled()
    assert seen == [{"ok": True}]
    assert tracker.subscriptions_of("q", "j1") == frozenset()
    assert not tracker.has_pending("q", "a")


async def test_ew_078_a_failure_reaches_the_error_callback_with_its_reason(tracker: CompletionTracker) -> None:
    seen: list[Any] = []
    tracker.register("q", "a", print, seen.append)
    tracker.map_job_id("q", "j1", "a")
    await tracker.listening("q")
    say("failed", "j1", error="ValueError: no", terminal=False)
    await settled()
    assert not seen, "it is tried again"
    say("failed", "j1", error="ValueError: no", terminal=True)
    await until(lambda: seen)
    assert (seen[0].type_name, seen[0].message) == ("ValueError", "no")


async def test_ew_079_unknown_subscriptions_are_ignored(tracker: CompletionTracker) -> None:
    tracker.complete("q", "nobody", 1)
    tracker.fail("q", "nobody", ValueError())
    assert not tracker.has_pending("q", "nobody")


async def test_ew_081_several_that_wait_for_one_job_are_all_settled(tracker: CompletionTracker) -> None:
    seen: list[Any] = []
    for subscription in "abc":
        tracker.register("q", subscription, seen.append)
        tracker.map_job_id("q", "j1", subscription)
    await tracker.listening("q")
    say("completed", "j1", data=5)
    await settled()
    assert seen == [5, 5, 5]


async def test_ew_083_what_callbacks_raise_is_contained(
    tracker: CompletionTracker, caplog: pytest.LogCaptureFixture
) -> None:
    tracker.register("q", "a", lambda result: 1 / 0)
    tracker.complete("q", "a", 1)
    assert "ZeroDivisionError" in caplog.text


async def test_ew_084_096_timeouts_reject_and_clean_up(tracker: CompletionTracker) -> None:
    seen: list[Any] = []
    tracker.register("q", "a", print, seen.append, timeout=0.02)
    tracker.register("q", "for-ever", print, seen.append, timeout=0)
    await until(lambda: seen)
    assert isinstance(seen[0], EventTimeoutError)
    assert str(seen[0]) == "Request timeout after 20ms"
    assert not tracker.has_pending("q", "a")
    assert tracker.has_pending("q", "for-ever")
    assert tracker.default_timeout == 30


async def test_ew_084_many_whose_time_is_up_do_not_wait_for_each_other_when_the_store_is_away(
    tracker: CompletionTracker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(command: Any, timeout: float) -> Any:
        await asyncio.sleep(timeout)
        raise CommandTimeout("no answer")

    monkeypatch.setattr(completion, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(client, "ask", silence)
    seen: list[Any] = []
    for n in range(600):
        tracker.register("q", f"s{n}", print, seen.append, timeout=0.01)
        tracker.map_job_id("q", f"j{n}", f"s{n}")
    await until(lambda: len(seen) == 600, 1.5)
    assert {type(error) for error in seen} == {EventTimeoutError}


async def test_ew_085_stopping_rejects_everybody_before_listeners_close(tracker: CompletionTracker) -> None:
    was_open: list[bool] = []
    errors: list[BaseException] = []

    def told(error: BaseException) -> None:
        was_open.append(Stream.made[0].is_open)
        errors.append(error)

    tracker.register("q", "a", print, told)
    await tracker.listening("q")
    await tracker.stop()
    assert isinstance(errors[0], ProviderStoppedError)
    assert str(errors[0]) == "CompletionTracker shutting down"
    assert was_open == [True]
    assert not Stream.made[0].is_open
    assert not [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


async def test_ew_086_without_error_callback_or_timeout_neither_is_kept(tracker: CompletionTracker) -> None:
    tracker.register("q", "a", print, timeout=0)
    pending = tracker._watched["q"].pending["a"]
    assert (pending.on_error, pending.timer) == (None, None)
    tracker.fail("q", "a", ValueError())


async def test_ew_087_ends_before_the_mapping_are_delivered_with_it(tracker: CompletionTracker) -> None:
    seen: list[Any] = []
    for subscription in "abc":
        tracker.register("q", subscription, seen.append, seen.append)
    await tracker.listening("q")
    say("completed", "j1", data=1)
    say("removed", "j2")
    await settled()
    tracker.map_job_id("q", "j1", "a")
    tracker.map_job_id("q", "j2", "b")
    assert seen[0] == 1
    assert isinstance(seen[1], EventCancelledError)


async def test_ew_088_what_came_early_is_bounded_in_number_and_age(
    tracker: CompletionTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker.register("q", "a", print)
    await tracker.listening("q")
    watched = tracker._watched["q"]
    for n in range(MAX_EARLY + 10):
        tracker._hear(watched, EventView(event_type="completed", queue="q", job_id=str(n)))
    assert len(watched.early) == MAX_EARLY
    loop = asyncio.get_running_loop()
    later = loop.time() + EARLY_SECONDS + 1
    monkeypatch.setattr(loop, "time", lambda: later)
    tracker._hear(watched, EventView(event_type="completed", queue="q", job_id="new"))
    assert list(watched.early) == ["new"]
    monkeypatch.undo()


async def test_ew_089_a_missing_result_is_none(tracker: CompletionTracker) -> None:
    seen: list[Any] = []
    tracker.register("q", "a", seen.append)
    tracker.map_job_id("q", "j1", "a")
    await tracker.listening("q")
    say("completed", "j1")
    await settled()
    assert seen == [None]


@pytest.mark.alone
async def test_ew_090_completing_costs_the_same_however_many_wait(tracker: CompletionTracker) -> None:
    def cost(pending: int) -> float:
        for n in range(pending):
            tracker.register("q", f"s{n}", lambda result: None, timeout=0)
            tracker.map_job_id("q", f"j{n}", f"s{n}")
        watched = tracker._watched["q"]
        began = time.process_time()
        for n in range(500):
            tracker._hear(watched, EventView(event_type="completed", queue="q", job_id=f"j{n}"))
        return time.process_time() - began

    few = min(cost(500) for _ in range(3))
    many = min(cost(scaled(20_000, 100_000)) for _ in range(3))
    assert many < few * 8 + 0.005


async def test_a_gap_makes_it_look_at_the_jobs_that_are_waited_for(tracker: CompletionTracker) -> None:
    seen: list[BaseException] = []
    tracker.register("q", "a", print, seen.append)
    tracker.map_job_id("q", "never-there", "a")
    await tracker.listening("q")
    say("gap", "")
    await until(lambda: seen)
    assert isinstance(seen[0], EventCancelledError)


async def test_a_job_that_is_not_added_yet_is_not_gone(tracker: CompletionTracker) -> None:
    seen: list[Any] = []
    tracker.register("q", "a", seen.append, seen.append)
    tracker.map_job_id("q", "under-way", "a", is_added=False)
    await tracker.listening("q")
    say("gap", "")
    await until(lambda: not Stream.made[0].said.qsize() and not tracker._looks)
    assert seen == []
    say("completed", "under-way", data=5)
    await until(lambda: seen)
    assert seen == [5]


async def test_who_waits_without_limit_hears_of_a_job_that_went_without_a_word(
    tracker: CompletionTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expired job, a queue that was drained or obliterated: subscribers are told of none of their jobs."""
    monkeypatch.setattr(completion, "_LOOK_EVERY", 0.001)
    seen: list[BaseException] = []
    tracker.register("q", "limited", print, seen.append, timeout=60)
    tracker.map_job_id("q", "other", "limited")
    tracker.register("q", "a", print, seen.append, timeout=0)
    tracker.map_job_id("q", "gone", "a")
    await until(lambda: seen)
    assert [str(error) for error in seen] == [
        "The job of the event is gone: it was removed, or it expired before a handler began it or tried it again"
    ]
    await until(lambda: not tracker._is_patrolling)


async def test_a_look_that_fails_is_taken_again_while_somebody_waits(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a caller who waits for ever would: the end of the job is told once."""
    monkeypatch.setattr(completion, "_LOOK_AGAIN", 0.001)
    asked: list[str] = []

    class Away(CompletionTracker):
        async def _found(self, job_id: str) -> Any:
            asked.append(job_id)
            if len(asked) < 3:
                raise StorageUnavailable("not now")
            return JobInfo(id=job_id, state="completed", encoded_result=encode_payload("at last"))

    Stream.made = []
    tracker = Away(client, queue_events_class=Stream)
    seen: list[Any] = []
    tracker.register("q", "a", seen.append, timeout=0)
    tracker.map_job_id("q", "j1", "a")
    await tracker.listening("q")
    say("gap", "")
    await until(lambda: seen)
    assert seen == ["at last"]
    await tracker.stop()


async def test_a_listener_that_cannot_begin_is_told_to_who_waits_for_it_and_tried_again(client: Client) -> None:
    class Broken(Stream):
        async def __aenter__(self) -> Stream:
            raise HeadraceError("no road")

    Stream.made = []
    tracker = CompletionTracker(client, queue_events_class=Broken)
    tracker.register("q", "a", print)
    for _ in range(2):
        with pytest.raises(HeadraceError, match="no road"):
            await tracker.listening("q")
    assert len(Stream.made) == 2
    await tracker.stop()
