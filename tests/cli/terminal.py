"""`headrace` as people and scripts run it: a process of its own, on pipes or on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "headrace"]
LIMIT_S = 30.0


@contextmanager
def warmed_up() -> Iterator[subprocess.Popen[str]]:
    """The process that forks for each command of a Cli."""
    command = [sys.executable, "-m", "tests.cli.warm"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10)


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """What was printed as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


def environment(url: str | None, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return {**inherited, "COLUMNS": "", "TZ": "UTC", **({"HEADRACE_URL": url} if url else {}), **more}


def _hear_ctrl_c() -> None:
    """A suite that runs in the background ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Cli:
    """Runs commands against one server."""

    def __init__(self, url: str | None, folder: Path, warm: subprocess.Popen[str]) -> None:
        self.url = url
        self.folder = folder
        self._warm = warm

    def __call__(self, *words: str, stdin: str = "", env: dict[str, str] | None = None) -> Done:
        paths = {name: self.folder / f".std{name}" for name in ("in", "out", "err")}
        paths["in"].write_text(stdin)
        request = {name: str(path) for name, path in paths.items()}
        more = {"words": words, "env": environment(self.url, **(env or {})), "folder": str(self.folder)}
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        print(json.dumps({**request, **more}), file=self._warm.stdin, flush=True)
        ready, _, _ = select.select([self._warm.stdout], [], [], LIMIT_S)
        assert ready, f"{words} did not end"
        done = Done(int(self._warm.stdout.readline()), paths["out"].read_text(), paths["err"].read_text())
        assert "Traceback" not in done.err, done.err
        return done

    def ok(self, *words: str, stdin: str = "", env: dict[str, str] | None = None) -> Done:
        done = self(*words, stdin=stdin, env=env)
        assert done.code == 0, f"{words}: exit code {done.code}\n{done.out}\n{done.err}"
        return done

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(self.url),
            cwd=self.folder,
            preexec_fn=_hear_ctrl_c,
        )

    def on_terminal(self, *words: str, columns: int = 80, rows: int = 24, **env: str) -> Terminal:
        return Terminal(list(words), environment(self.url, TERM="xterm-256color", **env), self.folder, columns, rows)


_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]|\r")


class Terminal:
    """A command on a pseudo-terminal; what it draws is collected, with and without colours and movements."""

    def __init__(self, words: list[str], env: dict[str, str], folder: Path, columns: int, rows: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *words], stdin=slave, stdout=slave, stderr=slave, env=env, cwd=folder, start_new_session=True
        )
        os.close(slave)
        self.raw = ""

    @property
    def text(self) -> str:
        return _CONTROLS.sub("", self.raw)

    def read(self, seconds: float = 0.2) -> bool:
        """Collect what there is; False when the terminal is closed."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # how a pseudo-terminal says that the other side is gone
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, words: str, seconds: float = LIMIT_S) -> str:
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} did not appear in:\n{self.text}"
            if not self.read() and words not in self.text:
                raise AssertionError(f"ended without {words!r}:\n{self.text}")
        return self.text

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self, seconds: float = LIMIT_S) -> int:
        """The exit code, once it has ended by itself."""
        deadline = time.monotonic() + seconds
        while self.read(0.1) and time.monotonic() < deadline:
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
        os.close(self._master)
