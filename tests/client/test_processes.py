"""The client and the life of processes and threads: forks, exits, kills, several owners, several loops."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.client.flow import FlowJob, FlowProducer
from headrace.client.queue import Queue, SyncQueue
from headrace.commands._base import Reply
from headrace.commands.monitoring import Ping
from headrace.connect import open_client, release_client
from headrace.errors import ClientClosed, InvalidCommand, StorageUnavailable
from tests.client.faces import reaches
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import until

PROLOGUE = """
import asyncio, os, sys, threading
from headrace.client.queue import Queue, SyncQueue
from headrace.connect import open_client, release_client
from headrace.errors import ClientClosed
client = open_client(sys.argv[1])
queue = SyncQueue(client, "q")
def quietly(ask):
    try:
        ask()
    except ClientClosed:
        pass
"""


def program(text: str) -> list[str]:
    """From Python 3.12 on every fork of a process with threads warns; that forks are safe is what is tested here."""
    return [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", PROLOGUE + textwrap.dedent(text)]


def run(text: str, url: str, code: int = 0) -> str:
    """What a program prints; nothing may be said on stderr."""
    done = subprocess.run([*program(text), url], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (code, ""), done.stderr
    return done.stdout


def jobs_in(url: str) -> list[Any]:
    client = open_client(url)
    try:
        return [job.data for job in SyncQueue(client, "q").get_jobs(limit=100_000)]
    finally:
        assert release_client(client)
        client.close().result(10)


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}"


# -- exits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "code"),
    [("", 0), ("sys.exit(3)", 3), ("asyncio.run(Queue(client, 'q').count())", 0), ("queue.job('x').state()", 0)],
)
def test_a_program_that_just_ends_keeps_what_was_acknowledged_and_says_nothing(
    file_url: str, ending: str, code: int
) -> None:
    run(f"for n in range(50): queue.add('n', n)\n{ending}", file_url, code)
    assert jobs_in(file_url) == list(range(50))


def test_a_program_that_just_ends_closes_its_file_in_order(file_url: str, tmp_path: Path) -> None:
    run("queue.add('n', 1, durable=True)", file_url)
    assert not (tmp_path / "jobs.db-wal").exists(), "the last one to close a file leaves no write-ahead log"


def test_a_program_that_ends_with_commands_under_way_ends(file_url: str) -> None:
    run(
        """
        job = queue.add("n", 1)
        threading.Thread(target=quietly, args=[job.result], daemon=True).start()
        async def many():
            tasks = [asyncio.create_task(Queue(client, "q").add("m", 2)) for _ in range(100)]
            await tasks[0]
        asyncio.run(many())
        """,
        file_url,
    )
    assert jobs_in(file_url)[0] == 1


def test_a_program_that_ends_while_its_server_is_away_ends(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "jobs.db") as server:
        run(
            f"""
            import signal
            queue.add("n", 1)
            os.kill({server.pid}, signal.SIGSTOP)
            threading.Thread(target=quietly, args=[queue.count], daemon=True).start()
            """,
            f"headrace://127.0.0.1:{server.port}",
        )
        os.kill(server.pid, signal.SIGCONT)


def test_a_killed_program_loses_nothing_that_was_acknowledged(file_url: str) -> None:
    acknowledged = 0
    for _ in range(scaled(3, 20)):
        text = """
        async def main():
            q = Queue(client, "q")
            while True:
                added = await asyncio.gather(*(q.add("n") for _ in range(20)))
                os.write(1, b"".join(job.id.encode() + b"\\n" for job in added))
        asyncio.run(main())
        """
        process = subprocess.Popen([*program(text), file_url], stdout=subprocess.PIPE)
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(200)]
        process.kill()
        seen += process.stdout.read().splitlines(keepends=True)
        process.wait(10)
        acknowledged += len([line for line in seen if line.endswith(b"\n")])
        client = open_client(file_url)
        assert SyncQueue(client, "q").count() >= acknowledged
        queue = SyncQueue(client, "q")
        assert all(queue.job(line.decode().strip()).state() == "waiting" for line in seen if line.endswith(b"\n"))
        assert release_client(client)
        client.close().result(10)


# -- owners ------------------------------------------------------------------------------------------------------------


def test_a_second_owner_of_a_file_is_told_who_has_it_and_what_to_do(file_url: str) -> None:
    client = open_client(file_url)
    SyncQueue(client, "q").add("n")
    printed = run(
        """
        from headrace.errors import StorageUnavailable
        try:
            queue.count()
        except StorageUnavailable as error:
            print(error)
        """,
        file_url,
    )
    assert f"in use by process {os.getpid()}" in printed
    assert "`headrace serve`" in printed
    assert release_client(client)
    client.close().result(10)


def test_a_file_in_a_folder_that_does_not_exist_is_an_error_with_its_name(tmp_path: Path) -> None:
    client = open_client(f"sqlite:///{tmp_path}/nowhere/jobs.db")
    with pytest.raises(StorageUnavailable, match=r"there is no folder .*nowhere"):
        SyncQueue(client, "q").count()
    (tmp_path / "nowhere").mkdir()
    assert SyncQueue(client, "q").count() == 0, "a failure is not kept"
    assert release_client(client)
    client.close().result(10)


def test_a_file_that_cannot_be_opened_is_the_same_error_each_time(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version=99")
    client = open_client(f"sqlite:///{path}")
    try:
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match="newer Headrace"):
                client.ask_blocking(Ping())
    finally:
        client.close().result(5)


def test_a_file_can_be_closed_and_opened_again(file_url: str) -> None:
    for number in range(5):
        client = open_client(file_url)
        assert SyncQueue(client, "q").count() == number
        SyncQueue(client, "q").add("n")
        assert release_client(client)
        client.close().result(10)


def test_closing_while_it_opens_leaves_nothing_open(file_url: str) -> None:
    for _ in range(10):
        client = open_client(file_url)
        opening = client.connect()
        client.close().result(10)
        assert release_client(client)
        opening.exception(10)
    assert jobs_in(file_url) == []


def test_asking_while_it_closes_is_answered_or_refused_but_opens_nothing(file_url: str) -> None:
    for _ in range(10):
        client = open_client(file_url)
        queue = SyncQueue(client, "q")
        queue.count()
        ends: list[object] = []

        def ask(queue: SyncQueue = queue, ends: list[object] = ends) -> None:
            try:
                while True:
                    queue.count()
            except ClientClosed as closed:
                ends.append(closed)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        client.close().result(10)
        for thread in threads:
            thread.join(10)
        assert len(ends) == 4
        assert release_client(client)
    assert jobs_in(file_url) == []


# -- forks -------------------------------------------------------------------------------------------------------------


FORK = """
queue.add("n", "parent before")
child = os.fork()
if child == 0:
    {child}
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
for number in range(50):
    queue.add("n", "parent after")
"""


def test_a_forked_child_talks_to_the_server_over_sockets_of_its_own(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "jobs.db") as server:
        url = f"headrace://127.0.0.1:{server.port}"
        run(FORK.format(child='queue.add("n", "child")'), url)
        found = jobs_in(url)
    assert (found.count("parent before"), found.count("child"), found.count("parent after")) == (1, 1, 50)


def test_a_forked_child_that_does_nothing_harms_nothing(file_url: str, tmp_path: Path) -> None:
    run(FORK.format(child="pass"), file_url)
    assert len(jobs_in(file_url)) == 51
    with ServerProcess(tmp_path / "other.db") as server:
        url = f"headrace://127.0.0.1:{server.port}"
        run(FORK.format(child="pass"), url)
        assert len(jobs_in(url)) == 51


def test_a_forked_child_of_an_owner_is_told_that_the_file_is_its_parents(file_url: str) -> None:
    child = """
    try:
        queue.count()
    except Exception as error:
        assert f"in use by process {os.getppid()}" in str(error), error
        client.close().result(5)
        sys.exit(0)
    sys.exit(1)
    """
    run(FORK.format(child=textwrap.indent(textwrap.dedent(child), "    ").strip()), file_url)
    assert len(jobs_in(file_url)) == 51


def test_a_file_is_free_when_its_owner_has_died_and_a_child_lives_on(file_url: str) -> None:
    text = """
    queue.add("n", 1)
    heard, told = os.pipe()
    if os.fork() == 0:
        os.write(told, b"alive")
        os.close(1)
        import signal
        signal.pause()
        os._exit(0)
    os.read(heard, 5)
    print(os.getpgid(0), flush=True)
    os.kill(os.getpid(), 9)
    """
    process = subprocess.Popen(
        [*program(text), file_url], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    group = int(process.stdout.readline())
    process.wait(10)
    try:
        assert jobs_in(file_url) == [1]
    finally:
        os.killpg(group, signal.SIGKILL)


def test_worker_processes_of_a_fork_pool_each_have_their_own_line(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "jobs.db") as server:
        url = f"headrace://127.0.0.1:{server.port}"
        run(
            """
            import multiprocessing
            queue.add("n", -1)
            def work(number):
                return queue.add("n", number).id
            with multiprocessing.get_context("fork").Pool(4) as pool:
                assert len(set(pool.map(work, range(40)))) == 40
            queue.add("n", -2)
            """,
            url,
        )
        assert sorted(jobs_in(url)) == list(range(-2, 40))


# -- threads and loops -------------------------------------------------------------------------------------------------


def test_many_loops_in_many_threads_use_one_client(shared_client: Client, queue: str) -> None:
    async def work(number: int) -> None:
        jobs = await asyncio.gather(*(Queue(shared_client, queue).add("n", number) for _ in range(20)))
        assert len({job.id for job in jobs}) == 20

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda number: asyncio.run(work(number)), range(32)))
    assert SyncQueue(shared_client, queue).count() == 640


def test_threads_that_ask_first_at_the_same_time_open_one_channel(file_url: str) -> None:
    for _ in range(10):
        client = open_client(file_url)
        start = threading.Barrier(8)

        def ask(client: Client = client, start: threading.Barrier = start) -> int:
            start.wait(10)
            return SyncQueue(client, "q").count()

        with ThreadPoolExecutor(8) as threads:
            assert [ask.result(10) for ask in [threads.submit(ask) for _ in range(8)]] == [0] * 8
        assert release_client(client)
        client.close().result(10)


def test_a_loop_that_ended_while_it_was_answered_harms_nobody(shared_client: Client, queue: str) -> None:
    async def abandon() -> None:
        for _ in range(50):
            asyncio.ensure_future(Queue(shared_client, queue).add("n"))  # noqa: RUF006 - nobody waits for it
        await asyncio.sleep(0)

    async def all_there() -> None:
        await reaches(Queue(shared_client, queue).count, 500)

    for _ in range(10):
        asyncio.run(abandon())
    asyncio.run(all_there())


def test_a_coroutine_face_and_a_thread_face_share_the_client(shared_client: Client, queue: str) -> None:
    async def main() -> int:
        await FlowProducer(shared_client).add(FlowJob(queue=queue, name="n"))
        return await asyncio.to_thread(SyncQueue(shared_client, queue).count)

    assert asyncio.run(main()) == 1


def test_one_odd_piece_of_work_does_not_stop_the_line(shared_client: Client, queue: str) -> None:
    def odd() -> None:
        raise ValueError("odd")

    asked = SyncQueue(shared_client, queue)
    asked.count()
    shared_client.line.post(odd)
    assert asked.count() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_work_whose_caller_gave_up_ends_without_a_word(shared_client: Client, fails: bool) -> None:
    line = shared_client.line
    complaints: list[Any] = []
    go_on = asyncio.Event()
    is_done = threading.Event()

    async def work() -> None:
        line.loop.set_exception_handler(lambda loop, context: complaints.append(context))
        await go_on.wait()
        line.loop.call_soon(line.loop.call_soon, is_done.set)  # behind whoever hears of the end
        if fails:
            raise ValueError("nobody asks")

    future = line.run(work)
    future.cancel()
    line.post(go_on.set)
    assert is_done.wait(10)
    gc.collect()
    line.loop.set_exception_handler(None)
    assert complaints == []


def test_a_blocking_call_on_the_line_itself_is_refused_instead_of_waiting_for_ever(shared_client: Client) -> None:
    async def on_the_line() -> Reply:
        return shared_client.ask_blocking(Ping())

    with pytest.raises(RuntimeError, match="would wait for ever"):
        shared_client.line.run(on_the_line).result(5)


async def test_a_listener_that_cannot_subscribe_leaves_no_connection_behind(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "jobs.db") as server:

        def connections() -> int:
            found = psutil.Process(server.pid).net_connections(kind="tcp")
            return sum(connection.status == psutil.CONN_ESTABLISHED for connection in found)

        client = open_client(f"headrace://127.0.0.1:{server.port}?pool_size=1")
        await Queue(client, "q").count()
        before = connections()
        assert before > 0
        for _ in range(5):
            with pytest.raises(InvalidCommand):
                await QueueEvents(client, "no spaces").__aenter__()
        await until(lambda: connections() == before)
        assert release_client(client)
        await asyncio.wrap_future(client.close())
