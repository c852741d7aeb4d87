"""EW-045 to EW-055 and EW-091 to EW-121: delivery, answers, keys, groups and the end."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from headrace.client.options import Options
from headrace.client.payloads import decode_payload
from headrace.client.queue import Queue
from headrace.errors import (
    EventCancelledError,
    EventTimeoutError,
    HeadraceError,
    InvalidCommand,
    ProviderStoppedError,
    RemoteError,
)
from headrace.events import EventContext, EventMessage, Events, Retry, event, propagate, receipts
from headrace.events.groups import GroupRegistry, Subscriber
from headrace.events.queues import EventWorker
from headrace.worker.context import JobContext
from tests.events.conftest import Order, Verdict, check, echo, placed
from tests.scale import scaled
from tests.waiting import until

ONE_TRY: Options = {"attempts": 1}


async def stored(events: Events, name: str, group: str | None = None) -> list[Any]:
    return await events.provider.queues.get_queue(name, group).get_jobs()


async def keyed_job(events: Events, name: str) -> Any:
    (job,) = await stored(events, name)
    return job


# -- answers -----------------------------------------------------------------------------------------------------------


def watch_looks(events: Events, looked: asyncio.Event) -> None:
    """Note when the tracker has looked at a job of its own accord."""
    tracker = events.provider.tracker
    found = tracker._found

    async def seen(job_id: str) -> Any:
        try:
            return await found(job_id)
        finally:
            looked.set()

    tracker._found = seen  # type: ignore[method-assign]


async def test_ew_098_value_error_and_nothing_are_all_routed_back(events: Events) -> None:
    @events.on(echo)
    async def handle(ctx: EventContext[Any]) -> Any:
        if ctx.data == "bad":
            raise LookupError("no such thing")
        return ctx.data

    async with Events(events.url, default_job_options=ONE_TRY) as emitter, events:
        assert await emitter.emit(echo, {"n": [1, None, "ü"]}) == {"n": [1, None, "ü"]}
        assert await emitter.emit(echo, None) is None
        with pytest.raises(RemoteError) as caught:
            await emitter.emit(echo, "bad")
    assert (caught.value.type_name, caught.value.message) == ("LookupError", "no such thing")
    assert caught.value.attempt == 1
    assert "in handle" in caught.value.remote_traceback


async def test_ew_097_a_slow_handler_makes_its_caller_time_out_once(events: Events) -> None:
    may_end = asyncio.Event()

    @events.on(echo)
    async def handle(ctx: EventContext[Any]) -> None:
        await may_end.wait()

    async with events:
        with pytest.raises(EventTimeoutError, match="Request timeout after 50ms"):
            await events.emit(echo, 1, timeout=0.05)
        patient = events.emit(echo, 2, timeout=0)
        may_end.set()
        assert await patient is None


async def test_ew_099_104_a_question_without_a_handler_waits_and_a_statement_does_not(events: Events) -> None:
    async with events:
        assert await events.emit(placed, Order()) is None
        question = events.emit(echo, 1, timeout=0.05)
        with pytest.raises(EventTimeoutError):
            await question
        assert len(await stored(events, "order.placed")) == 1


async def test_ew_112_answers_out_of_order_reach_the_right_callers(events: Events) -> None:
    @events.on(echo, concurrency=20)
    async def handle(ctx: EventContext[int]) -> int:
        await asyncio.sleep((15 - ctx.data) * 0.002)
        return ctx.data * 10

    async with events:
        answers = await asyncio.gather(*(events.emit(echo, n).wait() for n in range(15)))
    assert answers == [n * 10 for n in range(15)]


async def test_ew_114_one_failing_handler_does_not_touch_other_events(events: Events) -> None:
    events.on(echo)(lambda ctx: ctx.data)

    @events.on(check)
    async def handle(ctx: EventContext[Order]) -> Verdict:
        raise ValueError

    async with Events(events.url, default_job_options=ONE_TRY) as emitter, events:
        bad, good = emitter.emit(check, Order()), emitter.emit(echo, 5)
        assert await good == 5
        with pytest.raises(RemoteError):
            await bad


async def test_a_failed_attempt_is_tried_again_by_the_policy_of_the_handler(events: Events) -> None:
    attempts: list[int] = []

    @events.on(echo, retry=Retry(4, backoff="fixed", delay=0.01))
    async def handle(ctx: EventContext[Any]) -> str:
        attempts.append(ctx.attempt)
        if ctx.attempt < 4:
            raise ValueError
        return "at last"

    async with events:
        assert await events.emit(echo, 1) == "at last"
    assert attempts == [1, 2, 3, 4]


async def test_a_plain_function_may_give_what_is_still_to_be_awaited(events: Events) -> None:
    """Without that its event would be acknowledged, and nothing done."""
    seen: list[str] = []

    async def note(ctx: EventContext[Order]) -> None:
        seen.append(ctx.data.id)

    events.on(placed)(lambda ctx: note(ctx))
    async with events:
        await events.emit(placed, Order("o1"))
        await until(lambda: seen)


# -- the envelope ------------------------------------------------------------------------------------------------------


async def test_ew_092_094_100_the_envelope_has_its_fields_and_the_job_its_id(events: Events) -> None:
    async with events:
        with propagate(correlation_id="r", flags={"beta": True}):
            subscription = events.emit(placed, Order("o1", 3), delay=0)
            await subscription
        job = await keyed_job(events, "order.placed")
        assert set(job.data) == {"version", "eventId", "eventName", "payload", "meta", "correlationId", "timestamp"}
        assert (job.id, job.name) == (subscription.event_id, "event")
        assert job.data["version"] == "1"
        assert job.data["eventId"] == subscription.event_id
        assert job.data["correlationId"] == subscription.id
        assert job.data["payload"] == {"id": "o1", "total": 3}
        assert job.data["meta"] == {"correlationId": "r", "flags": {"beta": True}}
        assert job.run_at == job.created_at


async def test_ew_108_subscribing_makes_a_worker_that_unwraps_the_envelope(events: Events) -> None:
    async with events:
        got: list[Any] = []

        async def handle(message: EventMessage, job: JobContext, worker: EventWorker) -> None:
            got.append((message.event_name, decode_payload(message.payload), job.queue, worker.queues))

        await events.provider.subscribe("order.placed", handle)
        await events.emit(placed, Order("o7", 3))
        await until(lambda: got)
    assert got == [("order.placed", {"id": "o7", "total": 3}, "event.order.placed", ["event.order.placed"])]


async def test_ew_092_cause_and_key_are_there_only_when_given(events: Events) -> None:
    async with events:
        await events.emit(placed, Order(), key="k", causation_id="c")
        data = (await keyed_job(events, "order.placed")).data
        assert (data["causationId"], data["idempotencyKey"]) == ("c", "k")


async def test_an_envelope_of_an_unknown_version_fails_without_retries(events: Events) -> None:
    events.on(placed)(lambda ctx: None)
    async with events:
        queue = events.provider.queues.get_queue("order.placed")
        job = await queue.add("event", {"version": "9", "eventName": "order.placed"})
        async with asyncio.timeout(10):
            with pytest.raises(HeadraceError, match=r"version '9'"):
                await job.result()
        assert (await job.info()).attempts <= 1


async def test_an_envelope_without_payload_and_meta_is_that_of_an_event_without_data(events: Events) -> None:
    """As JavaScript writes it, which leaves out what is undefined."""
    seen: list[Any] = []
    events.on(event("nothing.said"))(lambda ctx: seen.append((ctx.data, dict(ctx.meta))))
    async with events:
        envelope = {"version": "1", "eventId": "e", "eventName": "nothing.said", "correlationId": "c", "timestamp": 1}
        await events.provider.queues.get_queue("nothing.said").add("event", envelope)
        await until(lambda: seen)
    assert seen == [(None, {})]


# -- delay, cancel, keys -----------------------------------------------------------------------------------------------


async def test_ew_048_093_115_a_delayed_event_comes_after_an_immediate_one_with_its_context(events: Events) -> None:
    seen: list[Any] = []
    events.on(placed)(lambda ctx: seen.append((ctx.data.id, ctx.correlation_id)))
    async with events:
        with propagate(correlation_id="late"):
            await events.emit(placed, Order("later"), delay=0.15, key="k")
        for delay in (0, -5, timedelta(seconds=-5)):
            await events.emit(placed, Order("now"), delay=delay)
        await until(lambda: len(seen) == 4)
    assert seen == [("now", None)] * 3 + [("later", "late")]


async def test_ew_049_052_a_cancelled_event_never_runs_and_frees_its_key(events: Events) -> None:
    seen: list[Any] = []
    events.on(echo)(lambda ctx: seen.append(ctx.data))
    async with events:
        waiting = events.emit(echo, "never", key="k", delay=3600)
        queue = events.provider.queues.get_queue("echo")
        await until(lambda: queue.get_jobs("delayed"))
        assert await events.cancel(echo, "k") is True
        with pytest.raises(EventCancelledError, match="Event cancelled"):
            await waiting
        await events.emit(echo, "again", key="k")
    assert seen == ["again"]


async def test_ew_050_cancelling_what_is_unknown_or_delivered_says_so(events: Events) -> None:
    events.on(echo)(lambda ctx: ctx.data)
    async with events:
        assert await events.cancel(echo, "nobody") is False
        await events.emit(echo, 1, key="done")
        assert await events.cancel(echo, "done") is False


async def test_ew_050_105_cancelling_what_was_delivered_leaves_its_receipt(events: Events) -> None:
    events.on(placed)(lambda ctx: None)
    async with events:
        await events.emit(placed, Order(), key="k")
        await until(lambda: events.provider.has_receipt("order.placed", "k"))
        queue = events.provider.queues.get_queue("order.placed")
        await until(lambda: queue.get_jobs("completed"))
        assert await events.cancel(placed, "k") is False
        assert await events.provider.has_receipt("order.placed", "k"), "else an outbox would have it handled once more"


async def test_ew_101_102_one_key_runs_once_and_answers_everybody(events: Events) -> None:
    runs: list[int] = []

    @events.on(check)
    async def handle(ctx: EventContext[Order]) -> Verdict:
        runs.append(1)
        await asyncio.sleep(0.02)
        return Verdict(ok=True)

    async with Events(events.url) as other, events:
        answers = await asyncio.gather(
            events.emit(check, Order(), key="k").wait(), other.emit(check, Order(), key="k").wait()
        )
        answers.append(await other.emit(check, Order(), key="k"))
        await events.emit(check, Order(), key="other")
    assert answers == [Verdict(ok=True)] * 3
    assert len(runs) == 2


async def test_ew_102_a_key_that_failed_answers_with_its_failure(events: Events) -> None:
    @events.on(check)
    async def handle(ctx: EventContext[Order]) -> Verdict:
        raise ValueError("once")

    async with Events(events.url, default_job_options=ONE_TRY) as emitter, events:
        for _ in range(2):
            with pytest.raises(RemoteError, match="ValueError: once"):
                await emitter.emit(check, Order(), key="k")


async def test_one_key_means_something_else_for_another_event(events: Events) -> None:
    events.on(echo)(lambda ctx: "echo")
    events.on(check)(lambda ctx: Verdict(ok=True))
    async with events:
        assert await events.emit(echo, 1, key="k") == "echo"
        assert await events.emit(check, Order(), key="k") == Verdict(ok=True)


async def test_ew_105_a_receipt_outlives_its_job_and_is_written_only_after_success(events: Events) -> None:
    seen: list[Any] = []
    fails = [True]

    @events.on(placed, retry=Retry(3, backoff="fixed", delay=0.01))
    async def handle(ctx: EventContext[Order]) -> None:
        seen.append(await events.provider.has_receipt("order.placed", "k"))
        if fails.pop() if fails else False:
            raise ValueError

    async with events:
        await events.emit(placed, Order(), key="k")
        await until(lambda: events.provider.has_receipt("order.placed", "k"))
        assert seen == [False, False]
        queue = events.provider.queues.get_queue("order.placed")
        await until(lambda: queue.clean(0, "completed"))
        await events.emit(placed, Order(), key="k")
        assert await stored(events, "order.placed") == []


async def test_without_a_default_group_the_one_that_answers_leaves_the_receipt(events: Events) -> None:
    seen: list[str] = []
    for group in ("billing", "search"):
        events.on(placed, group=group)(lambda ctx, group=group: seen.append(group))
    async with events:
        await events.emit(placed, Order(), key="k")
        await until(lambda: events.provider.has_receipt("order.placed", "k"))
        await until(lambda: len(seen) == 2)
        assert await events.provider.has_retained_event("order.placed", "k")
        for group in ("billing", "search"):
            await until(lambda group=group: events.provider.queues.get_queue("order.placed", group).clean(0))
        await events.emit(placed, Order(), key="k")
        assert await stored(events, "order.placed", "billing") == []
        assert await stored(events, "order.placed", "search") == []


async def test_a_key_that_was_handled_is_left_out_of_many(events: Events) -> None:
    keyed = event("keyed", Order, key=lambda order: order.id)
    seen: list[str] = []
    events.on(keyed)(lambda ctx: seen.append(ctx.data.id))
    async with events:
        await events.emit(keyed, Order("a"))
        await until(lambda: events.provider.has_receipt("keyed", "a"))
        await until(lambda: events.provider.queues.get_queue("keyed").clean(0, "completed"))
        assert await events.emit_many(keyed, [Order("a"), Order("b"), Order("b")]) == 3
        await until(lambda: events.provider.has_receipt("keyed", "b"))
    assert seen == ["a", "b"]


async def test_old_receipts_go_with_the_first_one_that_a_process_writes(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with events:
        await events.provider.receipts.write("old")
        assert await events.provider.receipts.has("old")
        monkeypatch.setattr(receipts, "KEPT", 0)
        another = receipts.Receipts(events.provider.client, "events.receipts")
        await another.prepare_retirement("new")
        assert not await another.has("old")


async def test_x_what_is_remembered_of_events_is_no_work_that_waits_for_somebody(events: Events) -> None:
    """Else the dashboard and `headrace top` report queues that stand still, wherever events are used."""
    events.on(placed)(lambda ctx: None)
    async with events:
        await events.emit(placed, Order(), key="k")
        await until(lambda: events.provider.has_receipt("order.placed", "k"))
        for queue in ("events.groups", "events.receipts"):
            counts = await Queue(events.provider.client, queue).counts()
            assert (counts["waiting"], counts["delayed"]) == (0, 1)


async def test_ew_106_a_key_is_retired_in_two_steps(events: Events) -> None:
    async with events:
        provider = events.provider
        await provider.prepare_retirement("order.placed", "k")
        await events.emit(placed, Order(), key="k")
        assert await stored(events, "order.placed") == [], "blocked while it retires"
        await provider.finalize_retirement("order.placed", "k")
        key_id = "k@event.order.placed"
        await provider.receipts.write(key_id)
        assert not await provider.has_receipt("order.placed", "k"), "the late receipt is swallowed"
        await provider.receipts.write(key_id)
        assert await provider.has_receipt("order.placed", "k")
        await provider.finalize_retirement("order.placed", "k")
        assert not await provider.receipts.has(key_id)


async def test_ew_106_what_the_store_has_of_a_key_can_be_asked(events: Events) -> None:
    @events.on(placed, retry=Retry(1))
    async def refuse(ctx: EventContext[Order]) -> None:
        raise ValueError("no")

    async with events:
        provider = events.provider
        assert not await provider.has_retained_event("order.placed", "k")
        await events.emit(placed, Order(), key="k", delay=60)
        assert await provider.has_retained_event("order.placed", "k")
        assert not await provider.is_retained_event_retryable("order.placed", "k")
        await events.emit(placed, Order(), key="bad")
        await until(lambda: provider.is_retained_event_retryable("order.placed", "bad"))


@pytest.mark.parametrize("key", [7, "a:b", ""])
async def test_an_impossible_key_is_refused_at_once(events: Events, key: Any) -> None:
    async with events:
        with pytest.raises(InvalidCommand, match="key"):
            events.emit(placed, Order(), key=key)


# -- time --------------------------------------------------------------------------------------------------------------


async def test_ew_107_a_ttl_drops_what_waited_too_long_and_sweeps_only_if_there_is_one(memory: str) -> None:
    short = event("short.lived", Order, ttl=timedelta(milliseconds=30))
    events = Events(memory, sweep_interval=0.05)
    async with events:
        assert events.provider._sweeper is None
        await events.emit(short, Order())
        assert len(await stored(events, "short.lived")) == 1

        async def is_empty() -> bool:
            return not await stored(events, "short.lived")

        await until(is_empty)
        sweeper = events.provider._sweeper
        assert sweeper is not None
    await asyncio.sleep(0)
    assert sweeper.cancelled()
    async with Events(memory) as plain:
        assert plain.provider._sweeper is None


async def test_the_ttl_of_a_delayed_event_counts_from_when_it_is_due(memory: str) -> None:
    later = event("later", Order)
    async with Events(memory) as events:
        await events.emit(later, Order(), delay=1)
        queue = events.provider.queues.get_queue("later")
        await until(lambda: queue.get_jobs("waiting"))
        (job,) = await queue.get_jobs()
        between = (job.created_at + job.run_at) / 2
        await events.provider._drop_overdue(queue, (events.provider.client.clock.now_ms() - between) / 1000)
        assert await queue.get_jobs() == [job]
        await events.provider._drop_overdue(queue, 0)
        assert await queue.get_jobs() == []


async def test_ew_121_an_expired_request_is_dropped_and_not_run_late(events: Events) -> None:
    seen: list[Any] = []
    async with events:
        with pytest.raises(EventTimeoutError):
            await events.emit(echo, "late", timeout=0.03)
        await events.emit(placed, Order("late"), expires=0.03)
        await asyncio.sleep(0.05)  # the time that has to pass is what is tested
        events.on(echo)(lambda ctx: seen.append(ctx.data))
        events.on(placed)(lambda ctx: seen.append(ctx.data.id))
        await events.emit(echo, "in time")
        await events.emit(placed, Order("in time"))
        await until(lambda: len(seen) == 2)
    assert seen == ["in time"] * 2


async def test_ew_121_a_key_whose_event_has_expired_is_free_again(events: Events) -> None:
    """Whoever emits it again must not be told that it is stored, or wait, for one that nobody will ever begin."""
    seen: list[Any] = []
    async with events:
        with pytest.raises(EventTimeoutError):
            await events.emit(echo, "late", key="k", timeout=0.03)
        await events.emit(placed, Order("late"), key="k", expires=0.03)
        await asyncio.sleep(0.05)  # the time that has to pass is what is tested
        question = events.emit(echo, "again", key="k", timeout=5)
        await events.emit(placed, Order("again"), key="k")
        await until(lambda: not events.provider._enqueuing)
        events.on(echo)(lambda ctx: ctx.data)
        events.on(placed)(lambda ctx: seen.append(ctx.data.id))
        assert await question == "again"
        await until(lambda: seen)
    assert seen == ["again"]


async def test_whoever_waits_without_limit_hears_that_the_event_expired_before_a_handler_began_it(url: str) -> None:
    """The store says nothing of it, and removes such a job only when a worker asks for one."""
    async with Events(url) as events, asyncio.timeout(10):  # the next look of its own accord is 30 s away
        with pytest.raises(EventCancelledError, match="it expired before a handler began it"):
            await events.emit(echo, "late", timeout=0, expires=0.03)
        with pytest.raises(EventCancelledError):
            await events.emit(echo, "late", timeout=60, delay=0.02, expires=0.03)


async def test_an_event_that_has_begun_in_time_is_awaited_although_its_time_to_begin_runs_out(events: Events) -> None:
    looked, go_on = asyncio.Event(), asyncio.Event()

    @events.on(echo)
    async def slow(ctx: EventContext[Any]) -> Any:
        await go_on.wait()
        return ctx.data

    async with events:
        watch_looks(events, looked)
        question = events.emit(echo, "begun", timeout=0, expires=1)
        await asyncio.wait_for(looked.wait(), 10)
        assert not question.is_settled
        go_on.set()
        assert await question == "begun"


async def test_an_event_that_begins_while_it_is_looked_at_is_not_taken_for_expired(events: Events) -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def slow(ctx: EventContext[Any]) -> Any:
        began.set()
        await go_on.wait()
        return ctx.data

    async with events, asyncio.timeout(10):
        tracker = events.provider.tracker
        found = tracker._found

        async def be_outrun(job_id: str) -> Any:
            tracker._found = found  # type: ignore[method-assign]
            info = await found(job_id)
            events.on(echo)(slow)
            await began.wait()
            await until(lambda: time.time() * 1000 > info.created_at + (info.ttl or 0) + 1)
            return info

        question = events.emit(echo, "just begun", timeout=60, expires=1)
        await until(lambda: not events.provider._enqueuing)
        tracker._found = be_outrun  # type: ignore[method-assign]
        tracker._look_at_all(tracker._watched["event.echo"])
        await until(lambda: not tracker._looks)
        assert not question.is_settled
        go_on.set()
        assert await question == "just begun"


async def test_whoever_waits_hears_when_an_attempt_fails_after_the_event_has_expired(events: Events) -> None:
    """There is no further attempt, and nothing announces that."""
    looked = asyncio.Event()

    @events.on(echo, retry=Retry(3, delay=60))
    async def fail_late(ctx: EventContext[Any]) -> Any:
        await looked.wait()
        raise ValueError("late")

    async with events, asyncio.timeout(10):
        watch_looks(events, looked)
        with pytest.raises(EventCancelledError):
            await events.emit(echo, "late", timeout=60, expires=1)


async def test_all_who_share_a_key_hear_that_the_event_of_the_first_one_expired(url: str) -> None:
    async with Events(url) as first, Events(url) as second, asyncio.timeout(10):
        questions = [first.emit(echo, "late", key="k", timeout=0, expires=1)]
        await until(lambda: not first.provider._enqueuing)
        questions += [second.emit(echo, "late", key="k", timeout=timeout) for timeout in (0, 60)]
        questions.append(second.emit(echo, "late", key="k", timeout=60, expires=0.01))
        for question in questions:
            with pytest.raises(EventCancelledError):
                await question


# -- groups ------------------------------------------------------------------------------------------------------------


async def test_ew_046_117_every_group_gets_every_event_and_instances_of_one_share_them(url: str) -> None:
    seen: Counter[tuple[str, str]] = Counter()
    instances = [Events(url) for _ in range(2)]
    for instance in instances:
        for group in ("billing", "search"):
            instance.on(placed, group=group)(lambda ctx, group=group: seen.update([(group, ctx.data.id)]))
    emitter = Events(url)
    async with instances[0], instances[1], emitter:
        for n in range(20):
            await emitter.emit(placed, Order(str(n)))
        assert await emitter.emit_many(placed, (Order(str(n)) for n in range(20, 30))) == 10
        await until(lambda: len(seen) == 60)
        assert await stored(emitter, "order.placed") == [], "nobody asked for the default group"
    assert set(seen.values()) == {1}


async def test_ew_046_047_the_default_group_answers_and_others_failing_do_not_matter(events: Events) -> None:
    late: list[str] = []

    @events.on(echo, group="audit", retry=Retry(1))
    async def audit(ctx: EventContext[Any]) -> str:
        late.append("audit")
        raise ValueError("audit is broken")

    @events.on(echo)
    async def answer(ctx: EventContext[Any]) -> str:
        return "from the default group"

    async with events:
        assert await events.emit(echo, 1) == "from the default group"
        assert await events.emit(echo, 1, key="keyed") == "from the default group"
        await until(lambda: len(late) == 2)


async def test_without_a_default_group_the_first_that_joined_answers(events: Events) -> None:
    async with events:
        events.on(echo, group="zulu")(lambda ctx: "first")
        await until(lambda: len(events.provider.groups.of("echo")) == 1)
        events.on(echo, group="alpha")(lambda ctx: "second")
        await until(lambda: len(events.provider.groups.of("echo")) == 2)
        assert await events.emit(echo, 1) == "first"


async def test_a_group_outlives_its_workers_until_it_leaves(url: str) -> None:
    async with Events(url) as keeper:
        consumer = Events(url)
        consumer.on(placed, group="g")(lambda ctx: None)
        async with consumer:
            pass
        await keeper.emit(placed, Order())
        assert len(await stored(keeper, "order.placed", "g")) == 1
        assert await keeper.provider.leave_group("order.placed", "g") is True
        await keeper.emit(placed, Order())
        assert len(await stored(keeper, "order.placed", "g")) == 1


async def test_a_handler_whose_group_could_not_join_begins_with_the_next_start(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.on(echo)(lambda ctx: ctx.data)

    async def refuse(self: GroupRegistry, wanted: Subscriber) -> None:
        raise HeadraceError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(GroupRegistry, "join", refuse)
        with pytest.raises(ExceptionGroup, match="1 event handler"):
            await events.start()
    await events.start()
    assert await events.emit(echo, 7, timeout=5) == 7


async def test_events_that_could_not_begin_hold_nothing(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(memory)
    events.on(echo)(lambda ctx: ctx.data)

    async def refuse(self: GroupRegistry, wanted: Subscriber) -> None:
        raise HeadraceError("no room")

    monkeypatch.setattr(GroupRegistry, "join", refuse)
    with pytest.raises(ExceptionGroup):
        async with events:
            pass
    assert events._provider is None
    with pytest.raises(ExceptionGroup), events.sync():
        pass
    assert (events._provider, events.loop) == (None, None)


async def test_what_is_no_group_among_the_groups_is_left_out(url: str, caplog: pytest.LogCaptureFixture) -> None:
    events = Events(url)
    await Queue(events.provider.client, "events.groups").add("junk", {"colour": "blue"})
    events.on(echo, group="mail")(lambda ctx: "heard")
    async with asyncio.timeout(10), events:
        await until(lambda: events.provider.groups.of("echo"))
        assert await events.emit(echo, 1) == "heard"
    assert "is no group and left out" in caplog.text


async def test_ew_055_handlers_are_counted_per_event(memory: str) -> None:
    events = Events(memory)
    events.on(placed)(print)
    events.on(placed, group="g")(print)
    assert (events.handlers(placed), events.handlers(echo)) == (2, 0)
    with pytest.raises(InvalidCommand, match="already"):
        events.on(placed)(print)
    with pytest.raises(InvalidCommand, match="group"):
        events.on(placed, group="a.b")


# -- many --------------------------------------------------------------------------------------------------------------


async def test_ew_111_113_instances_share_events_without_loss_or_duplicates(url: str) -> None:
    kinds = [event(f"kind.{n}", int) for n in range(3)]
    seen: Counter[tuple[str, int]] = Counter()
    took_part: set[int] = set()
    instances = [Events(url) for _ in range(3)]
    for number, instance in enumerate(instances):
        for kind in kinds:

            async def handle(ctx: EventContext[int], number: int = number) -> None:
                seen[ctx.event_name, ctx.data] += 1
                took_part.add(number)
                await asyncio.sleep(0.002)

            instance.on(kind, concurrency=2)(handle)
    async with instances[0], instances[1], instances[2]:
        for n in range(20):
            for kind in kinds:
                await instances[0].emit(kind, n)
        await until(lambda: len(seen) == 60)
    assert set(seen.values()) == {1}
    assert len(took_part) > 1


async def test_many_questions_at_once_are_all_answered(events: Events) -> None:
    events.on(echo, concurrency=50, sync=False)(_plain)
    count = scaled(300, 5000)
    async with events:
        answers = await asyncio.gather(*(events.emit(echo, n).wait() for n in range(count)))
        assert answers == list(range(count))
        watched = events.provider.tracker._watched["event.echo"]
        assert (watched.pending, watched.jobs, watched.unmapped) == ({}, {}, 0)


async def _plain(ctx: EventContext[Any]) -> Any:
    return ctx.data


# -- failures and the end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("definition", [echo, placed])
async def test_ew_095_103_a_push_that_fails_rejects_the_subscription(events: Events, definition: Any) -> None:
    async def refused(*args: Any, **options: Any) -> str:
        raise HeadraceError("the disk is full")

    async with events:
        events.provider.queues.add_job = refused  # type: ignore[method-assign]
        with pytest.raises(HeadraceError, match="the disk is full"):
            await events.emit(definition, Order())
        assert all(not watched.pending for watched in events.provider.tracker._watched.values())


async def test_ew_091_103_only_questions_listen_and_they_do_so_before_they_push(events: Events) -> None:
    order: list[str] = []
    async with events:
        provider = events.provider
        listening, add_job = provider.tracker.listening, provider.queues.add_job

        async def listened(queue: str) -> None:
            await listening(queue)
            order.append("listening")

        async def added(*args: Any, **options: Any) -> str:
            order.append("added")
            return await add_job(*args, **options)

        provider.tracker.listening, provider.queues.add_job = listened, added  # type: ignore[method-assign]
        await events.emit(placed, Order(), timeout=0.001)
        assert order == ["added"]
        assert not provider.tracker._watched
        with pytest.raises(EventTimeoutError):
            await events.emit(echo, 1, timeout=1)
    assert order == ["added", "listening", "added"]


async def test_ew_053_085_110_x8_stopping_settles_every_waiter_in_order(events: Events) -> None:
    order: list[str] = []
    may_end = asyncio.Event()

    @events.on(echo)
    async def handle(ctx: EventContext[Any]) -> str:
        await may_end.wait()
        return "drained"

    async with Events(events.url) as keeper:
        await events.start()
        provider = events.provider
        for name, part in (
            ("queues", provider.queues),
            ("tracker", provider.tracker),
            ("schedules", provider.schedules),
        ):

            async def noted(name: str = name, stop: Any = part.stop) -> None:
                order.append(name)
                await stop()

            part.stop = noted
        running = events.emit(echo, "runs", timeout=0)
        delayed = events.emit(placed, Order(), delay=3600, expects_result=True, timeout=0)
        keyed = events.emit(placed, Order(), delay=3600, key="k", expects_result=True, timeout=0)
        await until(lambda: provider.queues._workers["event.echo"]._running)
        await until(lambda: not provider._enqueuing)
        blocked = events.emit(check, Order(), timeout=0)
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        await events.stop()
        assert await running == "drained"
        for waiting in (delayed, keyed, blocked):
            assert waiting.is_settled
            with pytest.raises(ProviderStoppedError):
                await waiting
        assert order == ["queues", "tracker", "schedules"]
        assert await stored(keeper, "fraud.check") == [], "an emission that was stopped is not enqueued"
        assert len(await stored(keeper, "order.placed")) == 2, "what is stored goes on"


async def test_emitting_before_the_start_says_what_to_do(memory: str) -> None:
    events = Events(memory)
    with pytest.raises(ProviderStoppedError, match="async with events"):
        events.emit(placed, Order())
    await events.stop()


async def test_a_handler_that_cannot_emit_because_of_the_stop_gives_its_event_back(url: str) -> None:
    """A deploy is no failure of a handler: it costs no attempt, and nothing is left open."""
    began, seen = asyncio.Event(), []
    stopping, next_one = Events(url), Events(url)

    @stopping.on(echo, retry=Retry(1))
    async def interrupted(ctx: EventContext[Any]) -> None:
        began.set()
        while stopping.provider.is_started:  # noqa: ASYNC110 - until the test stops it
            await asyncio.sleep(0.001)
        await ctx.emit(placed, Order())

    @next_one.on(echo)
    async def go_on(ctx: EventContext[Any]) -> str:
        seen.append(ctx.attempt)
        return "done"

    async with Events(url) as keeper:
        await stopping.start()
        client = stopping.provider.client
        question = keeper.emit(echo, 1)
        await began.wait()
        await stopping.stop()
        assert stopping._provider is None
        async with next_one:
            assert await question == "done"
    assert seen == [1]
    assert client.is_closed, "nobody holds what they shared"


async def test_a_worker_that_died_keeps_nobody_from_hearing_of_the_stop(memory: str) -> None:
    class Mortal(EventWorker):
        async def close(self) -> None:
            await super().close()
            raise OSError("gone")

    events = Events(memory)
    provider = events.provider
    provider.queues._worker_class = Mortal
    events.on(echo)(lambda ctx: None)
    await events.start()
    waiting = events.emit(placed, Order(), delay=3600, expects_result=True, timeout=0)
    await until(lambda: not provider._enqueuing)
    await events.stop()
    with pytest.raises(ProviderStoppedError):
        await waiting


async def test_a_handler_that_comes_as_everything_stops_holds_nothing(memory: str) -> None:
    events = Events(memory)
    async with events:
        client = events.provider.client
        events.on(echo)(lambda ctx: None)
    assert (events._provider, events._late) == (None, set())
    assert client.is_closed


async def test_an_emission_that_failed_as_everything_stops_keeps_nothing_from_ending(memory: str) -> None:
    events = Events(memory)
    events.on(placed)(lambda ctx: None)
    before = asyncio.all_tasks()
    async with events:
        client = events.provider.client
        refused = events.emit(placed, Order(), delay="soon")
    assert client.is_closed
    assert asyncio.all_tasks() == before
    with pytest.raises(InvalidCommand, match="'soon' is not understood"):
        await refused


def test_a_handler_that_is_a_generator_is_refused(memory: str) -> None:
    """Its event would be taken for handled, and none of its code would have run."""

    def lines(ctx: EventContext[Order]) -> Iterator[str]:
        yield ctx.data.id

    async def pages(ctx: EventContext[Order]) -> AsyncIterator[str]:
        yield ctx.data.id

    events = Events(memory)
    for handler in (lines, pages):
        with pytest.raises(InvalidCommand, match=f"{handler.__name__} is a generator"):
            events.on(placed)(handler)
    with pytest.raises(InvalidCommand, match=r"lines at .* is no event: .* write @events\.on\(it\)"):
        events.on(lines)  # type: ignore[arg-type]
    assert events.handlers(placed) == 0


# -- threads -----------------------------------------------------------------------------------------------------------


def test_the_sync_facade_works_without_a_loop(url: str) -> None:
    events = Events(url)
    seen: list[Any] = []

    @events.on(echo)
    def handle(ctx: EventContext[Any]) -> Any:
        with propagate(tenant="t1"):
            ctx.sync().emit(placed, Order("inner"))
        return threading.current_thread().name

    events.on(placed)(lambda ctx: seen.append((ctx.causation_id is not None, ctx.meta["tenant"])))
    with pytest.raises(RuntimeError, match=r"sync\(\)"):
        events.emit(echo, 1)
    with events.sync() as sync:
        assert sync.emit(echo, 1).startswith("headrace-event.echo")
        assert sync.cancel(echo, "nobody") is False
        assert sync.emit_many(placed, []) == 0
        deadline = threading.Event()
        for _ in range(1000):
            if seen or deadline.wait(0.01):
                break
    assert seen == [(True, "t1")]


def test_threads_that_enter_the_sync_facade_share_it_until_the_last_one_leaves(url: str) -> None:
    events = Events(url)
    events.on(echo)(lambda ctx: ctx.data)
    all_inside, first_has_left = threading.Barrier(8), threading.Event()

    def ask(number: int) -> list[Any]:
        with events.sync() as sync:  # all at once: one of them starts it, and the others wait for that
            before = sync.emit(echo, number, timeout=10)
            all_inside.wait(10)
            if number:
                assert first_has_left.wait(10)
                return [before, sync.emit(echo, number, timeout=10)]
        first_has_left.set()
        return [before]

    for _ in range(2):  # when all have left it can be entered again
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        assert answers == [[0], *([number, number] for number in range(1, 8))]
        assert events.loop is None
        first_has_left.clear()
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-background"]


def test_a_handler_that_enters_the_sync_facade_does_not_keep_it_from_ending(memory: str) -> None:
    events = Events(memory)
    begun, leaving, seen = threading.Event(), threading.Event(), []

    @events.on(placed)
    def handle(ctx: EventContext[Order]) -> None:
        begun.set()
        assert leaving.wait(10)
        with events.sync() as sync, contextlib.suppress(ProviderStoppedError):
            while True:  # until the end that waits for this handler has begun
                sync.emit(placed, Order("inner"), delay="1h")
        seen.append(ctx.data.id)

    with events.sync() as sync:
        sync.emit(placed, Order("outer"))
        assert begun.wait(10)
        leaving.set()
    assert seen == ["outer"]


async def test_an_emission_from_another_loop_is_refused_instead_of_never_answered(events: Events) -> None:
    events.on(echo)(lambda ctx: ctx.data)

    async def ask() -> Any:
        return await events.emit(echo, 1, timeout=5)

    async with events:
        with pytest.raises(RuntimeError, match=r"on another loop; from here use events\.sync\(\)"):
            await asyncio.to_thread(asyncio.run, ask())
        assert await asyncio.to_thread(events.sync().emit, echo, 2) == 2
        assert await ask() == 1


FORKING = """
import os
from headrace.events import Events, event
events, echo = Events("memory://"), event("echo", int, int)
events.on(echo)(lambda ctx: ctx.data)
with events.sync() as sync:
    print(sync.emit(echo, 7, timeout=10), flush=True)
    if os.fork() == 0:
        for ask in (lambda: sync.emit(echo, 8), events.sync().__enter__):
            try:
                ask()
            except RuntimeError as error:
                print(error, flush=True)
        os._exit(0)
    print("the child ended with", os.wait()[1])
"""


def test_a_forked_child_of_a_sync_facade_is_told_to_enter_it_itself() -> None:
    """It would wait for ever for a thread that only its parent has."""
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", FORKING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    told = (
        "what is entered before a fork keeps its thread in the parent process: enter it after the fork, in each process"
    )
    assert done.stdout.splitlines() == ["7", told, told, "the child ended with 0"]
