"""Fixtures of the interop tests: a real server process and the official clients that talk to it.

Rules: the clients come from the package registries and are never patched; the server is a process of its own. If
it dies or writes a traceback, that fails the run even when every client was content.

To add a theme: put `bun/<theme>.ts` next to the others (it prints one JSON line per check, see
`bun/check.ts`) and add its name to THEMES in `test_bun_client.py`.

While working on the tests themselves one can point them at a server that is already running, for example the
original one, to compare: HEADRACE_INTEROP_PORT names its port, HEADRACE_INTEROP_GUARDED_PORT the port of one
that demands the token AUTH_TOKEN. Unset, which is the normal case, the fixtures start their own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tests.serverprocess import ServerProcess

HERE = Path(__file__).parent
AUTH_TOKEN = "interop-token"


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
    found = subprocess.run([HERE.parents[1] / "tools/bun.sh"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr

    def run(script: str, address: ServerAddress, timeout_s: float = 120.0) -> list[dict[str, object]]:
        return _run_script(found.stdout.strip(), HERE / "bun" / script, address, timeout_s)

    return run


def _running_server(variable: str, directory: Path, token: str | None) -> Iterator[ServerAddress]:
    borrowed = os.environ.get(variable)
    if borrowed:
        yield ServerAddress(int(borrowed), token)
        return
    flags = () if token is None else ("--auth-tokens", token)
    with ServerProcess(directory / "interop.db", *flags, log=directory / "server.log") as running:
        yield ServerAddress(running.port, token)


def _run_script(binary: str, script: Path, address: ServerAddress, timeout_s: float) -> list[dict[str, object]]:
    command = [binary, str(script), address.host, str(address.port), address.token or ""]
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
