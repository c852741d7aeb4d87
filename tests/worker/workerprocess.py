"""A real `headrace worker` in a process of its own, and what its jobs wrote down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.worker.steps import lines

ROOT = Path(__file__).resolve().parents[2]


class Mark(NamedTuple):
    what: str
    n: int
    pid: int
    attempt: int
    at: float


class Marks:
    """The file to which jobs of `program` write, and the queue they are in."""

    def __init__(self, path: Path, queue: str) -> None:
        self.path = path
        self.queue = queue

    def all(self) -> list[Mark]:
        parts = [line.split() for line in lines(self.path)]
        return [Mark(what, int(n), int(pid), int(attempt), float(at)) for what, n, pid, attempt, at in parts]

    def begun(self) -> list[int]:
        return [mark.n for mark in self.all() if mark.what == "begin"]

    def ended(self) -> list[int]:
        return [mark.n for mark in self.all() if mark.what == "end"]


class WorkerProcess:
    def __init__(self, url: str, marks: Marks, *flags: str, app: str = "tests.worker.program:app") -> None:
        self.url = url
        self.app = app
        self.marks = marks
        self.flags = flags
        self.log = marks.path.with_suffix(f".{time.monotonic_ns()}.log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> WorkerProcess:
        command = [sys.executable, "-m", "headrace", "worker", self.app, *self.flags]
        env = {"HEADRACE_URL": self.url, "HEADRACE_TEST_MARKS": str(self.marks.path)}
        env["HEADRACE_TEST_QUEUE"] = self.marks.queue
        env["PYTHONUNBUFFERED"] = ""  # as it is for most: what is printed waits in a buffer
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdout=log, stderr=log)
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def children(self) -> list[psutil.Process]:
        """Worker processes of a supervisor; helpers of Python's own are left out."""
        children = psutil.Process(self.pid).children()
        return [child for child in children if "headrace" in child.cmdline()]

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self) -> None:
        """kill -9: no goodbye."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self, timeout: float = 40.0) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def __enter__(self) -> WorkerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            for child in psutil.Process(self.pid).children(recursive=True):
                child.kill()
            self.kill()
