"""Worker processes from start to end: waiting for the server, draining, Ctrl-C, supervisors, the command itself."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from headrace import Headrace
from headrace.cli.main import _parser
from headrace.cli.worker import _for_one
from tests.serverprocess import ServerProcess
from tests.waiting import until
from tests.worker import program
from tests.worker.workerprocess import ROOT, Marks, WorkerProcess


def url_of(server: ServerProcess) -> str:
    return f"headrace://127.0.0.1:{server.port}"


@pytest.fixture
async def producer(server: ServerProcess, queue: str) -> AsyncIterator[Headrace]:
    async with Headrace(url_of(server), queue=queue, attempts=50, backoff=0) as app:
        yield app


async def add(producer: Headrace, n: int, seconds: float = 0.0, task: str = "work") -> str:
    return (await producer.queue().add(task, {"args": [n, seconds]})).id


async def test_a_worker_started_before_its_server_waits_for_it(tmp_path: Path, marks: Marks) -> None:
    server = ServerProcess(tmp_path / "late.db")
    with WorkerProcess(url_of(server), marks) as worker:
        await until(lambda: "trying again" in worker.said())
        with server:
            async with Headrace(url_of(server), queue=marks.queue) as app:
                job = await app.queue().add("work", {"args": [1]})
                assert await job.result(timeout=20) == 1
            assert worker.stop() == 0


async def test_a_worker_whose_server_never_comes_can_be_stopped(marks: Marks) -> None:
    with WorkerProcess("headrace://127.0.0.1:1", marks) as worker:
        await until(lambda: "trying again" in worker.said())
        assert worker.stop(timeout=10) == 0
        assert "Traceback" not in worker.said()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
async def test_a_stop_lets_running_jobs_end_and_takes_no_more(
    server: ServerProcess, producer: Headrace, marks: Marks, number: int
) -> None:
    with WorkerProcess(url_of(server), marks, "--concurrency", "2") as worker:
        for n in range(4):
            await add(producer, n, 0.7)
        await until(lambda: len(marks.begun()) == 2)
        worker.signal(number)
        assert worker.wait(20) == 0
    assert sorted(marks.ended()) == [0, 1]
    counts = await producer.queue().counts()
    assert (counts["completed"], counts["waiting"], counts["active"]) == (2, 2, 0)


TASKS = ["work", "work_uncancelled", "work_by_thread", "work_in_thread", "work_in_process"]


@pytest.mark.parametrize("task", TASKS)
async def test_what_runs_after_the_drain_is_given_back_at_once(
    server: ServerProcess, producer: Headrace, marks: Marks, task: str
) -> None:
    """The lease has 30 s to run: only a release explains that the next worker gets the job at once."""
    with WorkerProcess(url_of(server), marks, "--drain", "300ms") as worker:
        job_id = await add(producer, 1, 25.0, task)
        await until(lambda: marks.begun() == [1], 20)
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < 5
        assert "releases unfinished jobs: 1" in worker.said()
    info = await producer.queue().job(job_id).info()
    assert (info.state, info.attempts, info.stall_count) == ("waiting", 0, 0)
    assert not psutil.pid_exists(marks.all()[0].pid)
    with WorkerProcess(url_of(server), marks):
        await until(lambda: marks.begun() == [1, 1], 20)
    assert [mark.attempt for mark in marks.all()] == [1, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_second_signal_gives_back_at_once_what_runs(
    server: ServerProcess, producer: Headrace, marks: Marks, processes: str, number: int
) -> None:
    with WorkerProcess(url_of(server), marks, "--processes", processes) as worker:
        ids = [await add(producer, n, 25.0, task) for n, task in enumerate(("work", "work_in_thread"))]
        await until(lambda: sorted(marks.begun()) == [0, 1], 20)
        worker.signal(number)
        await until(lambda: "once more to stop now" in worker.said())
        await asyncio.sleep(1.2)  # longer than an echo takes
        worker.signal(number)
        began = time.monotonic()
        assert worker.wait(20) == 0
        assert time.monotonic() - began < 5
        assert "Traceback" not in worker.said()
    jobs = [await producer.queue().job(job_id).info() for job_id in ids]
    assert [(job.state, job.attempts, job.stall_count) for job in jobs] == [("waiting", 0, 0)] * 2


async def test_an_echo_of_a_signal_is_no_second_one(server: ServerProcess, producer: Headrace, marks: Marks) -> None:
    """systemd tells all processes of a service to stop, and a supervisor passes that on to its own."""
    with WorkerProcess(url_of(server), marks, "--processes", "2") as supervisor:
        await add(producer, 1, 2.0)
        await until(lambda: marks.begun() == [1] and len(supervisor.children) == 2, 20)
        for process in (psutil.Process(supervisor.pid), *supervisor.children):
            process.send_signal(signal.SIGTERM)
        assert supervisor.wait(20) == 0
    assert marks.ended() == [1]


@pytest.mark.parametrize("task", ["work_in_thread", "work_in_process"])
async def test_what_jobs_printed_is_not_lost(
    server: ServerProcess, producer: Headrace, marks: Marks, task: str
) -> None:
    """A worker does not wait for threads that go on after the drain, nor for processes."""
    with WorkerProcess(url_of(server), marks, "--drain", "300ms") as worker:
        for n, seconds in ((1, 0.0), (2, 25.0)):
            await add(producer, n, seconds, task)
        await until(lambda: sorted(marks.begun()) == [1, 2] and marks.ended() == [1], 20)
        assert worker.stop() == 0
        assert "job 1 ends" in worker.said()


async def test_a_signal_to_all_processes_of_a_worker_lets_a_handler_end_in_its_own(
    server: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    """As systemd stops a service, and Ctrl-C a foreground job."""
    with WorkerProcess(url_of(server), marks) as worker:
        job_id = await add(producer, 1, 1.0, "work_in_process")
        await until(lambda: marks.begun() == [1], 20)
        for number in (signal.SIGTERM, signal.SIGINT):
            psutil.Process(marks.all()[0].pid).send_signal(number)
        assert worker.stop() == 0
    assert marks.ended() == [1]
    assert await producer.queue().job(job_id).state() == "completed"


async def test_processes_of_a_supervisor_are_told_to_stop_once(server: ServerProcess, marks: Marks) -> None:
    """A second signal would end them in the midst of their goodbyes."""
    app = "tests.worker.program:app_with_lifespan"
    with WorkerProcess(url_of(server), marks, "--processes", "2", app=app) as supervisor:
        await until(lambda: len(marks.begun()) == 2, 20)
        assert supervisor.stop() == 0
    assert len(marks.ended()) == 2


async def test_a_supervisor_replaces_a_process_that_was_killed_and_stops_all(
    server: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    async def pids() -> set[int]:
        return {worker.pid for worker in await producer.queue().workers()}

    async def are_two() -> bool:
        return len(await pids()) == 2

    with WorkerProcess(url_of(server), marks, "--processes", "2", "--lease", "1s") as supervisor:
        await until(are_two, 20)
        before = await pids()
        assert before == {child.pid for child in supervisor.children}
        victim = next(iter(before))
        psutil.Process(victim).kill()

        async def is_replaced() -> bool:
            now = await pids()
            return len(now) == 2 and victim not in now

        await until(is_replaced, 20)
        assert f"worker process {victim} ended with code -9" in supervisor.said()
        await add(producer, 1)
        await until(lambda: marks.ended() == [1])
        children = await pids()
        assert supervisor.stop() == 0
        assert not any(psutil.pid_exists(pid) for pid in children)


async def test_processes_of_a_supervisor_that_is_killed_end_their_jobs_and_go(
    server: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    with WorkerProcess(url_of(server), marks, "--processes", "2") as supervisor:
        await add(producer, 1, 1.0)
        await until(lambda: marks.begun() == [1] and len(supervisor.children) == 2, 20)
        children = [child.pid for child in supervisor.children]
        supervisor.kill()
        await until(lambda: not any(psutil.pid_exists(pid) for pid in children), 20)
    assert marks.ended() == [1]


async def test_processes_of_handlers_end_with_a_worker_that_is_killed(
    server: ServerProcess, producer: Headrace, marks: Marks
) -> None:
    with WorkerProcess(url_of(server), marks) as worker:
        await add(producer, 1, 25.0, "work_in_process")
        await until(lambda: marks.begun() == [1], 20)
        worker.kill()
        await until(lambda: not psutil.pid_exists(marks.all()[0].pid))


# -- the command -------------------------------------------------------------------------------------------------------


def _worker_command(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "worker", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=cwd)


def test_check_shows_the_tasks_without_a_server() -> None:
    shown = _worker_command("tests.worker.program:app", "--check")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [line.split() for line in shown.stdout.splitlines()[1:]] == [
        ["marks", "work", "loop"],
        ["marks", "work_by_thread", "loop"],
        ["marks", "work_in_process", "process"],
        ["marks", "work_in_thread", "thread"],
        ["marks", "work_uncancelled", "loop"],
    ]
    assert set(program.app.tasks) == set(TASKS)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("nowhere:app", "cannot import 'nowhere'"),
        ("tests.worker.program:application", "is not a Headrace app; it has tests.worker.program:app"),
        ("tests.worker.steps:app", "is not a Headrace app"),
        ("empty:app", "empty:app has no tasks: decorate functions with @app.task(), and name a module that imports"),
        ("empty.py:app", "write a module, not a file: empty:app"),
        ("/srv/shop/empty.py", "write a module, not a file: empty:app"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--check",)], ids=["run", "check"])
def test_what_is_no_app_is_refused_with_a_hint(place: str, says: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("from headrace import Headrace\napp = Headrace('memory://')\n")
    refused = _worker_command(place, *flags, cwd=tmp_path if place.startswith("empty") else ROOT)
    assert refused.returncode == 2
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_module_that_lacks_another_one_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import not_installed\n")
    failed = _worker_command("shop:app", cwd=tmp_path)
    assert failed.returncode == 1
    first, second = failed.stderr.splitlines()
    assert first == "headrace: cannot import 'shop': ModuleNotFoundError: No module named 'not_installed'"
    assert f"in {tmp_path / 'shop.py'}, line 1; `python -c 'import shop'`" in second


@pytest.mark.parametrize(
    ("source", "says"), [("x = 1 / 0\n", "ZeroDivisionError: division by zero"), ("x = (\n", "(shop.py, line 1)")]
)
def test_a_module_that_cannot_be_imported_is_told_in_two_lines(source: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(source)
    failed = _worker_command("shop:app", cwd=tmp_path)
    assert failed.returncode == 1
    assert says in failed.stderr.splitlines()[0]
    assert len(failed.stderr.splitlines()) == 2


def test_several_processes_of_what_cannot_start_end_with_its_code() -> None:
    refused = _worker_command("nowhere:app", "--processes", "2")
    assert refused.returncode == 2
    assert "starting another one" not in refused.stderr


def test_a_check_of_a_command_with_several_processes_ends() -> None:
    assert _worker_command("tests.worker.program:app", "--processes", "2", "--check").returncode == 0


@pytest.mark.parametrize(
    "words",
    [("a:b", "--processes", "4"), ("--proc", "4", "a:b"), ("--processes=4", "--", "a:b"), ("a:b", "--process=4")],
)
def test_a_process_of_several_is_one(words: tuple[str, ...]) -> None:
    """However the number is spelled: a child that took it for its own would have children, too."""
    parse = _parser(["worker"]).parse_args
    assert parse(["worker", *words]).processes == 4
    assert parse(_for_one(["worker", *words])).processes == 1
