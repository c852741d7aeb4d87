"""A real `headrace serve` in a process of its own, for tests that look at it from outside."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from headrace.config import PROTOCOL_NAMES, Settings
from tests.ports import free_port
from tests.wireclient import Client

_CPU_CLOCK = 2
"""With a pid above it, the number of a clock: see clock_getcpuclockid(3)."""


class ServerProcess:
    """Can be killed and started again, on the same port and file. One that ends by itself fails the test."""

    def __init__(
        self, data_path: Path | str, *flags: str, env: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        """What it says goes to `log`, or is kept in a pipe for `stop` to return: enough for short lives."""
        self.data_path = data_path
        self.flags = flags
        self.env = env or {}
        self.log = log
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self.first_line = ""
        self._was_ended = False

    def start(self, timeout: float = 30.0) -> ServerProcess:
        command = [sys.executable, "-m", "headrace", "serve", "--host", "127.0.0.1", "--tcp-port", str(self.port)]
        command += ["--http-port", "0", "--data-path", str(self.data_path), *self.flags]
        with self.log.open("ab") if self.log else nullcontext(subprocess.PIPE) as err:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=err, text=True, env={**_environment(), **self.env}
            )
        self._was_ended = False
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        self.first_line = self.process.stdout.readline() if ready else ""
        if not self.first_line:
            self.process.kill()
            self._was_ended = True
            raise RuntimeError(f"the server did not start: {self._last_words(10)[1]}")
        self.port = int(self.first_line.split("://", 1)[1].split()[0].rsplit(":", 1)[1])
        return self

    def _last_words(self, timeout: float) -> tuple[str, str]:
        """What it has said since it listens, and its log."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=timeout)
        return out, err if self.log is None else self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def cpu_s(self) -> float:
        """The CPU time that it has spent, in all: what a busy machine does not change."""
        return time.clock_gettime(~self.pid << 3 | _CPU_CLOCK)

    def client(self, timeout: float = 10.0) -> Client:
        return Client(self.port, timeout=timeout)

    def kill(self) -> None:
        """kill -9: no goodbye."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self._was_ended = True
        self.process.communicate(timeout=10)

    def stop(self, timeout: float = 35.0, number: signal.Signals = signal.SIGTERM) -> str:
        """The server must end in order, with 0. What it wrote to its log."""
        assert self.process is not None
        self.process.send_signal(number)
        self._was_ended = True
        try:
            out, err = self._last_words(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert (self.process.returncode, out) == (0, ""), (out, err)
        assert "Traceback" not in err, err
        return err

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process is None or self._was_ended:
            return
        if kind is not None:
            self.kill()
        elif self.process.poll() is None:
            self.stop()
        else:
            _, log = self._last_words(10)
            raise AssertionError(f"the server ended by itself with {self.process.returncode}: {log}")


def _environment() -> dict[str, str]:
    """That of the developer, without settings that are meant for a server of his own."""
    names = {*PROTOCOL_NAMES, "HEADRACE_CONFIG", *(f"HEADRACE_{field.upper()}" for field in Settings.__struct_fields__)}
    return {name: value for name, value in os.environ.items() if name not in names}
