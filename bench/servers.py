"""The servers under test: how each is started, asked, weighed and stopped.

A `Contender` says how to start a server, a `RunningServer` is one that was started. Rules: every wait has a
bound, a server never outlives this process (the kernel kills it, whatever happens to us), and none inherits
settings from the caller's environment. To compare another server, write a function like `bunqueue()` below.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec.msgpack

from loadgen.alternate import Target

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 15.0
PR_SET_PDEATHSIG = 1


class BenchmarkFailed(Exception):
    """A measurement could not be made; the text says which and why."""


@dataclass(frozen=True)
class Contender:
    """How to start one kind of server. `command` gets (TCP port, HTTP port, data file or None for memory)."""

    name: str
    version: str
    command: Callable[[int, int, Path | None], list[str]]
    env: dict[str, str] = field(default_factory=dict)


def bunqueue() -> Contender:
    """The original server under bun, with its rate limit out of the way.

    Its limiter keeps one timestamp per request of the window: the 1 ms window is the cheapest setting for it.
    """
    package = ROOT / "tests/interop/node_modules/bunqueue"
    if not package.is_dir():
        raise BenchmarkFailed("bunqueue is not installed: run 'make setup'")
    bun = _output([str(ROOT / "tools/bun.sh")])
    version = json.loads((package / "package.json").read_text())["version"]

    def command(tcp_port: int, http_port: int, data_file: Path | None) -> list[str]:
        ports = ["--host", HOST, "--tcp-port", str(tcp_port), "--http-port", str(http_port)]
        storage = ["--data-path", str(data_file)] if data_file else []
        return [bun, str(package / "dist/main.js"), "start", *ports, *storage]

    limits = {"RATE_LIMIT_MAX_REQUESTS": "1000000000", "RATE_LIMIT_WINDOW_MS": "1"}
    return Contender("bunqueue", f"{version} (bun {_output([bun, '--version'])})", command, limits)


def headrace(*, with_http: bool = False) -> Contender:
    """This project's server with its default settings; HTTP only where it is what is measured."""
    script = Path(sys.executable).parent / "headrace"
    if not script.exists():
        raise BenchmarkFailed(f"{script} does not exist: run 'make setup'")

    def command(tcp_port: int, http_port: int, data_file: Path | None) -> list[str]:
        ports = ["--host", HOST, "--tcp-port", str(tcp_port), "--http-port", str(http_port if with_http else 0)]
        return [str(script), "serve", *ports, "--data-path", str(data_file or ":memory:")]

    python = ".".join(map(str, sys.version_info[:3]))
    return Contender("headrace", f"{importlib.metadata.version('headrace')} (Python {python})", command)


class RunningServer:
    """One server in a folder of its own: `start` it, and `stop` it whatever happens."""

    def __init__(self, contender: Contender, folder: Path, on_disk: bool) -> None:
        self.contender = contender
        self.data_folder = folder / "data"
        self.data_file = self.data_folder / "queue.db" if on_disk else None
        self._log_path = folder / "log"
        self.data_folder.mkdir(parents=True, exist_ok=True)
        self.port = 0
        self.http_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def target(self) -> Target:
        return Target(self.contender.name, self.port, (self.pid,))

    def start(self) -> None:
        """Start the process; it may need a while until it answers."""
        self.port = _free_port()
        self.http_port = _free_port()
        command = self.contender.command(self.port, self.http_port, self.data_file)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._log_path.parent,
                env=kept | self.contender.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # ctrl-C reaches us first, and we stop it in order
                preexec_fn=_die_with_parent,
            )

    def stop(self) -> None:
        """End the process, politely first."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End the process as a crash would."""
        self._running().kill()
        self._running().wait(STOP_LIMIT_S)

    def wait_for(self, request: dict[str, Any], answered: Callable[[dict[str, Any]], bool], limit_s: float) -> None:
        """Send `request` over and over until a reply satisfies `answered`."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self._running().poll() is not None:
                raise BenchmarkFailed(f"{self.contender.name} ended at start:\n{self._log_tail()}")
            try:
                if answered(ask(self.port, request, deadline - time.monotonic())):
                    return
            except OSError:
                pass
            time.sleep(0.001)
        raise BenchmarkFailed(f"{self.contender.name} did not answer {request['cmd']}:\n{self._log_tail()}")

    def wait_for_ping(self) -> None:
        """Return as soon as the server has answered its first Ping."""
        self.wait_for({"cmd": "Ping"}, lambda reply: reply.get("ok") is True, START_LIMIT_S)

    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise BenchmarkFailed(f"no memory figure for {self.contender.name}")

    def file_bytes(self) -> tuple[int, int]:
        """Bytes of the database (with its WAL) and of everything else in the data folder."""
        database = other = 0
        for path in self.data_folder.rglob("*"):
            if not path.is_file():
                continue
            if path.parent == self.data_folder and path.name in ("queue.db", "queue.db-wal"):
                database += path.stat().st_size
            elif not path.name.endswith("-shm"):
                other += path.stat().st_size
        return database, other

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise BenchmarkFailed(f"{self.contender.name} is not running")
        return self._process

    def _log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-2000:]


def ask(port: int, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """One request and its reply on a connection of its own."""
    body = msgspec.msgpack.encode(request)
    with socket.create_connection((HOST, port), timeout=max(limit_s, 0.01)) as connection:
        connection.sendall(len(body).to_bytes(4, "big") + body)
        with connection.makefile("rb") as stream:
            head = stream.read(4)
            reply = stream.read(int.from_bytes(head, "big"))
    if len(head) < 4 or not reply:
        raise ConnectionError("the server closed the connection without a reply")
    decoded: dict[str, Any] = msgspec.msgpack.decode(reply)
    return decoded


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
