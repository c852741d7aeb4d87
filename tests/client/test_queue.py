"""Everything a queue can be asked, wherever it lives and whoever asks."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

import pytest

from headrace.client.options import Backoff, Dedup, RateLimit
from headrace.client.queue import NewJob
from headrace.commands import workers
from headrace.errors import InvalidCommand
from tests.client.faces import bury, complete, pull
from tests.scale import scaled


async def test_a_job_that_was_added_can_be_looked_at(q: Any) -> None:
    job = await q.add("send", {"to": "ada"})
    info = await q.get_job(job.id)
    assert (info.id, info.queue, info.name, info.state) == (job.id, q.name, "send", "waiting")
    assert info.data == {"to": "ada"}
    assert abs(info.created - datetime.now(UTC)) < timedelta(seconds=30)
    assert (job.queue, job.name) == (q.name, "send")


async def test_a_job_is_found_by_the_id_its_producer_gave_it(q: Any) -> None:
    job_id = f"invoice-1-{q.name}"
    first = await q.add("send", 1, job_id=job_id)
    again = await q.add("send", 2, job_id=job_id)
    assert first == again
    found = await q.get_job(job_id)
    assert (found.id, found.data, found.custom_id) == (first.id, 1, job_id)
    assert await q.count() == 1


@pytest.mark.parametrize(("once", "is_kept"), [(True, True), ("1h", True), ("1h", False)])
async def test_an_id_that_is_used_once_stands_for_the_job_that_ended(q: Any, once: bool | str, is_kept: bool) -> None:
    job_id = f"once-{q.name}"
    first = await q.add("send", 1, job_id=job_id, once=once, remove_on_complete=not is_kept)
    await complete(q)
    assert await q.add("send", 2, job_id=job_id, once=once) == first
    assert (await q.counts()).get("waiting", 0) == 0


async def test_a_job_that_does_not_exist_is_none(q: Any) -> None:
    assert await q.get_job("nobody") is None


async def test_every_option_of_a_job_arrives(q: Any) -> None:
    first = await q.add("first")
    job = await q.add(
        "all",
        None,
        priority=7,
        delay="1h30m",
        attempts=5,
        backoff=Backoff.exponential(2, max="1m"),
        timeout=timedelta(minutes=2),
        ttl="2d",
        job_id=f"all-{q.name}",
        dedup=Dedup("key", "throttle", ttl=60),
        group="customers",
        tags=["a", "b"],
        lifo=True,
        durable=True,
        depends_on=[first.id],
        remove_on_complete=True,
        remove_on_fail=True,
        keep_logs=3,
        stall_timeout=10,
    )
    info = await job.info()
    assert (info.priority, info.max_attempts, info.timeout) == (7, 5, 120_000)
    assert info.run_at - info.created_at == pytest.approx(90 * 60_000, abs=2)
    assert (info.custom_id, info.unique_key, info.group_id) == (f"all-{q.name}", "key", "customers")
    assert (info.tags, info.depends_on) == (["a", "b"], [first.id])


async def test_a_moment_with_a_zone_becomes_a_delay(q: Any) -> None:
    job = await q.add("later", at=datetime.now(UTC) + timedelta(hours=1))
    info = await job.info()
    assert info.state == "delayed"
    assert info.run_at - info.created_at == pytest.approx(3_600_000, abs=5000)
    past = await q.add("now", at=datetime.now(UTC) - timedelta(hours=1))
    assert await past.state() == "waiting"


async def test_options_that_are_none_count_as_not_given(q: Any) -> None:
    info = await (await q.add("plain", priority=None, delay=None)).info()
    assert (info.priority, info.state) == (0, "waiting")


async def test_defaults_of_a_queue_apply_to_its_jobs_and_give_way_to_those_of_a_job(face: Any, queue: str) -> None:
    q = face.queue(queue, attempts=9, priority=1)
    one, many = await q.add("one", priority=2), await q.add_many([("many", None)])
    assert [((i := await job.info()).max_attempts, i.priority) for job in (one, *many)] == [(9, 2), (9, 1)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"at": datetime(2030, 1, 1)}, "needs a time zone"),
        ({"at": "tomorrow"}, "a datetime with a time zone is wanted"),
        ({"delay": "soon"}, "'soon' is not understood"),
        ({"delay": -1}, "must not be negative"),
        ({"delay": True}, "delay must be seconds"),
        ({"timeout": int}, "timeout must be seconds"),
        ({"color": "red"}, "unknown job option 'color'; there are: at, dedup, priority"),
        ({"tags": "urgent"}, "write ['urgent']"),
        ({"depends_on": "id"}, "write ['id']"),
        ({"dedup": Dedup("k", "throttle")}, "needs a ttl"),
        ({"dedup": Dedup("k", cast("Any", "debouce"), ttl=1)}, "one of simple, throttle, debounce"),
        ({"dedup": 5}, "dedup"),
        ({"priority": "high"}, "priority must be a number"),
        ({"priority": 1.5}, "priority must be an integer"),
        ({"priority": 2_000_000}, "priority must be at most 1000000"),
        ({"attempts": 0}, "maxAttempts must be at least 1"),
        ({"lifo": "no"}, "lifo must be a boolean"),
        ({"tags": [int]}, "cannot be sent"),
    ],
    ids=str,
)
async def test_an_option_that_cannot_be_is_refused_in_the_same_words_everywhere(
    q: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidCommand) as refused:
        await q.add("send", None, **options)
    assert words in str(refused.value)
    assert type(refused.value) is InvalidCommand
    assert await q.count() == 0


async def test_a_queue_with_an_impossible_name_is_refused(face: Any) -> None:
    with pytest.raises(InvalidCommand, match="Queue name contains invalid characters"):
        await face.queue("no spaces").add("send")


async def test_ten_thousand_jobs_are_added_in_their_order(q: Any) -> None:
    count = scaled(10_000, 100_000)
    added = await q.add_many(("n", number) for number in range(count))
    assert len({job.id for job in added}) == count == await q.count()
    for number in (0, 999, 1000, count - 1):
        assert (await added[number].info()).data == number


async def test_jobs_that_are_added_together_have_options_of_their_own(q: Any) -> None:
    added = await q.add_many([NewJob(name="a", data=1, options={"delay": 60}), NewJob(name="b"), ("c", {"x": 2})])
    infos = [await job.info() for job in added]
    assert [(i.name, i.data, i.state) for i in infos] == [
        ("a", 1, "delayed"),
        ("b", None, "waiting"),
        ("c", {"x": 2}, "waiting"),
    ]


async def test_one_bad_job_keeps_its_whole_batch_out(q: Any) -> None:
    with pytest.raises(InvalidCommand, match=r"jobs\[1\]: priority must be at most"):
        await q.add_many([("ok", 1), NewJob(name="bad", options={"priority": 10**9})])
    assert await q.count() == 0


@pytest.mark.parametrize("wrong", ["name", ("name", 1, {"delay": 5}), ("name",), None, {"name": "n"}])
async def test_what_is_no_job_is_refused_and_nothing_of_it_dropped(q: Any, wrong: Any) -> None:
    with pytest.raises(InvalidCommand, match="pairs of name and data"):
        await q.add_many([("ok", 1), wrong])
    assert await q.count() == 0


@pytest.mark.parametrize("wrong", [5, "5/s"])
async def test_what_is_no_rate_is_refused(q: Any, wrong: Any) -> None:
    with pytest.raises(InvalidCommand, match="RateLimit"):
        await q.limit_rate(wrong)


async def test_batches_of_large_jobs_fit_their_frames(q: Any, url: str) -> None:
    size, count = (700_000, 15) if url.startswith("valkey") else (3_000_000, 5)  # there, 1 MB of text is the limit
    added = await q.add_many([("large", b"x" * size) for _ in range(count)])
    assert len(added) == count == await q.count()
    await q.obliterate()


async def test_jobs_are_listed_by_state_a_page_at_a_time(q: Any) -> None:
    jobs = await q.add_many([("n", number) for number in range(5)])
    delayed = await q.add("later", delay="1h")
    assert [job.data for job in await q.get_jobs("waiting", limit=2, offset=1)] == [1, 2]
    assert [job.id for job in await q.get_jobs("waiting", limit=1, newest_first=True)] == [jobs[-1].id]
    assert [job.id for job in await q.get_jobs("delayed")] == [delayed.id]
    assert len(await q.get_jobs()) == 6 == len(await q.get_jobs("waiting", "delayed"))


async def test_counts_follow_the_jobs(q: Any) -> None:
    await q.add_many([("n", 1)] * 4)
    await q.add("later", delay="1h")
    await complete(q)
    await bury(q)
    await pull(q)
    counts = await q.counts()
    expected = {"waiting": 1, "delayed": 1, "completed": 1, "failed": 1, "active": 1}
    assert {state: counts[state] for state in expected} == expected


async def test_jobs_are_counted_per_priority(q: Any) -> None:
    await q.add_many([NewJob(name="n", options={"priority": p}) for p in (0, 5, 5)])
    assert await q.counts_per_priority() == {0: 1, 5: 2}


async def test_a_paused_queue_hands_nothing_out_until_it_is_resumed(q: Any) -> None:
    await q.add("send")
    await q.pause()
    assert await q.is_paused()
    waiting = asyncio.create_task(pull(q))
    assert await q.count() == 1
    await q.resume()
    assert not await q.is_paused()
    assert (await waiting)[0]


async def test_draining_removes_what_waits(q: Any) -> None:
    await q.add_many([("n", 1)] * 3)
    await q.add("later", delay="1h")
    assert await q.drain() == 4
    assert await q.count() == 0


async def test_obliterating_removes_the_queue(q: Any) -> None:
    job = await q.add("send")
    await q.obliterate()
    assert await job.state() == "unknown"
    assert await q.get_jobs() == []


async def test_cleaning_removes_what_is_old_enough(q: Any) -> None:
    await q.add("send")
    done = await complete(q)
    assert await q.clean("1h", "completed") == []
    assert await q.clean(0, "completed") == [done]


async def test_delayed_jobs_are_promoted(q: Any) -> None:
    jobs = await q.add_many([NewJob(name="n", options={"delay": 3600})] * 3)
    assert await q.promote_all(1) == 1
    assert await q.promote_all() == 2
    assert [await job.state() for job in jobs] == ["waiting"] * 3


async def test_completed_jobs_run_once_more(q: Any) -> None:
    job = await q.add("send")
    await complete(q)
    assert await q.retry_completed(job.id) == 1
    assert await job.state() == "waiting"
    await complete(q)
    assert await q.retry_completed() == 1


async def test_limits_are_set_shown_and_lifted(q: Any) -> None:
    await q.limit_rate(RateLimit(10, per="1m"))
    await q.limit_concurrency(3)
    limits = await q.limits()
    assert (limits.rate_limit.max, limits.rate_limit.duration, limits.concurrency_limit) == (10, 60_000, 3)
    await q.limit_rate(None)
    await q.limit_concurrency(None)
    limits = await q.limits()
    assert (limits.rate_limit, limits.concurrency_limit) == (None, None)


async def test_a_rate_limit_can_end_by_itself(q: Any) -> None:
    await q.limit_rate(RateLimit(1, per=60), ttl="1h")
    limits = await q.limits()
    assert limits.rate_limit.max == 1
    assert 3_500_000 < limits.rate_limit_ttl <= 3_600_000


async def test_stall_settings_change_field_by_field(q: Any) -> None:
    before = await q.stalls()
    await q.set_stalls(stall_interval="45s", max_stalls=2)
    after = await q.stalls()
    assert (after.stall_interval, after.max_stalls) == (45_000, 2)
    assert (after.enabled, after.grace_period) == (before.enabled, before.grace_period)
    with pytest.raises(InvalidCommand, match="unknown setting 'speed'; there are: enabled"):
        await q.set_stalls(speed=1)


@pytest.mark.parametrize("tz", ["Europe/Berlin", ZoneInfo("Europe/Berlin")], ids=["name", "zone"])
async def test_schedules_are_made_listed_and_removed(q: Any, tz: Any) -> None:
    name = f"nightly-{q.name}"
    made = await q.schedule(name, {"x": 1}, cron="0 3 * * *", tz=tz, priority=2)
    assert (made.name, made.queue, made.schedule, made.timezone) == (name, q.name, "0 3 * * *", "Europe/Berlin")
    every = await q.schedule(f"often-{q.name}", every="5m", job_name="tick")
    assert every.repeat_every == 300_000
    assert {found.name for found in await q.schedules()} == {made.name, every.name}
    assert await q.unschedule(name) is True
    assert await q.unschedule(name) is False
    assert [found.name for found in await q.schedules()] == [every.name]


@pytest.mark.parametrize("both", [{}, {"every": 5, "cron": "* * * * *"}])
async def test_a_schedule_has_one_kind_of_rhythm(q: Any, both: dict[str, Any]) -> None:
    with pytest.raises(InvalidCommand, match="either a cron expression or an interval"):
        await q.schedule("odd", **both)


async def test_a_schedule_that_nobody_can_follow_is_refused(q: Any) -> None:
    with pytest.raises(InvalidCommand, match="cron"):
        await q.schedule("odd", cron="at noon")


async def test_workers_of_a_queue_are_listed(q: Any) -> None:
    registered = await q.call(workers.RegisterWorker(name="w1", queues=[q.name]))
    assert [worker.name for worker in await q.workers()] == ["w1"]
    await q.call(workers.UnregisterWorker(worker_id=registered.data.worker_id))
    assert await q.workers() == []


# -- dead letters ------------------------------------------------------------------------------------------------------


async def test_dead_letters_are_listed_counted_and_retried(q: Any) -> None:
    jobs = await q.add_many([("n", number) for number in range(4)])
    for _ in jobs:
        await bury(q, "no such customer")
    letters = await q.dlq.list()
    assert len(letters) == 4
    assert {letter.error for letter in letters} == {"no such customer"}
    assert (await q.dlq.stats()).total == 4
    assert len(await q.dlq.list(limit=1, offset=3)) == 1
    assert await q.dlq.retry(jobs[0].id) == 1
    assert await q.dlq.retry(limit=1) == 1
    assert await q.dlq.remove(jobs[3].id) is True
    assert await q.dlq.remove(jobs[3].id) is False
    assert await q.dlq.purge() == 1
    assert await q.dlq.list() == []


async def test_dead_letters_are_retried_by_their_reason(q: Any) -> None:
    await q.add("n")
    await bury(q)
    (letter,) = await q.dlq.list()
    assert await q.dlq.retry(reason="stalled" if letter.reason != "stalled" else "timeout") == 0
    assert await q.dlq.retry(reason=letter.reason) == 1


async def test_what_happens_to_dead_letters_can_be_set(q: Any) -> None:
    await q.dlq.configure(max_age="7d", max_entries=50, auto_retry=True, auto_retry_interval="1h", max_auto_retries=2)
    config = await q.dlq.config()
    assert (config.max_age, config.max_entries, config.auto_retry) == (7 * 86_400_000, 50, True)
    await q.dlq.configure(max_age=None)
    assert (await q.dlq.config()).max_age is None
    with pytest.raises(InvalidCommand, match="unknown setting 'size'"):
        await q.dlq.configure(size=1)
