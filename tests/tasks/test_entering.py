"""Entering and leaving an app: it may be done often, from several places at once, and the last one out closes it."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from pathlib import Path

import pytest

from headrace import Headrace
from headrace.backends.local.index import Queue as LocalQueue
from headrace.client.job import decode_job
from headrace.commands.jobs import Acknowledge, PullBatch
from headrace.errors import ClientClosed, StorageUnavailable


async def test_an_app_can_be_entered_again_after_it_was_left(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    for count in (1, 2):
        async with app:
            await app.queue("q").add("job")
            assert (await app.queue("q").counts())["waiting"] == count


async def test_an_app_that_was_left_refuses_to_be_asked(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    async with app:
        pass
    with pytest.raises(ClientClosed, match="entering its app opens it again"):
        await app.queue("q").add("job")


def test_threads_may_use_the_sync_face_one_after_the_other(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    for count in (1, 2):
        with app.sync() as face:
            face.queue("q").add("job")
            assert face.queue("q").counts()["waiting"] == count


async def test_who_leaves_first_does_not_close_it_for_the_others() -> None:
    app = Headrace("memory://")
    async with app:
        with app.sync() as face:
            face.queue("q").add("job")
        async with app:
            pass
        assert (await app.queue("q").counts())["waiting"] == 1


async def test_an_app_that_is_closed_twice_or_used_again_leaves_others_of_its_url_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    async with Headrace(url) as other:
        app = Headrace(url)
        for _ in range(2):
            await app.close()
        async with app:
            await app.queue().add("job")
        await asyncio.to_thread(app.sync().close)
        assert await other.queue().count() == 1


async def test_who_could_not_enter_an_app_does_not_keep_it_open(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/later/jobs.db")
    with pytest.raises(StorageUnavailable):
        async with app:
            pass
    with pytest.raises(StorageUnavailable), app.sync():
        pass
    (tmp_path / "later").mkdir()
    async with app:
        await app.queue("q").add("job")
    with pytest.raises(ClientClosed):
        await app.queue("q").count()


def test_threads_that_come_and_go_at_the_same_time_find_it_open(tmp_path: Path) -> None:
    """As in a web server without a loop, whose handlers each write `with app.sync()`."""
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    errors: list[Exception] = []

    def come_and_go() -> None:
        try:
            for _ in range(20):
                time.sleep(random.random() / 100)
                with app.sync() as face:
                    face.queue("q").add("job")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    with app.sync() as face:
        assert face.queue("q").count() == 6 * 20


async def test_who_comes_while_the_last_one_leaves_waits_for_it(tmp_path: Path) -> None:
    """Its file belongs to one engine at a time, and one that is closed has to store what is under way."""
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db", queue="q")
    for _ in range(5):
        await app.__aenter__()
        adding = asyncio.create_task(app.queue().add("job", durable=True))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(app.__aexit__())
        await asyncio.sleep(0)
        async with app:
            await app.queue().count()
        await leaving
        await asyncio.wait([adding])


async def test_what_was_made_from_an_app_follows_it_when_it_is_entered_again(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db", queue="q")

    @app.task()
    async def hello() -> str:
        return "hello"

    queue, face, worker = app.queue(), app.sync(), app.worker()
    async with app:
        job = await queue.add("hello")
    for _ in range(2):
        async with app, worker:
            assert await job.result(timeout=10) == "hello"
            assert await queue.count() == await asyncio.to_thread(face.queue().count)


async def test_a_worker_of_an_app_that_was_left_says_so(tmp_path: Path) -> None:
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    with app.sync():
        pass
    async with asyncio.timeout(10):
        with pytest.raises(ClientClosed):
            await app.worker().run(handle_signals=False)


async def test_an_app_that_was_left_holds_none_of_its_jobs_in_memory(tmp_path: Path) -> None:
    """Jobs are not seen by the garbage collector: what refers to them in a circle would stay for ever."""
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    held: list[int] = []
    for _ in range(2):
        async with app:
            queue = app.queue("left-behind")
            await queue.add_many([("plain", n) for n in range(10)])
            await queue.add("late", delay="1h")
            await queue.add("keyed", dedup="key", job_id="mine")
            await queue.add("grouped", group="g")
            await (await queue.add("dead")).discard()
            pull = PullBatch(queue=queue.name, count=2, owner="worker", detach=True)
            pulled = await app.call(pull)
            await app.call(Acknowledge(id=decode_job(pulled.jobs[0]).id, token=pulled.tokens[0]))
            held.append(_queues_in_memory(queue.name))
        gc.collect()
        held.append(_queues_in_memory(queue.name))
    assert held == [1, 0, 1, 0]


def _queues_in_memory(name: str) -> int:
    """A job refers to its queue, so none is left when no queue is."""
    # By `type`: `isinstance` asks a weak proxy, among all objects of the process, for what it refers to.
    return sum(type(found) is LocalQueue and found.name == name for found in gc.get_objects())
