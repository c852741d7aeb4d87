"""A broker that is started before its Valkey is ready: it waits for what passes by itself, and for nothing else."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace import Headrace
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.errors import StorageUnavailable
from headrace.events import Events
from headrace.workflows import Workflows
from tests.ports import free_port
from tests.valkeyserver import ValkeyServer
from tests.waiting import eventually

Mend = Callable[[ValkeyServer], object]


class Starting:
    """`headrace serve` that may not listen for a while."""

    def __init__(self, folder: Path, url: str) -> None:
        self._log = folder / "broker.log"
        command = [sys.executable, "-m", "headrace", "serve", "--tcp-port", "0", "--http-port", "0", "--backend", url]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def listens(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def starting(folder: Path, url: str) -> Iterator[Starting]:
    broker = Starting(folder, url)
    try:
        yield broker
    finally:
        broker.process.kill()
        broker.process.communicate()


@contextmanager
def refusing(folder: Path) -> Iterator[ValkeyServer]:
    server = ValkeyServer(folder)
    yield server
    server.stop()


class UnreadyServer(ValkeyServer):
    """Has started when it answers anything, if only why it does nothing."""

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as peer:
                peer.sendall(b"PING\r\n")
                return bool(peer.recv(1))
        except OSError:
            return False


@contextmanager
def loading(folder: Path) -> Iterator[ValkeyServer]:
    """It takes a minute to load what it had, unless it is told to hurry."""
    with ValkeyServer(folder) as before:
        pipe = before.client().pipeline()
        for n in range(1200):
            pipe.set(f"key-{n}", "x" * 2000)
        pipe.execute()
        before.client().save()
    slowly = ("--key-load-delay", "50000", "--loading-process-events-interval-bytes", "1024")
    with UnreadyServer(folder, *slowly) as server:
        yield server


def replica_of_nobody(folder: Path, stale: str) -> Iterator[ValkeyServer]:
    options = ("--replicaof", f"127.0.0.1 {free_port()}", "--replica-serve-stale-data", stale)
    with UnreadyServer(folder, *options) as server:
        yield server


@contextmanager
def cut_off(folder: Path) -> Iterator[ValkeyServer]:
    yield from replica_of_nobody(folder, "no")


@contextmanager
def replica(folder: Path) -> Iterator[ValkeyServer]:
    yield from replica_of_nobody(folder, "yes")


@contextmanager
def unformed(folder: Path) -> Iterator[ValkeyServer]:
    with UnreadyServer(folder, "--cluster-enabled", "yes", "--cluster-port", str(free_port())) as server:
        yield server


def hurry(server: ValkeyServer) -> object:
    return server.client().config_set("key-load-delay", 0)


def promote(server: ValkeyServer) -> object:
    return server.client().execute_command("REPLICAOF", "NO", "ONE")


def form(server: ValkeyServer) -> object:
    return server.client().execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)


@pytest.mark.parametrize(
    ("trouble", "scheme", "word", "mend"),
    [
        (refusing, "valkey", "cannot be reached", ValkeyServer.start),
        (loading, "valkey", "LOADING", hurry),
        (cut_off, "valkey", "MASTERDOWN", promote),
        (replica, "valkey", "READONLY", promote),
        (unformed, "valkey+cluster", "not formed", form),
    ],
)
def test_a_broker_waits_for_a_valkey_that_is_not_ready_yet(
    tmp_path: Path, trouble: Callable[[Path], AbstractContextManager[ValkeyServer]], scheme: str, word: str, mend: Mend
) -> None:
    with trouble(tmp_path / "valkey") as server, starting(tmp_path, f"{scheme}://127.0.0.1:{server.port}") as broker:
        eventually(lambda: word in broker.said)
        mend(server)
        assert "headrace listens on" in broker.listens()
        assert broker.said.count("waiting up to 60 s for Valkey") == 1
        assert broker.stop() == 0


def test_a_broker_that_waits_for_valkey_stops_when_told_to(tmp_path: Path) -> None:
    with starting(tmp_path, f"valkey://127.0.0.1:{free_port()}") as broker:
        eventually(lambda: "waiting" in broker.said)
        assert broker.stop() == 0
        assert "Traceback" not in broker.said


@pytest.mark.parametrize("users", [("--requirepass", "right"), ()])
def test_a_broker_with_a_wrong_password_ends_at_once_and_says_why(tmp_path: Path, users: tuple[str, ...]) -> None:
    with (
        UnreadyServer(tmp_path / "valkey", *users) as server,
        starting(tmp_path, f"valkey://:wrong@127.0.0.1:{server.port}") as broker,
    ):
        assert broker.process.wait(30) == 1
        assert "waiting" not in broker.said
        assert f"Valkey at 127.0.0.1:{server.port} refused:" in broker.said


@pytest.mark.parametrize("words", [("queues",), ("valkey", "init")])
def test_a_command_with_a_wrong_password_is_not_told_to_start_valkey(tmp_path: Path, words: tuple[str, ...]) -> None:
    with UnreadyServer(tmp_path, "--requirepass", "right") as server:
        command = [sys.executable, "-m", "headrace", *words, "--url", f"valkey://:wrong@127.0.0.1:{server.port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 4
    assert "WRONGPASS" in done.stderr
    assert "name user and password in the URL" in done.stderr
    assert "start it" not in done.stderr


@pytest.mark.parametrize(
    "start",
    [
        lambda url: Events(url).start(),
        lambda url: Workflows(url).start(),
        lambda url: Headrace(url).worker().run(handle_signals=False),
    ],
    ids=["events", "workflows", "worker"],
)
async def test_programs_do_not_wait_for_another_password_either(
    tmp_path: Path, start: Callable[[str], Coroutine[Any, Any, None]]
) -> None:
    with (
        UnreadyServer(tmp_path, "--requirepass", "right") as server,
        pytest.raises(StorageUnavailable, match="WRONGPASS"),
    ):
        await asyncio.wait_for(start(f"valkey://:wrong@127.0.0.1:{server.port}"), 10)


async def test_waiting_for_valkey_has_an_end() -> None:
    backend = ValkeyBackend(f"valkey://127.0.0.1:{free_port()}")
    async with asyncio.timeout(20):
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            await backend.wait_for_server(0.2)


def test_a_test_is_never_given_the_server_of_another_that_took_its_port(tmp_path: Path) -> None:
    """Two clusters would give one node its place twice: `Node config epoch is already non-zero`."""
    with (
        ValkeyServer(tmp_path / "other") as other,
        pytest.raises(AssertionError, match="Address already in use"),
        ValkeyServer(tmp_path / "late", port=other.port),
    ):
        raise AssertionError("it took the other's for its own")
