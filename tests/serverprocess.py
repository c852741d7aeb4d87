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

from tests.wireclient import Client


class ServerProcess:
    """Starts on a free port, can be killed and started again on the same file."""

    def __init__(
        self, data_path: Path | str, *flags: str, env: dict[str, str] | None = None, log: Path | None = None
    ) -> None:
        """What it says goes to `log`, or is kept in a pipe for `stop` to return: enough for short lives."""
        self.data_path = data_path
        self.flags = flags
        self.env = env or {}
        self.log = log
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self.first_line = ""

    def start(self, timeout: float = 30.0) -> ServerProcess:
        command = [sys.executable, "-m", "headrace", "serve", "--host", "127.0.0.1", "--tcp-port", str(self.port)]
        command += ["--http-port", "0", "--data-path", str(self.data_path), *self.flags]
        with self.log.open("ab") if self.log else nullcontext(subprocess.PIPE) as err:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=err, text=True, env={**os.environ, **self.env}
            )
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while not self.first_line or not self.first_line.endswith("\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))
            line = self.process.stdout.readline() if ready else ""
            if not line:
                raise RuntimeError(f"the server did not start: {self.stop_and_read()}")
            self.first_line = line
        self.port = int(self.first_line.split("://", 1)[1].split()[0].rsplit(":", 1)[1])
        return self

    def stop_and_read(self) -> str:
        assert self.process is not None
        self.process.kill()
        return self._last_words(10)

    def _last_words(self, timeout: float) -> str:
        assert self.process is not None
        _, err = self.process.communicate(timeout=timeout)
        return err if self.log is None else self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def client(self, timeout: float = 10.0) -> Client:
        return Client(self.port, timeout=timeout)

    def kill(self) -> None:
        """kill -9: no goodbye."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=10)
        self.first_line = ""

    def stop(self, timeout: float = 35.0) -> str:
        """SIGTERM; the server must end by itself with 0. What it wrote to stderr."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        err = self._last_words(timeout)
        self.first_line = ""
        assert self.process.returncode == 0, err
        assert "Traceback" not in err, err
        return err

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        if kind is None:
            self.stop()
        else:
            self.kill()
