"""Functions that run in processes of their own: those have to find them by their names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from headrace import Headrace, JobContext, RetryLater, UnrecoverableError, current_job

app = Headrace("memory://handlers", queue="processes")


def double(job: JobContext) -> int:
    return int(job.data) * 2


def come_back_in_an_hour(job: JobContext) -> None:
    raise RetryLater("the bank is closed", after="1h")


_word: ContextVar[str] = ContextVar("word", default="nothing")


def leave_word(job: JobContext) -> str:
    """What the job before has left, if that can be seen."""
    found = _word.get()
    _word.set(job.id)
    return found


def say_odd_things(job: JobContext) -> int:
    job.log("lost", 5)  # type: ignore[arg-type]
    job.progress("half")  # type: ignore[arg-type]
    job.log(str(job.data))
    return int(job.data)


def _undecorated() -> None: ...


known_by_another_name = app.task(run_in="process", attempts=3)(_undecorated)


@app.task(run_in="process")
def process_id() -> int:
    return os.getpid()


@app.task(run_in="process")
def parsed(number: int, *, ctx: JobContext) -> list[Any]:
    ctx.progress(50, "half")
    ctx.log("from afar")
    return [number + 1, ctx.attempt, current_job().id == ctx.id]


@app.task(run_in="process", attempts=3)
def hopeless() -> None:
    raise UnrecoverableError("it is not there")


@app.task(run_in="process", attempts=1)
def exits() -> None:
    sys.exit(3)


@app.task(run_in="process", attempts=1)
def shot() -> None:
    os.kill(os.getpid(), 9)


@app.task(run_in="process", timeout=0.5, attempts=1)
def overlong(marks: str) -> None:
    slow(marks)


@app.task(run_in="process")
def slow(marks: str) -> None:
    """Leaves a mark every 20 ms, for up to 30 s: a process that was killed leaves no more."""
    for _ in range(1500):
        with Path(marks).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.02)


@app.task(run_in="process")
def run_program(marks: str) -> None:
    """Waits for a program that takes a minute, and tells the numbers of both processes."""
    with subprocess.Popen(["sleep", "60"]) as program:
        Path(marks).write_text(f"{os.getpid()}\n{program.pid}\n")
        program.wait()
