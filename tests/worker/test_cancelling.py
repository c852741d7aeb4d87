"""Cancelling those who use the library, at any await: no job stays with a worker that is gone, no connection stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace import Headrace, JobContext, Worker
from headrace.errors import ClientClosed, HeadraceError
from headrace.frames import encode_frame
from tests.client.fakeserver import HELLO_2, FakeServer, protocol_2
from tests.waiting import eventually, until
from tests.worker.conftest import MakeApp


async def _cancel_until_it_ends(task: asyncio.Task[Any]) -> None:
    """As cancel scopes do it: every await is cut short."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled()


async def test_a_worker_that_is_cancelled_while_it_ends_keeps_no_job_and_takes_no_more(
    app: Headrace, queue: str
) -> None:
    begun = asyncio.Event()
    ends: list[str] = []

    async def handle(job: JobContext) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append(job.name)
            raise

    worker = Worker(app.client, queue, handle, concurrency=1)
    running = asyncio.create_task(worker.run(handle_signals=False))
    first, second = [await app.queue().add(name) for name in ("first", "second")]
    await asyncio.wait_for(begun.wait(), 10)
    await _cancel_until_it_ends(running)

    async def is_gone() -> bool:
        jobs = [await first.info(), await second.info()]
        return not await app.queue().workers() and [job.state for job in jobs] == ["waiting"] * 2

    await until(is_gone)
    assert ends == ["first"]
    assert (await first.info()).attempts == 0


@pytest.mark.parametrize("is_answered_late", [True, False])
async def test_a_worker_that_is_cancelled_while_it_begins_asks_for_nothing(is_answered_late: bool) -> None:
    """Its server has heard from the app, and lets the connection of the worker wait for an answer."""
    greetings: list[dict[str, Any]] = []

    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        if command["cmd"] == "Hello":
            greetings.append(command)
        return None if len(greetings) == 2 else protocol_2(command)

    async def handle(job: JobContext) -> None: ...

    async with FakeServer(answer) as server, Headrace(f"headrace://127.0.0.1:{server.port}?pool_size=1") as app:
        running = asyncio.create_task(Worker(app.client, "q", handle).run(handle_signals=False))
        await until(lambda: len(greetings) == 2)
        link = server.connections[1]
        running.cancel()
        if is_answered_late:
            link.write(encode_frame({**HELLO_2, "reqId": greetings[1]["reqId"]}))
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: link.is_closing())
    assert "PULLB" not in {command["cmd"] for command in server.asked}


async def test_a_listener_that_is_cancelled_while_it_begins_leaves_no_connection_behind() -> None:
    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        return None if command["cmd"] == "SubscribeEvents" else protocol_2(command)

    async with FakeServer(answer) as server, Headrace(f"headrace://127.0.0.1:{server.port}?pool_size=1") as app:
        listening = asyncio.create_task(app.events("q").__aenter__())
        await until(lambda: server.asked[-1]["cmd"] == "SubscribeEvents")
        listening.cancel()
        wish = server.asked[-1]
        server.connections[1].write(encode_frame({"ok": True, "reqId": wish["reqId"]}))
        with pytest.raises(asyncio.CancelledError):
            await listening
        await until(lambda: server.connections[1].is_closing(), 5)


def test_jobs_that_run_when_their_loop_ends_are_given_back(tmp_path: Path) -> None:
    """asyncio.run() cancels all tasks at its end, those of handlers, too. That is no failure of their jobs."""
    app = Headrace(f"sqlite:///{tmp_path}/jobs.db")
    begun: list[str] = []
    hears = threading.Event()

    async def on_loop(job: JobContext) -> None:
        begun.append(job.id)
        await asyncio.Event().wait()

    def in_thread(job: JobContext) -> None:
        begun.append(job.id)
        if job.wait_cancelled(20):
            hears.set()

    async def main() -> list[str]:
        jobs = [await app.queue(name).add("j", attempts=1) for name in ("loop", "thread")]
        workers = [Worker(app.client, "loop", on_loop), Worker(app.client, "thread", in_thread)]
        running.extend(asyncio.create_task(worker.run(handle_signals=False)) for worker in workers)
        await until(lambda: len(begun) == 2)
        return [job.id for job in jobs]

    running: list[asyncio.Task[None]] = []
    ids = asyncio.run(main())
    with app.sync() as face:
        found = [face.queue().job(job_id).info() for job_id in ids]
    assert [(job.state, job.attempts, job.failed_reason) for job in found] == [("waiting", 0, None)] * 2
    assert hears.wait(5)


def test_a_worker_may_be_stopped_from_another_thread() -> None:
    app = Headrace("memory://stopped-from-afar")

    async def handle(job: JobContext) -> None: ...

    worker = Worker(app.client, "q", handle)
    for _ in range(2):
        thread = threading.Thread(target=lambda: asyncio.run(worker.run(handle_signals=False)))
        thread.start()
        eventually(lambda: bool(app.sync().queue("q").workers()))
        worker.stop()
        thread.join(10)
        assert not thread.is_alive()
    app.sync().close()


async def test_a_worker_and_a_listener_end_with_their_app(make_app: MakeApp, queue: str) -> None:
    """Also where they have connections of their own."""
    app = make_app()
    listening, begun, goes_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(job: JobContext) -> None:
        begun.set()
        await goes_on.wait()

    async def listen() -> None:
        async with app.events(queue) as events:
            listening.set()
            async for event in events:
                heard.append(event.event_type)

    heard: list[str] = []
    worker = Worker(app.client, queue, handle)
    ends = [asyncio.create_task(worker.run(handle_signals=False)), asyncio.create_task(listen())]
    await worker.ready.wait()
    await listening.wait()
    await app.queue(queue).add("j")
    await begun.wait()
    await until(lambda: heard)
    await app.close()
    goes_on.set()
    async with asyncio.timeout(10):
        ended, listened = await asyncio.gather(*ends, return_exceptions=True)
    assert (type(ended), listened) == (ClientClosed, None)


async def test_a_signal_stops_all_workers_of_a_loop() -> None:
    async with Headrace("memory://signals") as app:
        workers = [Worker(app.client, name, lambda job: None) for name in ("a", "b")]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for worker in workers:
            await worker.ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            await asyncio.gather(*running)


async def test_a_second_signal_ends_a_worker_and_not_who_runs_it() -> None:
    begun = asyncio.Event()

    async def handle(job: JobContext) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> int:
        await worker.run()
        await asyncio.sleep(0)  # whoever is cancelled does not get further
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    async with Headrace("memory://signals-twice") as app:
        job = await app.queue("q").add("j")
        worker = Worker(app.client, "q", handle)
        running = asyncio.create_task(main())
        await begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(1.2)  # longer than an echo takes
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await running == 0
        info = await job.info()
        assert (info.state, info.attempts) == ("waiting", 0)


async def test_a_worker_that_gave_up_says_so_after_a_second_signal_too() -> None:
    begun = asyncio.Event()

    async def handle(job: JobContext) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with Headrace("memory://gave-up") as app:
        await app.queue("q").add("j")
        worker = Worker(app.client, "q", handle)
        running = asyncio.create_task(worker.run())
        await begun.wait()
        worker._give_up(ClientClosed())
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            await asyncio.sleep(1.2)  # longer than an echo takes
        async with asyncio.timeout(10):
            with pytest.raises(ClientClosed):
                await running


async def test_a_worker_leaves_signal_handlers_alone_that_were_set_after_its_own() -> None:
    async with Headrace("memory://signals-set-later") as app:
        worker = Worker(app.client, "q", lambda job: None)
        before = signal.getsignal(signal.SIGTERM)
        running = asyncio.create_task(worker.run())
        await worker.ready.wait()
        later = lambda number, frame: None  # noqa: E731
        signal.signal(signal.SIGTERM, later)
        try:
            worker.stop()
            await running
            assert signal.getsignal(signal.SIGTERM) is later
        finally:
            signal.signal(signal.SIGTERM, before)


async def test_signals_are_refused_in_other_threads_also_while_the_main_one_handles_them() -> None:
    async with Headrace("memory://signals-in-threads") as app:
        worker, other = (Worker(app.client, name, lambda job: None) for name in ("a", "b"))
        running = asyncio.create_task(worker.run())
        await worker.ready.wait()
        with pytest.raises(HeadraceError, match="in the main thread only"):
            await asyncio.to_thread(asyncio.run, other.run())
        worker.stop()
        await running


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_worker_puts_back_the_signal_handlers_that_it_found(run: Callable[..., Any]) -> None:
    heard: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.append, "the loop's")
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        worker = Worker(app.client, "q", lambda job: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            running = asyncio.create_task(worker.run())
            await worker.ready.wait()
            os.kill(os.getpid(), number)
            async with asyncio.timeout(10):
                await running
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: len(heard) == 2)

    app = Headrace("memory://signals-of-the-program")
    found = signal.signal(signal.SIGTERM, lambda number, frame: heard.append("the program's"))
    try:
        run(main())
    finally:
        signal.signal(signal.SIGTERM, found)
        app.sync().close()
    assert sorted(heard) == ["the loop's", "the program's"]


def test_a_process_that_a_handler_forks_can_be_terminated_and_leaves_the_worker_alone(tmp_path: Path) -> None:
    """That of multiprocessing inherits everything, and a pool of them ends with a SIGTERM to each. On uvloop, as with
    `headrace worker`: there a signal to the child reached the worker."""
    program = """
        import asyncio, multiprocessing, os, signal, uvloop
        from headrace import Headrace, Worker

        def terminated(job):
            ends = []
            for _ in range(20):
                child = multiprocessing.get_context("fork").Process(target=signal.pause)
                child.start()
                child.terminate()
                child.join(10)
                ends.append(child.exitcode)
            return ends

        async def main():
            async with Headrace("memory://") as app:
                worker = Worker(app.client, "q", terminated)
                running = asyncio.ensure_future(worker.run())
                for _ in range(2):
                    print(await (await app.queue("q").add("j", attempts=1)).result(timeout=30))
                os.kill(os.getpid(), signal.SIGTERM)
                await running

        uvloop.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (ran.stdout.splitlines(), ran.returncode) == ([str([-signal.SIGTERM] * 20)] * 2, 0), ran.stderr
