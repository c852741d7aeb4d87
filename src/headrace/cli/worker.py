"""`headrace worker module:app`: run the tasks of an app until SIGTERM or Ctrl-C.

With --processes N it is a supervisor: N workers of its own kind, started again when they die, stopped with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NoReturn

from headrace import notation
from headrace.cli.session import Exit, UsageError, advised
from headrace.config import LOG_LEVELS, split_list
from headrace.errors import HeadraceError
from headrace.signals import StopSignals

if TYPE_CHECKING:
    from headrace.tasks.app import Headrace

log: Final = logging.getLogger("headrace.worker")

_LOOK_EVERY: Final = 0.2
_PAUSE: Final = 1.0
"""Seconds before a process that ended is replaced: one that cannot start must not eat a core."""
_PR_SET_PDEATHSIG: Final = 1


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run the tasks of an app. On SIGTERM or Ctrl-C it takes no more jobs, lets running ones finish within "
        "--drain, and releases the rest at once. A second signal releases them now."
    )
    parser.add_argument("app", metavar="MODULE:APP", help="where the app is, for example shop.jobs:app")
    parser.add_argument("--queues", metavar="A,B", help="queues to work on (default: those of the app's tasks)")
    parser.add_argument("--concurrency", type=int, default=10, metavar="N", help="jobs at once (default: 10)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="worker processes (default: 1)")
    parser.add_argument(
        "--drain", default="25s", metavar="SPAN", help="time for running jobs to end after a stop (default: 25s)"
    )
    parser.add_argument(
        "--lease",
        default="30s",
        metavar="SPAN",
        help="how long a worker that falls silent keeps its jobs (default: 30s)",
    )
    parser.add_argument("--max-jobs-per-child", type=int, metavar="N", help="replace a handler process after N jobs")
    parser.add_argument("--check", action="store_true", help="load the app, show its tasks and exit")
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="(default: text)")
    parser.add_argument("--log-level", default="info", choices=LOG_LEVELS, help="(default: info)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.cli.logs import configure_logging
    from headrace.worker.logs import JobFields

    configure_logging(arguments.log_format, arguments.log_level, JobFields())
    if any(number is not None and number < 1 for number in (arguments.processes, arguments.max_jobs_per_child)):
        raise UsageError("--processes and --max-jobs-per-child must be at least 1")
    if arguments.processes > 1 and not arguments.check:
        return Supervisor(arguments.processes).run()
    app = load_app(arguments.app)
    queues = _queues(app, arguments)
    if not app.tasks:
        raise UsageError(
            f"{arguments.app} has no tasks: decorate functions with @app.task(), and name a module that imports them"
        )
    if arguments.check:
        show(app, queues)
        return 0
    return work(app, queues, arguments)


def _queues(app: Headrace, arguments: argparse.Namespace) -> list[str] | None:
    """Those that --queues names. One without tasks is more often a typo than meant."""
    if arguments.queues is None:
        return None
    queues = split_list(arguments.queues)
    if not queues:
        raise UsageError("--queues names no queue: write for example --queues mail,reports")
    known = {task.queue for task in app.tasks.values()}
    if strange := [queue for queue in queues if queue not in known]:
        there = ", ".join(sorted(known)) or "none"
        log.warning("no task of %s is of the queue %s; queues of its tasks: %s", arguments.app, strange[0], there)
    return queues


def load_app(place: str) -> Headrace:
    from headrace.tasks.app import Headrace

    module_name, _, name = place.partition(":")
    if not module_name or module_name.startswith("."):
        raise UsageError(f"{place!r} names no module: write for example shop.jobs:app")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):  # the module is there; what it imports is not
            raise _told_in_short(module_name, error) from None
        wanted = "shop.jobs:app"
        if module_name.endswith(".py"):
            path = os.path.basename(module_name) if os.path.isabs(module_name) else module_name
            wanted = f"{path.removesuffix('.py').replace('/', '.')}:{name or 'app'}"
        hint = f"write a module, not a file: {wanted}, and run this in the folder that has it"
        raise advised(UsageError(f"cannot import {module_name!r}: {error}"), hint) from None
    except HeadraceError:
        raise
    except Exception as error:
        raise _told_in_short(module_name, error) from None
    app = getattr(module, name or "app", None)
    if not isinstance(app, Headrace):
        names = [key for key, value in vars(module).items() if isinstance(value, Headrace)]
        hint = f"it has {module_name}:{names[0]}" if names else "name a variable that holds one: app = Headrace(url)"
        raise UsageError(f"{place!r} is not a Headrace app; {hint}")
    return app


def _told_in_short(module_name: str, error: Exception) -> HeadraceError:
    """What went wrong in somebody's module and where, without the way through the import system."""
    told = HeadraceError(f"cannot import {module_name!r}: {type(error).__name__}: {error}")
    where = ""
    if (frames := traceback.extract_tb(error.__traceback__)) and frames[-1].filename.endswith(".py"):
        where = f"in {frames[-1].filename}, line {frames[-1].lineno}; "
    return advised(told, f"{where}`python -c 'import {module_name}'` shows the way there")


def show(app: Headrace, queues: list[str] | None) -> None:
    print(notation.place(app.url))
    for task in sorted(app.tasks.values(), key=lambda task: (task.queue, task.name)):
        if queues is not None and task.queue not in queues:
            continue
        schedule = app.schedules.get(task.name)
        when = f"  {schedule.cron or f'every {schedule.every}'} {schedule.tz or ''}".rstrip() if schedule else ""
        print(f"  {task.queue:<20} {task.name:<30} {task.run_in}{when}")


def work(app: Headrace, queues: list[str] | None, arguments: argparse.Namespace) -> int:
    from headrace.client.line import new_loop

    worker = app.worker(
        queues,
        concurrency=arguments.concurrency,
        drain=arguments.drain,
        lease=arguments.lease,
        max_jobs_per_child=arguments.max_jobs_per_child,
    )

    async def main() -> None:
        try:
            await worker.run()
        finally:
            await app.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        # That of `asyncio.to_thread`: what a coroutine left to a thread belongs to its handler, too.
        helpers = ThreadPoolExecutor(thread_name_prefix=worker.thread_prefix)
        runner.get_loop().set_default_executor(helpers)
        runner.run(main())
        helpers.shutdown(wait=False, cancel_futures=True)
        if worker.has_handlers_left:
            _leave_at_once()
    return 0


def _leave_at_once() -> NoReturn:
    """The jobs of those who still run were given back. Waiting for what cannot be stopped would undo the deadline."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):  # what jobs printed
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


class Supervisor:
    """Keeps N processes of this command alive, unless they say that it is the command that is wrong."""

    def __init__(self, count: int) -> None:
        import ctypes

        self._system = ctypes.CDLL(None)
        self._code = Exit.OK
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._due = dict.fromkeys(range(count), 0.0)
        """Places without a process, and when the next one may be started there."""
        self._is_stopping = False
        self._stop_signals = StopSignals()
        self._stopped: set[int] = set()
        """Who was told to stop: an echo of the signal would end them in the midst of their goodbyes."""

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while self._children or not self._is_stopping:
            self._look_after()
            time.sleep(_LOOK_EVERY)
        return self._code

    def _look_after(self) -> None:
        now = time.monotonic()
        for slot, child in list(self._children.items()):
            if child.poll() is not None:
                self._bury(slot, now)
            elif self._is_stopping and slot not in self._stopped:
                self._stopped.add(slot)
                child.terminate()
        for slot in [slot for slot, due in self._due.items() if due <= now and not self._is_stopping]:
            self._start(slot)

    def _start(self, slot: int) -> None:
        del self._due[slot]
        command = [sys.executable, "-m", "headrace", *_for_one(sys.argv[1:])]
        # A group of their own: Ctrl-C reaches us alone, and we pass it on.
        self._children[slot] = subprocess.Popen(command, start_new_session=True, preexec_fn=self._end_with_us)

    def _end_with_us(self) -> None:
        """In the new process: when the supervisor is killed, it gets a SIGTERM. Else it would go on beside those of the
        next supervisor."""
        with contextlib.suppress(AttributeError):  # only Linux has it
            self._system.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def _bury(self, slot: int, now: float) -> None:
        child = self._children.pop(slot)
        self._due[slot] = now + _PAUSE
        if self._is_stopping:
            return
        if child.returncode == Exit.USAGE:  # it said why, and another one would say the same
            self._is_stopping, self._code = True, Exit.USAGE
            return
        log.error("worker process %d ended with code %s; starting another one", child.pid, child.returncode)

    def _stop(self, number: int, frame: object) -> None:
        """Passed on at once: the time between two signals tells the workers that the second one is no echo."""
        if self._stop_signals.hear(time.monotonic()):
            self._is_stopping = True
            for slot, child in list(self._children.items()):
                self._stopped.add(slot)
                child.terminate()


def _for_one(argv: list[str]) -> list[str]:
    """The same command line for one process: where a flag is given twice, however spelled, the last one counts."""
    options_end = argv.index("--") if "--" in argv else len(argv)
    return [*argv[:options_end], "--processes=1", *argv[options_end:]]
