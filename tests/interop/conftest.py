"""Fixtures of the interop tests: a real server process and the official clients that talk to it.

Rules: the clients come from the package registries and are never patched; the server is the installed
`headrace` command in its own process, on a free loopback port, with a data file of its own. A server that
dies, or that writes a traceback, fails the run even when every client was content.

To add a theme: put `bun/<theme>.ts` next to the others (it prints one JSON line per check, see
`bun/check.ts`) and add its name to THEMES in `test_bun_client.py`.

While working on the tests themselves one can point them at a server that is already running, for example the
original one, to compare: HEADRACE_INTEROP_PORT names its port, HEADRACE_INTEROP_GUARDED_PORT the port of one
that demands the token AUTH_TOKEN. Unset, which is the normal case, the fixtures start their own.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

HERE = Path(__file__).parent
AUTH_TOKEN = "interop-token"
START_LIMIT_S = 20.0
STOP_LIMIT_S = 15.0


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens and what it wants to hear first."""

    port: int
    token: str | None = None
    host: str = "127.0.0.1"


BunRun = Callable[..., list[dict[str, object]]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAddress]:
    """An open server, shared by all tests: every test uses queue names of its own."""
    yield from _running_server("HEADRACE_INTEROP_PORT", tmp_path_factory.mktemp("open"), token=None)


@pytest.fixture(scope="session")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerAddress]:
    """A server that answers nobody without AUTH_TOKEN."""
    yield from _running_server("HEADRACE_INTEROP_GUARDED_PORT", tmp_path_factory.mktemp("guarded"), token=AUTH_TOKEN)


@pytest.fixture(scope="session")
def bun() -> BunRun:
    """Run one script of `bun/` against an address and return its checks; a crash or hang fails the test."""
    binary = _bun_binary()

    def run(script: str, address: ServerAddress, timeout_s: float = 120.0) -> list[dict[str, object]]:
        return _run_script(binary, HERE / "bun" / script, address, timeout_s)

    return run


def _running_server(variable: str, directory: Path, token: str | None) -> Iterator[ServerAddress]:
    borrowed = os.environ.get(variable)
    if borrowed:
        yield ServerAddress(int(borrowed), token)
        return
    address = ServerAddress(_free_port(), token)
    stderr_path = directory / "stderr.txt"
    with stderr_path.open("wb") as stderr:
        process = subprocess.Popen(
            _serve_command(address, directory), env=_serve_environment(), stdout=stderr, stderr=stderr
        )
        try:
            _await_ping(process, address, stderr_path)
            yield address
            _stop(process, stderr_path)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _serve_command(address: ServerAddress, directory: Path) -> list[str]:
    command = [sys.executable, "-m", "headrace", "serve", "--host", address.host]
    command += ["--tcp-port", str(address.port), "--data-path", str(directory / "interop.db")]
    if address.token is not None:
        command += ["--auth-tokens", address.token]
    return command


def _serve_environment() -> dict[str, str]:
    """The developer's environment without settings meant for his own server, and an HTTP port nobody uses."""
    settings = ("AUTH_TOKENS", "TLS_CERT_FILE", "TLS_KEY_FILE", "RATE_LIMIT_MAX_REQUESTS")
    inherited = {name: value for name, value in os.environ.items() if name not in settings}
    return {**inherited, "HTTP_PORT": str(_free_port())}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_ping(process: subprocess.Popen[bytes], address: ServerAddress, stderr_path: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"server left with {process.returncode} at start:\n{_tail(stderr_path)}")
        if _answers_ping(address):
            return
        time.sleep(0.02)
    pytest.fail(f"server did not answer a Ping within {START_LIMIT_S:.0f} s:\n{_tail(stderr_path)}")


def _answers_ping(address: ServerAddress) -> bool:
    """True as soon as any well-formed reply comes back: a guarded server says "Not authenticated"."""
    body = msgspec.msgpack.encode({"cmd": "Ping", "reqId": "1"})
    try:
        with socket.create_connection((address.host, address.port), timeout=1.0) as link:
            link.sendall(struct.pack(">I", len(body)) + body)
            with link.makefile("rb") as stream:
                (length,) = struct.unpack(">I", stream.read(4))
                return bool(msgspec.msgpack.decode(stream.read(length))["reqId"] == "1")
    except (OSError, struct.error):
        return False


def _stop(process: subprocess.Popen[bytes], stderr_path: Path) -> None:
    if process.poll() is not None:
        pytest.fail(f"server died with {process.returncode} during the tests:\n{_tail(stderr_path)}")
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"server ignored SIGTERM for {STOP_LIMIT_S:.0f} s:\n{_tail(stderr_path)}")
    if process.returncode != 0:
        pytest.fail(f"server answered SIGTERM with exit status {process.returncode}:\n{_tail(stderr_path)}")
    if b"Traceback (most recent call last)" in stderr_path.read_bytes():
        pytest.fail(f"server wrote a traceback:\n{_tail(stderr_path)}")


def _tail(path: Path, lines: int = 60) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _bun_binary() -> Path:
    # The bun package either keeps the binary in its platform package or moves it into its own folder.
    modules = HERE / "node_modules"
    for candidate in (modules / ".bin" / "bun", modules / "@oven" / "bun-linux-x64" / "bin" / "bun"):
        if candidate.exists():
            return candidate
    pytest.fail(f"no bun below {modules}: run `make setup`")


def _run_script(binary: Path, script: Path, address: ServerAddress, timeout_s: float) -> list[dict[str, object]]:
    command = [str(binary), str(script), address.host, str(address.port), address.token or ""]
    # A token left in the environment of the developer would be sent by the client on its own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("BQ_", "BUNQUEUE_"))}
    try:
        done = subprocess.run(
            command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{script.name} did not end within {timeout_s:.0f} s:\n{late.stdout!r}\n{late.stderr!r}")
    checks = _checks(done.stdout)
    failed = any(check["ok"] is not True for check in checks)
    if not checks or (done.returncode != 0) != failed:
        pytest.fail(f"{script.name} left with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return checks


def _checks(output: str) -> list[dict[str, object]]:
    lines = [line for line in output.splitlines() if line.startswith('{"check"')]
    return [msgspec.json.decode(line, type=dict[str, object]) for line in lines]
