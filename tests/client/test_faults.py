"""What happens to callers when the server or the network between fails: with real processes and real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headrace.client.client import Client
from headrace.client.events import QueueEvents
from headrace.client.policy import LinkState
from headrace.client.queue import Queue
from headrace.commands.control import WaitJob
from headrace.commands.monitoring import Ping
from headrace.connect import open_client, release_client
from headrace.errors import (
    ClientClosed,
    CommandTimeout,
    ConnectionLost,
    InvalidCommand,
    NotAuthenticated,
    StorageUnavailable,
    Unreachable,
)
from tests.client.faces import complete
from tests.client.fakeserver import FakeServer, protocol_2
from tests.client.proxy import Proxy
from tests.integration.faultydisk import fill, small_disk
from tests.ports import free_port
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.waiting import until

T = TypeVar("T")


@asynccontextmanager
async def connected(port: int, scheme: str = "headrace", **options: Any) -> AsyncIterator[Client]:
    client = open_client(f"{scheme}://127.0.0.1:{port}", **options)
    try:
        yield client
    finally:
        if release_client(client):
            await asyncio.wrap_future(client.close())


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    """A server that a test may kill."""
    with ServerProcess(tmp_path / "jobs.db") as running:
        yield running


async def push_for_sure(queue: Queue, numbers: Iterable[int], acknowledged: list[int]) -> int:
    """Add jobs one by one under ids of their own, again and again until each was acknowledged. How often again."""
    again = 0
    for number in numbers:
        while True:
            try:
                await queue.add("n", number, job_id=f"{queue.name}-{number}")
                acknowledged.append(number)
                break
            except (ConnectionLost, CommandTimeout):
                again += 1
    return again


async def persistently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the connection holds."""
    for _ in range(100):
        with suppress(ConnectionLost):
            return await ask()
    raise AssertionError("no connection held")


async def push_under_fire(client: Client, name: str, each: int, fire: Callable[[list[int]], Awaitable[None]]) -> int:
    """Eight producers at once while `fire` goes on; at the end every job is there once."""
    queue = Queue(client, name)
    acknowledged: list[int] = []
    producers = [
        asyncio.create_task(push_for_sure(queue, range(start * each, start * each + each), acknowledged))
        for start in range(8)
    ]
    await fire(acknowledged)
    again = sum(await asyncio.gather(*producers))
    found = await persistently(lambda: queue.get_jobs(limit=100_000))
    assert sorted(job.data for job in found) == list(range(8 * each))
    return again


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_server_that_is_not_there_is_reported_at_once(host: str) -> None:
    port = free_port()
    client = open_client(f"headrace://{host}:{port}")
    began = time.monotonic()
    with pytest.raises(Unreachable, match=rf"^Cannot reach {host}:{port}: Connection refused$"):
        await Queue(client, "q").add("n")
    assert time.monotonic() - began < 2
    with pytest.raises(Unreachable, match="Connection refused"):
        await asyncio.to_thread(client.connect().result, 5)
    with pytest.raises(Unreachable, match="Connection refused"):
        async with QueueEvents(client, "q"):
            pass
    assert release_client(client)
    await asyncio.wrap_future(client.close())


async def test_a_host_that_does_not_exist_is_reported_at_once() -> None:
    client = open_client("headrace://no-such-host.invalid:6789")
    with pytest.raises(Unreachable, match=r"Cannot reach no-such-host.invalid:6789: .*[Nn]ame"):
        await Queue(client, "q").add("n")
    assert release_client(client)
    await asyncio.wrap_future(client.close())


async def test_a_client_finds_a_server_that_comes_later(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "jobs.db")
    with server:
        pass
    async with connected(server.port) as client:
        with pytest.raises(Unreachable):
            await Queue(client, "q").count()
        with server:
            assert await Queue(client, "q").count() == 0
            await asyncio.wrap_future(client.close())


async def test_what_is_under_way_when_the_server_dies_fails_at_once_and_what_waits_goes_on(
    fresh: ServerProcess,
) -> None:
    async with connected(fresh.port) as client:
        queue = Queue(client, "q")
        job = await queue.add("n")
        pending = asyncio.create_task(client.ask(WaitJob(id=job.id, timeout=30_000), 60))
        patient = asyncio.create_task(job.result(60))
        await until(lambda: sum(health.in_flight for health in client.health) == 2)
        began = time.monotonic()
        fresh.kill()
        with pytest.raises(ConnectionLost, match=r"^Connection lost$"):
            await pending
        assert time.monotonic() - began < 2
        waiting = [asyncio.create_task(queue.add("n", number)) for number in range(20)]
        await until(lambda: any(health.errors > 1 for health in client.health))
        assert not any(task.done() for task in waiting)
        fresh.start()
        assert len({added.id for added in await asyncio.gather(*waiting)}) == 20
        await complete(queue, "survived")
        assert await patient == "survived"
        assert {health.state for health in client.health} >= {LinkState.CONNECTED}


@pytest.mark.timeout(300)
async def test_a_server_killed_under_load_ends_with_every_job_once(fresh: ServerProcess) -> None:
    async def kill_and_restart(acknowledged: list[int]) -> None:
        for _ in range(scaled(3, 20)):
            enough = len(acknowledged) + 300  # a client that waits for its next try must get its turn
            await until(lambda enough=enough: len(acknowledged) >= enough)
            await asyncio.to_thread(fresh.kill)
            await asyncio.to_thread(fresh.start)

    async with connected(fresh.port) as client:
        again = await push_under_fire(client, "q", scaled(400, 5000), kill_and_restart)
        assert again > 0


@pytest.mark.timeout(60)
async def test_a_server_that_is_away_for_long_is_waited_for(fresh: ServerProcess) -> None:
    async with connected(fresh.port) as client:
        queue = Queue(client, "q")
        await queue.add("before")
        await asyncio.to_thread(fresh.stop)
        waiting = asyncio.create_task(queue.add("meanwhile"))
        blocked = asyncio.create_task(asyncio.to_thread(client.ask_blocking, WaitJob(id="x", timeout=0)))
        await asyncio.sleep(scaled(1, 10))
        assert not waiting.done()
        fresh.start()
        async with asyncio.timeout(45):
            await waiting
            with pytest.raises(Exception, match="Job not found"):
                await blocked
        assert await queue.count() == 2


async def test_commands_for_a_server_that_stays_away_fail_in_their_time(fresh: ServerProcess) -> None:
    async with connected(fresh.port, command_timeout=0.4) as client:
        queue = Queue(client, "q")
        await queue.count()
        fresh.kill()
        began = time.monotonic()
        with pytest.raises(ConnectionLost):
            await queue.count()
        with pytest.raises(Unreachable, match=r"No connection to 127.0.0.1:\d+ within 0.4 s"):
            await queue.count()
        assert time.monotonic() - began < 5


async def test_everyone_who_waits_on_a_lost_connection_gets_an_error_of_their_own(fresh: ServerProcess) -> None:
    """One error for all would show each of them the tracebacks of the others."""
    async with connected(fresh.port, pool_size=1) as client:
        job = await Queue(client, "q").add("j")
        waits = [partial(client.ask_blocking, WaitJob(id=job.id), 60) for _ in range(5)]
        threads = [asyncio.create_task(asyncio.to_thread(wait)) for wait in waits]
        tasks = [asyncio.create_task(client.ask(WaitJob(id=job.id), 60)) for _ in range(5)]
        await until(lambda: client.health[0].in_flight == 10)
        client.force_reconnect()
        errors = await asyncio.gather(*threads, *tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {ConnectionLost}
        assert len(set(map(id, errors))) == 10
        depths = [len(traceback.extract_tb(error.__traceback__)) for error in errors]  # type: ignore[union-attr]
        assert len(set(depths[:5])) == 1


@pytest.mark.parametrize("is_away_before", [True, False])
async def test_waiting_for_a_job_of_a_server_that_is_away_takes_no_longer_than_was_said(
    fresh: ServerProcess, is_away_before: bool
) -> None:
    async with connected(fresh.port) as client:
        job = await Queue(client, "q").add("j")
        began = time.monotonic()
        waiting = [asyncio.create_task(job.wait("3s")) for _ in range(1 - is_away_before)]
        await until(lambda: sum(link.in_flight for link in client.health) == len(waiting))
        fresh.kill()
        await until(lambda: all(link.state is not LinkState.CONNECTED for link in client.health))
        for late in [*waiting, asyncio.create_task(job.result("1s"))]:
            with pytest.raises(Unreachable, match=r"No connection to 127.0.0.1:\d+ within"):
                await late
        assert time.monotonic() - began < 20  # of the 30 that a command has


async def test_a_stopped_server_is_noticed_and_found_again(fresh: ServerProcess) -> None:
    async with connected(fresh.port, command_timeout=0.3, connect_timeout=0.5, ping_interval=0, pool_size=1) as client:
        queue = Queue(client, "q")
        job = await queue.add("n")
        pending = asyncio.create_task(client.ask(WaitJob(id=job.id, timeout=30_000), 60))
        await until(lambda: client.health[0].in_flight == 1)
        os.kill(fresh.pid, signal.SIGSTOP)
        try:
            for _ in range(3):
                with pytest.raises(CommandTimeout, match=r"Count got no answer within 0.3 s"):
                    await queue.count()
            with pytest.raises(ConnectionLost, match=r"^Connection lost$"):
                await asyncio.wait_for(pending, 1)
            with pytest.raises(Unreachable):
                await queue.count()
        finally:
            os.kill(fresh.pid, signal.SIGCONT)
        await until(lambda: client.health[0].state is LinkState.CONNECTED)
        assert await queue.count() == 1


async def test_pings_find_a_stopped_server_while_nobody_asks(fresh: ServerProcess) -> None:
    async with connected(fresh.port, command_timeout=0.1, ping_interval="100ms", pool_size=1) as client:
        await Queue(client, "q").count()
        await until(lambda: client.health[0].latency < 0.1)
        os.kill(fresh.pid, signal.SIGSTOP)
        try:
            await until(lambda: client.health[0].state is not LinkState.CONNECTED)
        finally:
            os.kill(fresh.pid, signal.SIGCONT)
        await until(lambda: client.health[0].state is LinkState.CONNECTED)
        assert client.health[0].errors >= 1


# -- the network -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(200)
async def test_connections_that_are_cut_all_the_time_lose_and_double_nothing(fresh: ServerProcess) -> None:
    async with Proxy(fresh.port) as proxy, connected(proxy.port) as client:

        async def cut_often(acknowledged: list[int]) -> None:
            for _ in range(scaled(20, 120)):
                await asyncio.sleep(scaled(100, 1000) / 1000)
                proxy.cut()

        again = await push_under_fire(client, "q", scaled(500, 10_000), cut_often)
        assert again > 0
        assert proxy.connections > 10


async def test_a_network_that_swallows_everything_is_noticed(fresh: ServerProcess) -> None:
    async with (
        Proxy(fresh.port) as proxy,
        connected(proxy.port, command_timeout=0.2, connect_timeout=0.3, ping_interval=0, pool_size=1) as client,
    ):
        queue = Queue(client, "q")
        await queue.add("n")
        proxy.swallow()
        for _ in range(3):
            with pytest.raises(CommandTimeout):
                await queue.count()
        await until(lambda: client.health[0].state is LinkState.RECONNECTING)
        proxy.pass_again()
        await until(lambda: client.health[0].state is LinkState.CONNECTED)
        assert await queue.count() == 1


async def test_a_forced_reconnect_makes_new_connections(fresh: ServerProcess) -> None:
    async with Proxy(fresh.port) as proxy, connected(proxy.port, pool_size=2) as client:
        queue = Queue(client, "q")
        for _ in range(4):
            await queue.count()
        assert proxy.connections == 2
        client.force_reconnect()
        await until(lambda: [health.errors for health in client.health] == [1, 1])
        await until(lambda: {health.state for health in client.health} == {LinkState.CONNECTED})
        assert proxy.connections == 4
        assert await queue.count() == 0


async def test_listeners_are_told_of_the_gap_and_hear_on(fresh: ServerProcess) -> None:
    async with Proxy(fresh.port) as proxy, connected(proxy.port) as client, connected(fresh.port) as direct:
        queue = Queue(direct, "q")
        async with QueueEvents(client, "q") as events:
            await queue.add("before")
            heard = aiter(events)
            assert (await anext(heard)).event_type == "pushed"
            await proxy.refuse()
            missed = await queue.add("missed")
            await proxy.open()
            gap = await asyncio.wait_for(anext(heard), 10)
            assert (gap.event_type, gap.queue) == ("gap", "q")
            assert abs(gap.timestamp / 1000 - time.time()) < 30
            after = await queue.add("after")
            event = await asyncio.wait_for(anext(heard), 10)
            assert (event.event_type, event.job_id) == ("pushed", after.id)
            assert missed.id != after.id


# -- who is let in -----------------------------------------------------------------------------------------------------


async def test_tokens_are_sent_when_they_are_wanted_and_changed_when_they_change(tmp_path: Path) -> None:
    token = "old"
    server = ServerProcess(tmp_path / "jobs.db", "--auth-tokens", "old")
    with server:
        async with connected(server.port) as nobody:
            with pytest.raises(NotAuthenticated, match="token="):
                await Queue(nobody, "q").count()
        async with connected(server.port, token="wrong") as stranger:
            with pytest.raises(NotAuthenticated, match="Invalid token"):
                await Queue(stranger, "q").count()
        async with connected(server.port, token=lambda: token) as client, connected(server.port, token="old") as fixed:
            queue = Queue(client, "q")
            await queue.add("n")
            await Queue(fixed, "q").count()
            server.stop()
            server.flags = ("--auth-tokens", "new")
            server.start()
            for late in (queue, Queue(fixed, "q")):
                with pytest.raises(NotAuthenticated, match="Invalid token"):
                    await persistently(late.count)
            token = "new"
            client.force_reconnect()
            await until(lambda: any(health.state is LinkState.CONNECTED for health in client.health))
            assert await queue.count() == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


async def test_a_server_with_tls_is_talked_to_and_a_stranger_is_not(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=cert)
    with ServerProcess(tmp_path / "jobs.db", "--tls-cert", cert, "--tls-key", key) as server:
        async with connected(server.port, "headraces", tls=trusting) as client:
            queue = Queue(client, "q")
            await asyncio.gather(*(queue.add("n", number) for number in range(200)))
            assert await queue.count() == 200
            server.kill()
            waiting = [asyncio.create_task(queue.count()) for _ in range(5)]
            server.start()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(result == 200 or isinstance(result, ConnectionLost) for result in results)
            assert await queue.count() == 200
        async with connected(server.port, "headraces") as suspicious:
            with pytest.raises(Unreachable, match="certificate verify failed"):
                await Queue(suspicious, "q").count()
        async with connected(server.port, connect_timeout=1) as plain:
            with pytest.raises(Unreachable, match="Cannot reach"):
                await Queue(plain, "q").count()


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_closing_ends_whoever_waits(fresh: ServerProcess) -> None:
    async with connected(fresh.port) as client:
        queue = Queue(client, "q")
        job = await queue.add("n")
        waits = [asyncio.create_task(job.result(60)) for _ in range(3)]
        await until(lambda: sum(health.in_flight for health in client.health) == 3)
        await asyncio.wrap_future(client.close())
        for wait in waits:
            with pytest.raises(ClientClosed):
                await wait
        with pytest.raises(ClientClosed):
            await queue.count()
        assert client.health == []


async def test_a_full_disk_is_reported_by_an_engine_in_the_process_too(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        client = open_client(f"sqlite:///{disk / 'jobs.db'}")
        queue = Queue(client, "q")
        await queue.add("n")
        fill(disk / "ballast")
        with pytest.raises(StorageUnavailable, match="nothing was stored"):
            await queue.add("n", "x" * 5_000_000)
        assert release_client(client)
        await asyncio.wrap_future(client.close())


async def test_a_call_that_was_cancelled_before_it_was_sent_is_not_sent() -> None:
    """Else whoever tries again after each timeout adds a job for each try, once the server is back."""
    async with FakeServer(protocol_2) as server, connected(server.port, pool_size=1) as client:
        await client.ask(Ping())
        await server.__aexit__()
        await until(lambda: client.health[0].state is not LinkState.CONNECTED)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await Queue(client, "q").add("charge")
        server._server = await asyncio.start_server(server._serve, "127.0.0.1", server.port)
        await client.ask(Ping())
    assert "PUSH" not in {command["cmd"] for command in server.asked}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((Ping,), "is no command"),
        (("PING",), "is no command"),
        ((Ping(), "soon"), "timeout 'soon' is not understood"),
        ((Ping(), -1), "timeout must not be negative"),
    ],
)
async def test_what_cannot_be_asked_is_refused_instead_of_waiting_for_ever(wrong: Any, says: str) -> None:
    async with FakeServer(protocol_2) as server, connected(server.port) as client, asyncio.timeout(5):
        with pytest.raises(InvalidCommand, match=says):
            await client.ask(*wrong)
        with pytest.raises(InvalidCommand, match=says):
            await asyncio.to_thread(client.ask_blocking, *wrong)
        await client.ask(Ping(), "5s")
