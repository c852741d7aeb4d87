"""The PyPI package `bunqueue-client`, unmodified: Queue, Worker, simple mode, flows, cron, webhooks.

Every public method of its Queue is called at least once and its effect is asserted. A job is held active with
a plain PULL over the client's own connection, so that no test depends on the timing of a worker.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bunqueue import (
    AuthError,
    Bunqueue,
    CommandError,
    CommandTimeoutError,
    Connection,
    FlowProducer,
    Job,
    Queue,
    UnrecoverableError,
    Worker,
)

from tests.waiting import eventually

from .conftest import AUTH_TOKEN, ServerAddress

OpenWorker = Callable[..., Worker]
OpenQueue = Callable[..., Queue]


@pytest.fixture
def open_queue(server: ServerAddress) -> Iterator[OpenQueue]:
    opened: list[Queue] = []

    def open_one(theme: str = "queue") -> Queue:
        queue = Queue(f"py-{theme}-{uuid.uuid4().hex[:10]}", host=server.host, port=server.port)
        opened.append(queue)
        return queue

    yield open_one
    for queue in opened:
        queue.close()


@pytest.fixture
def queue(open_queue: OpenQueue) -> Queue:
    return open_queue()


@pytest.fixture
def open_worker(server: ServerAddress) -> Iterator[OpenWorker]:
    opened: list[Worker] = []

    def open_one(queue: Queue | str, processor: Callable[[Job], Any], **options: Any) -> Worker:
        name = queue if isinstance(queue, str) else queue.name
        # The client waits for its open poll when it closes; a short one keeps the tests short.
        settings = {"host": server.host, "port": server.port, "poll_timeout_ms": 200, **options}
        opened.append(Worker(name, processor, **settings))
        return opened[-1]

    yield open_one
    for worker in opened:
        worker.close(timeout=10)


@pytest.fixture
def flows(server: ServerAddress) -> Iterator[FlowProducer]:
    with FlowProducer(host=server.host, port=server.port) as producer:
        yield producer


def take(queue: Queue, **fields: Any) -> dict[str, Any]:
    """Pull the next job by hand; without an owner it carries no token."""
    reply = queue.connection.call({"cmd": "PULL", "queue": queue.name, **fields})
    assert reply["job"] is not None, "the queue handed out no job"
    return {**reply["job"], "token": reply.get("token")}


def complete_next(queue: Queue, result: Any = None) -> str:
    job_id = str(take(queue)["id"])
    queue.move_job_to_completed(job_id, result)
    return job_id


def bury_next(queue: Queue, message: str = "buried") -> str:
    job_id = str(take(queue)["id"])
    queue.move_job_to_failed(job_id, UnrecoverableError(message))
    return job_id


# ------------------------------------------------------------------ produce and read


def test_add_keeps_name_data_and_options(queue: Queue) -> None:
    added = queue.add("send", {"to": "a@b", "at": 2**40}, priority=4, attempts=7, tags=["x"], group_id="g")
    job = queue.get_job(added.id)
    assert job is not None
    assert (job.name, job.queue) == ("send", queue.name)
    assert job.data == {"name": "send", "to": "a@b", "at": 2**40}
    assert (job.priority, job.max_attempts, job.tags, job.group_id) == (4, 7, ["x"], "g")
    assert (job.state, job.attempts, job.progress, job.stacktrace) == ("waiting", 0, 0, None)
    assert abs((job.created_at or 0) - time.time() * 1000) < 60_000


def test_every_option_of_an_add_is_kept(queue: Queue) -> None:
    base = queue.add("base").id
    options: dict[str, Any] = {
        "priority": 5,
        "delay": 60_000,
        "attempts": 4,
        "backoff": {"type": "exponential", "delay": 500},
        "ttl": 3_600_000,
        "timeout": 30_000,
        "unique_key": "key",
        "deduplication": {"id": "ignored", "ttl": 60_000, "extend": False, "replace": False},
        "depends_on": [base],
        "tags": ["red", "blue"],
        "group_id": "g",
        "lifo": True,
        "remove_on_complete": True,
        "remove_on_fail": True,
        "stall_timeout": 45_000,
        "durable": True,
        "debounce": {"id": "d", "ttl": 1_000},
        "stack_trace_limit": 3,
        "keep_logs": 9,
        "size_limit": 1_000,
        "timestamp": 1_700_000_000_000,
    }
    single = queue.get_job(queue.add("full", {"v": 1}, job_id=f"{queue.name}-1", **options).id)
    options["unique_key"] = "other key"
    bulk = queue.get_job(
        queue.add_bulk([{"name": "full", "data": {"v": 1}, "job_id": f"{queue.name}-2", **options}])[0]
    )
    assert single is not None
    assert bulk is not None
    for job, job_id, key in ((single, f"{queue.name}-1", "key"), (bulk, f"{queue.name}-2", "other key")):
        assert (job.id, job.custom_id, job.depends_on, job.tags) == (job_id, job_id, [base], ["red", "blue"])
        stored = {name: job.raw[name] for name in STORED_OPTIONS}
        assert stored == {**STORED_OPTIONS, "uniqueKey": key}


STORED_OPTIONS = {
    "priority": 5,
    "maxAttempts": 4,
    "backoffConfig": {"type": "exponential", "delay": 500},
    "ttl": 3_600_000,
    "timeout": 30_000,
    "uniqueKey": "key",
    "groupId": "g",
    "lifo": True,
    "removeOnComplete": True,
    "removeOnFail": True,
    "stallTimeout": 45_000,
    "durable": True,
    "stackTraceLimit": 3,
    "keepLogs": 9,
    "sizeLimit": 1_000,
    "createdAt": 1_700_000_000_000,
    "deduplicationTtl": 60_000,
    "debounceId": "d",
    "debounceTtl": 1_000,
}


def test_data_that_is_no_map_travels_as_payload(queue: Queue) -> None:
    job = queue.get_job(queue.add("plain", [1, "two", None]).id)
    assert job is not None
    assert job.data == {"name": "plain", "payload": [1, "two", None]}


def test_add_bulk_answers_ids_in_order(queue: Queue) -> None:
    entries = [{"name": f"n{i}", "data": {"i": i}} for i in range(20)]
    custom = f"{queue.name}-last"
    ids = queue.add_bulk([*entries, {"name": "last", "job_id": custom, "delay": 60_000}])
    assert len(set(ids)) == 21
    assert ids[-1] == custom
    job = queue.get_job(ids[7])
    assert job is not None
    assert job.name == "n7"
    assert queue.get_waiting_count() == 20


def test_unknown_job_is_none(queue: Queue) -> None:
    assert queue.get_job("no-such-job") is None
    assert queue.get_job_by_custom_id("no-such-job") is None
    assert queue.get_state("no-such-job") == "unknown"


def test_refused_option_raises_with_the_servers_text(queue: Queue) -> None:
    with pytest.raises(CommandError, match="priority must be at most 1000000"):
        queue.add("bad", {}, priority=1_000_001)
    assert queue.count() == 0


def test_custom_id_is_found_in_every_state(queue: Queue) -> None:
    custom = f"{queue.name}-order"
    assert queue.add("charge", {"v": 1}, job_id=custom).id == custom
    assert queue.add("charge", {"v": 2}, job_id=custom).id == custom
    for step in (lambda: None, lambda: take(queue), lambda: queue.move_job_to_completed(custom, "paid")):
        step()
        job = queue.get_job_by_custom_id(custom)
        assert job is not None
        assert (job.id, job.custom_id, job.data["v"]) == (custom, custom, 1)
    assert queue.get_deduplication_job_id(custom) == custom


def test_deduplication_answers_the_owner(queue: Queue) -> None:
    owner = queue.add("x", {"v": 1}, deduplication={"id": "key", "ttl": 60_000})
    assert queue.add("x", {"v": 2}, deduplication={"id": "key", "ttl": 60_000}).id == owner.id
    assert queue.add("x", {"v": 3}, unique_key="other").id != owner.id
    assert queue.get_waiting_count() == 2


def test_states_are_listed_and_counted(queue: Queue) -> None:
    queue.add("done")
    completed = complete_next(queue, {"sum": 3})
    queue.add("broken")
    failed = bury_next(queue, "no luck")
    queue.add("running")
    active = str(take(queue)["id"])
    waiting = queue.add("ready").id
    urgent = queue.add("urgent", priority=9).id
    delayed = queue.add("later", delay=60_000).id
    blocked = queue.add("blocked", depends_on=[waiting]).id

    def ids(jobs: list[Job]) -> set[str]:
        return {job.id for job in jobs}

    assert ids(queue.get_waiting()) == {waiting, urgent}
    assert ids(queue.get_prioritized()) == {urgent}
    assert ids(queue.get_delayed()) == {delayed}
    assert ids(queue.get_active()) == {active}
    assert ids(queue.get_completed()) == {completed}
    assert ids(queue.get_failed()) == {failed}
    assert ids(queue.get_waiting_children()) == {blocked}
    union = queue.get_jobs(["waiting", "prioritized", "delayed"])
    assert sorted(job.id for job in union) == sorted([waiting, urgent, delayed])
    assert len(queue.get_jobs()) == 7
    assert len(queue.get_jobs(start=2, end=5)) == 3
    assert queue.get_job_counts() == {
        "waiting": 2,
        "prioritized": 1,
        "delayed": 1,
        "active": 1,
        "completed": 1,
        "failed": 1,
        "paused": 0,
        "waiting-children": 1,
    }
    assert [queue.get_waiting_count(), queue.get_prioritized_count(), queue.get_delayed_count()] == [2, 1, 1]
    assert [queue.get_active_count(), queue.get_completed_count(), queue.get_failed_count()] == [1, 1, 1]
    assert queue.get_waiting_children_count() == 1
    assert queue.count() == 7
    assert queue.get_counts_per_priority() == {"0": 2, "9": 1}


# ------------------------------------------------------------------ control


def test_pause_holds_the_jobs_back(queue: Queue) -> None:
    queue.add("x")
    queue.pause()
    assert queue.is_paused()
    assert queue.connection.call({"cmd": "PULL", "queue": queue.name})["job"] is None
    assert queue.get_waiting_count() == 1
    queue.resume()
    assert not queue.is_paused()
    take(queue)


def test_drain_clean_and_obliterate_remove_jobs(queue: Queue) -> None:
    queue.add_bulk([{"name": "a"}, {"name": "b", "delay": 60_000}])
    assert queue.drain() == 2
    queue.add_bulk([{"name": "c"}, {"name": "d"}, {"name": "e"}])
    complete_next(queue)
    assert queue.clean(60_000, state="completed") == 0
    eventually(lambda: queue.clean(0, limit=10, state="completed") == 1)
    bury_next(queue)
    assert queue.clean(0, state="failed") == 1
    queue.obliterate()
    assert queue.count() == 0


def test_clean_without_a_state_spares_only_active_jobs(queue: Queue) -> None:
    queue.add_bulk([{"name": "done"}, {"name": "broken"}, {"name": "running"}, {"name": "ready"}])
    queue.add("later", delay=60_000)
    complete_next(queue)
    bury_next(queue)
    active = str(take(queue)["id"])
    removed = 0

    def clean_all() -> bool:
        # Repeated because a job is old enough for a grace of 0 ms only once the clock has moved on.
        nonlocal removed
        removed += queue.clean(0)
        return removed == 4

    eventually(clean_all)
    assert [job.id for job in queue.get_jobs()] == [active]


def test_remove_and_discard(queue: Queue) -> None:
    gone, dead = queue.add("gone"), queue.add("dead")
    queue.remove(gone.id)
    assert queue.get_state(gone.id) == "unknown"
    with pytest.raises(CommandError, match="Job not found or cannot be cancelled"):
        queue.cancel(gone.id)
    queue.discard(dead.id)
    assert queue.get_state(dead.id) == "failed"


def test_promote_and_change_delay(queue: Queue) -> None:
    first, *others = queue.add_bulk([{"name": "x", "delay": 60_000} for _ in range(4)])
    queue.promote_job(first)
    assert queue.get_state(first) == "waiting"
    assert queue.promote_jobs(2) == 2
    assert queue.promote_jobs() == 1
    queue.change_job_delay(others[0], 60_000)
    assert queue.get_state(others[0]) == "delayed"
    with pytest.raises(CommandError, match="Job not found or not delayed"):
        queue.promote_job(first)


def test_retry_brings_jobs_back(queue: Queue) -> None:
    queue.add_bulk([{"name": "x"} for _ in range(4)])
    failed = [bury_next(queue) for _ in range(3)]
    completed = complete_next(queue, "old")
    queue.retry_job(failed[0])
    assert queue.get_state(failed[0]) == "waiting"
    assert queue.retry_jobs("failed", count=1) == 1
    assert queue.retry_jobs() == 1
    assert queue.retry_completed(completed) == 1
    assert queue.get_result(completed) is None
    complete_next(queue)
    assert queue.retry_jobs("completed") == 1
    assert queue.get_waiting_count() == 4


def test_stored_jobs_can_be_changed(queue: Queue) -> None:
    first, second = queue.add("first", {"v": 1}), queue.add("second")
    queue.update_job_data(first.id, {"name": "first", "v": 2})
    queue.change_job_priority(second.id, 5, lifo=False)
    changed = queue.get_job(first.id)
    assert changed is not None
    assert changed.data["v"] == 2
    assert str(take(queue)["id"]) == second.id


def test_active_job_moves_with_its_lease(queue: Queue) -> None:
    job = queue.add("x")
    held = take(queue, owner="me", lockTtl=20_000)
    queue.extend_job_lock(job.id, held["token"], 60_000)
    with pytest.raises(CommandError, match="Invalid or expired lock token for job"):
        queue.move_job_to_completed(job.id, token="wrong")
    with pytest.raises(CommandError, match="Lock token required for job"):
        queue.move_job_to_delayed(job.id, 60_000)
    queue.move_job_to_completed(job.id, {"ok": 1}, token=held["token"])
    assert queue.get_result(job.id) == {"ok": 1}


def test_active_job_without_lease_moves_freely(queue: Queue) -> None:
    job = queue.add("x", attempts=3, backoff=60_000)
    take(queue)
    queue.move_job_to_delayed(job.id, 60_000)
    assert queue.get_state(job.id) == "delayed"
    queue.move_job_to_wait(job.id)
    take(queue)
    queue.move_job_to_failed(job.id, "try again")
    assert queue.get_state(job.id) == "delayed"


def test_progress_and_logs(queue: Queue) -> None:
    job = queue.add("x")
    take(queue)
    queue.update_job_progress(job.id, 30, "reading")
    assert queue.get_progress(job.id) == {"progress": 30, "message": "reading"}
    for level in (None, "warn", "error"):
        queue.add_job_log(job.id, f"level {level}", level)
    lines = [(line["level"], line["message"]) for line in queue.get_job_logs(job.id)]
    assert lines == [("info", "level None"), ("warn", "level warn"), ("error", "level error")]
    assert [line["level"] for line in queue.get_job_logs(job.id, 1, 1)] == ["warn"]
    queue.clear_job_logs(job.id, keep_logs=1)
    assert [line["level"] for line in queue.get_job_logs(job.id)] == ["error"]
    queue.clear_job_logs(job.id)
    assert queue.get_job_logs(job.id) == []


def test_wait_for_job_returns_result_fails_early_and_times_out(queue: Queue) -> None:
    good, bad, idle = queue.add("good"), queue.add("bad"), queue.add("idle")
    complete_next(queue, {"answer": 42})
    assert queue.wait_for_job(good.id) == {"answer": 42}
    assert queue.wait_job_until_finished(good.id, None, 1_000) == {"answer": 42}
    take(queue)
    failing = threading.Timer(0.2, queue.move_job_to_failed, (bad.id, UnrecoverableError("no")))
    failing.start()
    started = time.monotonic()
    with pytest.raises(CommandError, match="failed before completion"):
        queue.wait_for_job(bad.id, timeout_ms=9_000)
    assert time.monotonic() - started < 4
    with pytest.raises(CommandTimeoutError):
        queue.wait_for_job(idle.id, timeout_ms=100)


def test_job_object_acts_on_its_job(queue: Queue) -> None:
    job = queue.add("x", {"v": 1}, delay=60_000)
    assert job.get_state() == "delayed"
    job.change_delay(90_000)
    job.promote()
    job.change_priority(3)
    job.update_data({"name": "x", "v": 2})
    held = take(queue, owner="me")
    active = Job(held, queue.connection, held["token"])
    assert (active.priority, active.data["v"], active.attempts) == (3, 2, 0)
    active.update_progress(55)
    active.log("working")
    active.heartbeat()
    active.extend_lock(60_000)
    assert queue.get_progress(job.id)["progress"] == 55
    assert active.get_children_values() == {}
    queue.move_job_to_failed(job.id, UnrecoverableError("no"), token=held["token"])
    job.retry()
    assert job.get_state() == "waiting"
    job.move_to_delayed(60_000)
    assert job.get_state() == "delayed"
    job.discard()
    assert job.get_state() == "failed"
    other = queue.add("y")
    other.remove()
    assert other.get_state() == "unknown"


# ------------------------------------------------------------------ dead letters, limits, monitoring


def test_dead_letters(queue: Queue) -> None:
    queue.add_bulk([{"name": f"d{i}"} for i in range(3)])
    failed = [bury_next(queue, f"broken {i}") for i in range(3)]
    listed = queue.get_dlq()
    assert {job["id"] for job in listed} == set(failed)
    assert len(queue.get_dlq(count=2)) == 2
    assert listed[0]["data"]["name"].startswith("d")
    assert queue.retry_dlq(failed[1]) == 1
    assert queue.retry_dlq(count=1) == 1
    assert queue.purge_dlq() == 1
    assert queue.get_dlq() == []


def test_failed_job_keeps_the_python_traceback(queue: Queue) -> None:
    job = queue.add("x")
    take(queue)
    try:
        raise UnrecoverableError("broken pipe")
    except UnrecoverableError as error:
        queue.move_job_to_failed(job.id, error)
    failed = queue.get_job(job.id)
    assert failed is not None
    assert failed.stacktrace is not None
    assert failed.stacktrace[-1].endswith("UnrecoverableError: broken pipe")


def test_configurations_are_merged(queue: Queue) -> None:
    queue.set_dlq_config({"maxEntries": 5})
    assert queue.get_dlq_config() == {
        "autoRetry": False,
        "autoRetryInterval": 3_600_000,
        "maxAutoRetries": 3,
        "maxAge": 604_800_000,
        "maxEntries": 5,
    }
    queue.set_stall_config({"maxStalls": 7})
    assert queue.get_stall_config() == {
        "enabled": True,
        "stallInterval": 30_000,
        "maxStalls": 7,
        "gracePeriod": 5_000,
    }


def test_concurrency_and_rate_limit(queue: Queue) -> None:
    queue.add_bulk([{"name": "x"} for _ in range(4)])

    def next_job() -> Any:
        return queue.connection.call({"cmd": "PULL", "queue": queue.name})["job"]

    queue.set_global_concurrency(1)
    assert next_job() is not None
    assert next_job() is None
    queue.remove_global_concurrency()
    assert next_job() is not None
    queue.set_global_rate_limit(1, 1_000)
    assert next_job() is not None
    assert next_job() is None
    queue.remove_global_rate_limit()
    assert next_job() is not None


def test_stats_metrics_and_queue_list(queue: Queue) -> None:
    queue.add("x")
    stats = queue.get_stats()
    figures = ("queued", "processing", "delayed", "dlq", "completed", "uptime", "pushPerSec", "pullPerSec")
    assert all(isinstance(stats[figure], int | float) for figure in figures)
    assert stats["queued"] >= 1
    metrics = queue.get_metrics()
    assert metrics["totalPushed"] >= 1
    entry = next(info for info in queue.list_queues() if info["name"] == queue.name)
    assert (entry["waiting"], entry["active"], entry["paused"]) == (1, 0, False)


def test_ping_ready_and_hello(queue: Queue) -> None:
    queue.wait_until_ready()
    assert queue.ping()
    hello = queue.connection.hello()
    assert (hello["server"], "pipelining" in hello["capabilities"]) == ("bunqueue", True)
    queue.disconnect()
    assert not queue.ping()


# ------------------------------------------------------------------ cron and webhooks


def test_job_scheduler_is_stored_listed_and_removed(queue: Queue) -> None:
    name = f"{queue.name}-cron"
    queue.add_cron(name, "*/5 * * * *", {"k": 1}, tz="UTC")
    cron = queue.get_job_scheduler(name)
    assert cron is not None
    assert (cron["queue"], cron["schedule"], int(cron["nextRun"]) % 300_000) == (queue.name, "*/5 * * * *", 0)
    queue.every(f"{name}-2", 60_000, limit=3)
    assert {entry["name"] for entry in queue.get_job_schedulers()} == {name, f"{name}-2"}
    assert queue.get_job_schedulers_count() == 2
    queue.remove_job_scheduler(name)
    queue.remove_job_scheduler(f"{name}-2")
    assert queue.get_job_scheduler(name) is None
    with pytest.raises(CommandError, match="Cron job not found"):
        queue.remove_job_scheduler(name)


def test_job_scheduler_fires_with_its_template(queue: Queue) -> None:
    name = f"{queue.name}-cron"
    opts = {"priority": 6, "attempts": 9, "remove_on_complete": True}
    queue.upsert_job_scheduler(
        name, {"every": 60_000, "immediately": True}, {"name": "tick", "data": {"n": 1}, "opts": opts}
    )
    eventually(lambda: queue.get_waiting_count() == 1)
    job = Job(take(queue))
    assert (job.name, job.data["n"], job.priority, job.max_attempts) == ("tick", 1, 6, 9)
    queue.move_job_to_completed(job.id)
    assert queue.get_state(job.id) == "unknown"
    queue.remove_job_scheduler(name)


def test_wrong_schedule_is_refused(queue: Queue) -> None:
    with pytest.raises(CommandError, match="Invalid cron expression"):
        queue.add_cron(f"{queue.name}-cron", "not a schedule")


def test_webhooks_are_added_listed_switched_and_removed(queue: Queue) -> None:
    webhook = queue.add_webhook(
        "https://example.com/hook", ["job.completed", "job.failed"], queue=queue.name, secret="hush"
    )
    assert webhook is not None

    def listed() -> dict[str, Any] | None:
        return next((hook for hook in queue.list_webhooks() if hook["id"] == webhook), None)

    hook = listed()
    assert hook is not None
    assert (hook["url"], hook["queue"], hook["enabled"]) == ("https://example.com/hook", queue.name, True)
    assert sorted(hook["events"]) == ["job.completed", "job.failed"]
    assert "hush" not in str(hook)
    queue.set_webhook_enabled(webhook, False)
    hook = listed()
    assert hook is not None
    assert hook["enabled"] is False
    queue.remove_webhook(webhook)
    assert listed() is None
    with pytest.raises(CommandError, match="Webhook not found"):
        queue.remove_webhook(webhook)


def test_webhook_to_the_own_machine_is_refused(queue: Queue) -> None:
    with pytest.raises(CommandError, match="Webhook URL cannot point to localhost"):
        queue.add_webhook("http://localhost:9/hook", ["job.completed"])
    with pytest.raises(CommandError, match="Invalid webhook event"):
        queue.add_webhook("https://example.com/hook", ["job.exploded"])


# ------------------------------------------------------------------ worker


def test_worker_processes_jobs_and_reports(queue: Queue, open_worker: OpenWorker) -> None:
    events: list[tuple[str, str | None]] = []

    def process(job: Job) -> dict[str, Any]:
        job.update_progress(50, "half")
        job.log("seen")
        return {"echo": job.data["i"]}

    worker = open_worker(queue, process, concurrency=3, autorun=False)
    for event in ("active", "progress", "completed"):
        worker.on(event, lambda job, *_, event=event: events.append((event, job.name)))
    worker.start()
    worker.wait_until_ready()
    ids = queue.add_bulk([{"name": f"j{i}", "data": {"i": i}} for i in range(10)])
    assert [queue.wait_for_job(job_id, 8_000) for job_id in ids] == [{"echo": i} for i in range(10)]
    eventually(lambda: len(events) == 30)
    assert {name for _, name in events} == {f"j{i}" for i in range(10)}
    assert queue.get_job_logs(ids[0])[0]["message"] == "seen"


def test_worker_batches_acks(queue: Queue, open_worker: OpenWorker) -> None:
    open_worker(queue, lambda job: job.data["i"] or None, concurrency=8, ack_batch={"max_size": 4, "max_delay_ms": 20})
    ids = queue.add_bulk([{"name": "x", "data": {"i": i}} for i in range(9)])
    eventually(lambda: queue.get_completed_count() == 9)
    assert [queue.get_result(job_id) for job_id in ids] == [None, 1, 2, 3, 4, 5, 6, 7, 8]


def test_worker_retries_and_gives_up(queue: Queue, open_worker: OpenWorker) -> None:
    seen: list[tuple[str | None, int]] = []

    def process(job: Job) -> str:
        seen.append((job.name, job.attempts))
        if job.name == "hopeless":
            raise UnrecoverableError("never")
        if job.attempts == 0:
            raise RuntimeError("once")
        return "second try"

    failures: list[str] = []
    worker = open_worker(queue, process)
    worker.on("failed", lambda job, error: failures.append(str(error)))
    flaky = queue.add("flaky", attempts=3, backoff={"type": "fixed", "delay": 50})
    hopeless = queue.add("hopeless", attempts=3)
    assert queue.wait_for_job(flaky.id, 8_000) == "second try"
    eventually(lambda: queue.get_state(hopeless.id) == "failed")
    eventually(lambda: sorted(failures) == ["never", "once"])
    assert sorted(seen) == [("flaky", 0), ("flaky", 1), ("hopeless", 0)]


def test_worker_failure_is_recorded_however_much_it_says(queue: Queue, open_worker: OpenWorker) -> None:
    def dive(depth: int) -> None:
        if not depth:
            raise ValueError("broken " + "x" * 2_000_000)
        (lambda: dive(depth - 1))()

    open_worker(queue, lambda job: dive(100))
    job = queue.add("x", stack_trace_limit=500, attempts=1)
    eventually(lambda: queue.get_state(job.id) == "failed")
    failed = queue.get_job(job.id)
    assert failed is not None
    assert failed.raw["failedReason"].startswith("broken xxx")
    assert failed.stacktrace is not None
    assert len(failed.stacktrace) == 100


def test_worker_renews_the_lease_of_a_long_job(queue: Queue, open_worker: OpenWorker) -> None:
    runs: list[str] = []

    def process(job: Job) -> str:
        runs.append(job.id)
        eventually(lambda: is_held_for(job.id, 1_500))
        return "done"

    def is_held_for(job_id: str, ms: float) -> bool:
        found = queue.connection.call({"cmd": "GetJob", "id": job_id})["job"]
        return bool(found["lastHeartbeat"] > found["startedAt"] + ms)

    open_worker(queue, process, concurrency=2, lock_ttl_ms=1_000, heartbeat_interval_s=0.2)
    ids = queue.add_bulk([{"name": "a"}, {"name": "b"}])
    assert [queue.wait_for_job(job_id, 9_000) for job_id in ids] == ["done", "done"]
    assert sorted(runs) == sorted(ids)


def test_worker_registers_and_leaves(queue: Queue, open_worker: OpenWorker) -> None:
    worker = open_worker(queue, lambda job: None, concurrency=6, name="tester")
    worker.wait_until_ready()

    def registered() -> list[dict[str, Any]]:
        return [entry for entry in queue.get_workers() if queue.name in entry["queues"]]

    eventually(lambda: len(registered()) == 1)
    assert (registered()[0]["name"], registered()[0]["concurrency"]) == ("tester", 6)
    assert queue.get_workers_count() >= 1
    assert worker.close(timeout=10)
    assert registered() == []


def test_worker_is_woken_by_a_push(queue: Queue, open_worker: OpenWorker) -> None:
    started = threading.Event()
    worker = open_worker(queue, lambda job: started.set(), poll_timeout_ms=8_000)
    worker.wait_until_ready()
    queue.add("wake")
    assert started.wait(6)  # before its question would have ended by itself


def test_worker_pause_and_resume(queue: Queue, open_worker: OpenWorker) -> None:
    worker = open_worker(queue, lambda job: "ran")
    worker.wait_until_ready()
    worker.pause()
    assert worker.is_paused()
    worker.resume()
    assert queue.wait_for_job(queue.add("x").id, 8_000) == "ran"
    assert worker.is_running()


# ------------------------------------------------------------------ simple mode


def test_simple_mode_routes_with_middleware_and_triggers(server: ServerAddress) -> None:
    calls: list[str] = []

    def around(job: Job, proceed: Callable[[], Any]) -> Any:
        calls.append(f"before {job.name}")
        return proceed()

    routes = {"greet": lambda job: f"hello {job.data['who']}", "follow": lambda job: job.data["said"]}
    app = Bunqueue(
        f"py-simple-{uuid.uuid4().hex[:8]}",
        routes=routes,
        host=server.host,
        port=server.port,
        poll_timeout_ms=200,
    )
    try:
        app.use(around)
        app.trigger({"on": "greet", "create": "follow", "data": lambda result, job: {"said": result}})
        assert app.queue.wait_for_job(app.add("greet", {"who": "you"}).id, 8_000) == "hello you"
        eventually(lambda: app.get_job_counts()["completed"] == 2)
        assert calls == ["before greet", "before follow"]
        assert app.count() == 2
    finally:
        app.close()


def test_simple_mode_deduplicates_batches_and_schedules(server: ServerAddress) -> None:
    sizes: list[int] = []

    def process(jobs: list[Job]) -> list[str]:
        sizes.append(len(jobs))
        return [str(job.name) for job in jobs]

    app = Bunqueue(
        f"py-batch-{uuid.uuid4().hex[:8]}",
        batch={"size": 3, "timeout": 2_000, "processor": process},
        deduplication={"ttl": 60_000},
        dlq={"maxEntries": 3},
        concurrency=3,
        host=server.host,
        port=server.port,
        poll_timeout_ms=200,
    )
    try:
        app.pause()
        assert app.add("a", {"v": 1}).id == app.add("a", {"v": 1}).id
        ids = app.add_bulk([{"name": "b"}, {"name": "c"}])
        app.resume()
        assert app.queue.wait_for_job(ids[1], 8_000) == "c"
        eventually(lambda: app.get_job_counts()["completed"] == 3)
        assert sizes == [3]
        assert app.queue.get_dlq_config()["maxEntries"] == 3
        app.cron(f"{app.name}-c", "0 9 * * *", {"k": 1}, timezone="Europe/Berlin")
        app.every(f"{app.name}-e", 60_000, limit=2)
        assert {cron["name"] for cron in app.list_crons()} == {f"{app.name}-c", f"{app.name}-e"}
        app.remove_cron(f"{app.name}-c")
        app.remove_cron(f"{app.name}-e")
        assert app.list_crons() == []
    finally:
        app.close()


def test_simple_mode_retries_inside_and_breaks_the_circuit(server: ServerAddress) -> None:
    attempts: list[int] = []

    def process(job: Job) -> str:
        attempts.append(job.attempts)
        if job.name == "flaky" and len(attempts) < 3:
            raise RuntimeError("not yet")
        if job.name == "bad":
            raise RuntimeError("bad")
        return "ok"

    app = Bunqueue(
        f"py-retry-{uuid.uuid4().hex[:8]}",
        processor=process,
        retry={"max_attempts": 3, "delay": 10, "strategy": "fixed"},
        circuit_breaker={"threshold": 1, "reset_timeout": 60_000},
        priority_aging={"interval": 50, "min_age": 1, "boost": 2},
        host=server.host,
        port=server.port,
        poll_timeout_ms=200,
    )
    try:
        assert app.queue.wait_for_job(app.add("flaky").id, 8_000) == "ok"
        assert attempts == [0, 0, 0]
        bad = app.add("bad", attempts=1)
        eventually(lambda: app.queue.get_state(bad.id) == "failed")
        eventually(lambda: app.get_circuit_state() == "open" and app.is_paused())
        waiting = app.add("left").id
        eventually(lambda: (job := app.get_job(waiting)) and job.priority >= 2)
        app.reset_circuit()
        assert app.queue.wait_for_job(waiting, 8_000) == "ok"
    finally:
        app.close()


# ------------------------------------------------------------------ flows


def test_flow_parent_waits_for_children_and_reads_their_results(open_queue: OpenQueue, flows: FlowProducer) -> None:
    parents, children = open_queue("parents"), open_queue("children")
    tree = flows.add(
        {
            "name": "report",
            "queueName": parents.name,
            "data": {"month": 5},
            "children": [
                {"name": "part", "queueName": children.name, "data": {"n": 1}},
                {"name": "part", "queueName": children.name, "data": {"n": 2}, "opts": {"attempts": 5}},
            ],
        }
    )
    first, second = (node.job.id for node in tree.children)
    assert parents.get_state(tree.job.id) == "waiting-children"
    child = children.get_job(second)
    assert child is not None
    assert (child.name, child.parent_id, child.max_attempts) == ("part", tree.job.id, 5)
    assert (child.data["__parentId"], child.data["__parentQueue"]) == (tree.job.id, parents.name)
    results = {complete_next(children, {"done": n}): {"done": n} for n in (1, 2)}
    assert set(results) == {first, second}
    eventually(lambda: parents.get_state(tree.job.id) == "waiting")
    expected = {f"{children.name}:{job_id}": result for job_id, result in results.items()}
    assert parents.get_children_values(tree.job.id) == expected
    assert parents.get_failed_children_values(tree.job.id) == {}
    assert parents.get_ignored_children_failures(tree.job.id) == {}


def test_flow_of_three_levels_is_read_back(queue: Queue, flows: FlowProducer) -> None:
    def node(name: str, *children: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "queueName": queue.name, "data": {}, "children": list(children)}

    tree = flows.add(node("root", node("middle", node("leaf")), node("side")))
    full = flows.get_flow(tree.job.id)
    assert full is not None
    assert [child.job.name for child in full.children] == ["middle", "side"]
    assert [leaf.job.name for leaf in full.children[0].children] == ["leaf"]
    shallow = flows.get_flow(tree.job.id, depth=1)
    assert shallow is not None
    assert shallow.children[0].children == []
    assert flows.get_flow("no-such-job") is None
    order = [Job(take(queue)) for _ in range(2)]
    assert sorted(str(job.name) for job in order) == ["leaf", "side"]


def test_flow_child_may_finish_before_its_parent_is_stored(server: ServerAddress, open_queue: OpenQueue) -> None:
    parents, children = open_queue("parents"), open_queue("children")

    class Patient(Connection):
        """Completes every child before the parent that names it is sent."""

        def call(self, command: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
            if command["cmd"] == "PUSH" and "childrenIds" in command:
                complete_next(children, "early")
            return super().call(command, timeout)

    connection = Patient(host=server.host, port=server.port)
    try:
        tree = FlowProducer(connection=connection).add(
            {
                "name": "parent",
                "queueName": parents.name,
                "children": [{"name": "child", "queueName": children.name}],
            }
        )
    finally:
        connection.close()
    assert parents.get_state(tree.job.id) == "waiting"
    key = f"{children.name}:{tree.children[0].job.id}"
    assert parents.get_children_values(tree.job.id) == {key: "early"}


def test_flow_failure_policy_reaches_the_parent(open_queue: OpenQueue, flows: FlowProducer) -> None:
    parents, children = open_queue("parents"), open_queue("children")

    def add(**policy: bool) -> str:
        child = {"name": "child", "queueName": children.name, "opts": policy}
        return flows.add({"name": "parent", "queueName": parents.name, "children": [child]}).job.id

    failing = add(fail_parent_on_failure=True)
    bury_next(children, "broke")
    eventually(lambda: parents.get_state(failing) == "failed")
    going_on = add(continue_parent_on_failure=True)
    child = bury_next(children, "broke")
    eventually(lambda: parents.get_state(going_on) == "waiting")
    assert parents.get_failed_children_values(going_on) == {f"{children.name}:{child}": "broke"}
    ignoring = add(ignore_dependency_on_failure=True)
    child = bury_next(children, "broke")
    eventually(lambda: parents.get_state(ignoring) == "waiting")
    assert parents.get_ignored_children_failures(ignoring) == {f"{children.name}:{child}": "broke"}


def test_flow_children_can_be_unlinked_and_removed(queue: Queue, flows: FlowProducer) -> None:
    def add() -> tuple[str, list[str]]:
        children = [{"name": name, "queueName": queue.name} for name in ("one", "two")]
        tree = flows.add({"name": "parent", "queueName": queue.name, "children": children})
        return tree.job.id, [node.job.id for node in tree.children]

    parent, children = add()
    for child in children:
        queue.remove_child_dependency(child)
    eventually(lambda: queue.get_state(parent) == "waiting")
    with pytest.raises(CommandError, match="has no parent"):
        queue.remove_child_dependency(children[0])
    parent, children = add()
    queue.remove_unprocessed_children(parent)
    assert [queue.get_state(child) for child in children] == ["unknown", "unknown"]


def test_flow_that_breaks_is_rolled_back(queue: Queue, flows: FlowProducer) -> None:
    children = [
        {"name": "good", "queueName": queue.name},
        {"name": "bad", "queueName": queue.name, "opts": {"attempts": 0}},
    ]
    with pytest.raises(CommandError, match="maxAttempts must be at least 1"):
        flows.add({"name": "parent", "queueName": queue.name, "children": children})
    assert queue.count() == 0


def test_flow_bulk_chain_and_fan_in(queue: Queue, flows: FlowProducer) -> None:
    trees = flows.add_bulk(
        [
            {
                "name": name,
                "queueName": queue.name,
                "children": [{"name": f"{name}-child", "queueName": queue.name}],
            }
            for name in ("a", "b")
        ]
    )
    assert [queue.get_state(tree.job.id) for tree in trees] == ["waiting-children"] * 2
    queue.obliterate()

    chain = flows.add_chain([{"name": f"step{i}", "queueName": queue.name} for i in range(3)])
    assert [complete_next(queue, i) for i in range(3)] == chain
    fan_in = flows.add_bulk_then(
        [{"name": "x", "queueName": queue.name}, {"name": "y", "queueName": queue.name}],
        {"name": "merge", "queueName": queue.name},
    )
    assert sorted(complete_next(queue, "part") for _ in range(2)) == sorted(fan_in["parallel_ids"])
    assert complete_next(queue, "whole") == fan_in["final_id"]
    values = queue.get_children_values(fan_in["final_id"])
    assert list(values.values()) == ["part", "part"]


# ------------------------------------------------------------------ authentication


def test_guarded_server_wants_the_token(guarded_server: ServerAddress) -> None:
    where: dict[str, Any] = {"host": guarded_server.host, "port": guarded_server.port}
    with Queue("py-guarded", token=AUTH_TOKEN, **where) as queue:
        assert queue.get_state(queue.add("x").id) == "waiting"
        queue.obliterate()
    with Queue("py-guarded", **where) as queue, pytest.raises(CommandError, match="Not authenticated"):
        queue.add("x")
    with (
        Queue("py-guarded", token="wrong", **where) as queue,
        pytest.raises(AuthError, match="Invalid token"),
    ):
        queue.add("x")
