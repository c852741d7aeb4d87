"""Links and pools on real sockets, with a server that does what the test says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from headrace.client.link import Link
from headrace.client.policy import MAX_BLOCKING, MAX_WAITING, ConnectionOptions, LinkState
from headrace.client.pool import Pool
from headrace.commands.connection import SubscribeEvents
from headrace.commands.control import WaitJob
from headrace.commands.monitoring import Ping
from headrace.errors import (
    ClientClosed,
    CommandTimeout,
    ConnectionLost,
    HeadraceError,
    NotAuthenticated,
    Unreachable,
)
from headrace.frames import encode_frame
from tests.client.fakeserver import HELLO_1, FakeServer, protocol_2
from tests.serverprocess import ServerProcess
from tests.waiting import until


async def ask(channel: Any, command: Any = None, timeout: float = 5.0) -> Any:
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    channel.submit(command or Ping(), answered.set_result, timeout)
    async with asyncio.timeout(10):
        outcome = await answered
    if isinstance(outcome, HeadraceError):
        raise outcome
    return outcome


@asynccontextmanager
async def linked(server: FakeServer, kind: Any = Link, **options: Any) -> AsyncIterator[Any]:
    channel = kind(ConnectionOptions(host="127.0.0.1", port=server.port, **options))
    try:
        yield channel
    finally:
        await channel.close()


def deaf_but_for(*heard: str) -> Callable[[dict[str, Any]], Any]:
    return lambda command: protocol_2(command) if command["cmd"] in heard else None


async def test_a_link_begins_disconnected_and_is_connected_by_its_first_command() -> None:
    async with FakeServer(protocol_2) as server:
        async with linked(server) as link:
            assert link.state is LinkState.DISCONNECTED
            await ask(link)
            (health,) = link.health
            assert (health.state, health.errors, health.in_flight) == (LinkState.CONNECTED, 0, 0)
            assert 0 < health.latency < 5
        assert link.state is LinkState.DISCONNECTED
        with pytest.raises(ClientClosed):
            await ask(link)


async def test_a_link_that_was_closed_before_its_first_command_stays_closed() -> None:
    async with FakeServer(protocol_2) as server, linked(server) as link:
        await link.close()
        with pytest.raises(ClientClosed):
            await ask(link)
        assert server.connections == []


def test_a_link_can_be_closed_while_it_is_being_made() -> None:
    """With the loop that programs get: a transport of uvloop that was closed under our hands raises when it is used."""

    class Hasty(Link):
        """The server answers the greeting before the one who has asked for the connection learns that there is one."""

        end: asyncio.Task[None] | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.end = asyncio.create_task(self.close())
            time.sleep(0.1)

    async def begin_and_end(port: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        link = Hasty(ConnectionOptions(host="127.0.0.1", port=port, token="t"))
        link.begin()
        await until(lambda: link.end is not None and link.end.done())

    problems: list[dict[str, Any]] = []
    with ServerProcess(":memory:", "--auth-tokens", "t") as server:
        uvloop.run(begin_and_end(server.port))
    assert problems == []


async def test_a_server_of_protocol_1_gets_one_command_at_a_time_over_a_socket() -> None:
    under_way: list[int] = []

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        under_way.append(1)
        return HELLO_1 if command["cmd"] == "Hello" else {"ok": True, "data": {"pong": True, "time": 1}}

    async with FakeServer(answer) as server, linked(server) as link:
        await asyncio.gather(*(ask(link) for _ in range(20)))
        assert len(server.asked) == 21


async def test_waits_on_a_server_of_protocol_1_leave_a_way_for_other_commands() -> None:
    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        if command["cmd"] == "WaitJob":
            return None
        return HELLO_1 if command["cmd"] == "Hello" else {"ok": True, "data": {"pong": True, "time": 1}}

    async with FakeServer(answer) as server, linked(server, Pool, pool_size=2) as pool:
        await pool.start()
        for _ in range(6):
            pool.submit(WaitJob(id="j"), lambda outcome: None, 5.0)
        await until(lambda: sum(command["cmd"] == "WaitJob" for command in server.asked) == 6)
        async with asyncio.timeout(2):
            await asyncio.gather(*(ask(pool) for _ in range(20)))


async def test_no_link_carries_more_waits_than_a_server_holds() -> None:
    async with FakeServer(deaf_but_for("Hello", "Ping")) as server, linked(server, Pool) as pool:
        for _ in range(MAX_BLOCKING * 5 + 1):
            pool.submit(WaitJob(id="j"), lambda outcome: None, 5.0)
        await until(lambda: sum(command["cmd"] == "WaitJob" for command in server.asked) == MAX_BLOCKING * 5 + 1)
        assert max(health.in_flight for health in pool.health) <= MAX_BLOCKING
        assert len(pool.health) == 6
        await ask(pool)


async def test_commands_of_one_turn_share_a_link_and_turns_go_round() -> None:
    async with FakeServer(protocol_2) as server, linked(server, Pool, pool_size=3) as pool:
        await asyncio.gather(*(ask(pool) for _ in range(10)))
        assert len(pool.health) == 1
        for _ in range(6):
            await ask(pool)
        assert [health.state for health in pool.health] == [LinkState.CONNECTED] * 3


async def test_a_server_that_never_answers_a_connection_is_given_up_in_time() -> None:
    async with FakeServer(lambda command: None) as server, linked(server, connect_timeout=0.1) as link:
        with pytest.raises(Unreachable, match=r"Cannot reach 127.0.0.1:\d+: no answer within 0.1 s"):
            await link.start()


async def test_a_host_whose_name_cannot_be_one_is_named() -> None:
    link = Link(ConnectionOptions(host="two..dots"))
    try:
        async with asyncio.timeout(5):
            with pytest.raises(Unreachable, match=r"Cannot reach two\.\.dots:6789: .*label"):
                await link.start()
    finally:
        await link.close()


async def test_who_waits_for_a_link_that_is_closed_meanwhile_is_told_so() -> None:
    async with FakeServer(lambda command: None) as server, linked(server) as link:
        waiting = asyncio.create_task(link.start())
        await until(lambda: bool(server.asked))
        await link.close()
        with pytest.raises(ClientClosed):
            await waiting


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "That port speaks HTTP; the port for clients is 6789"),
        (b"220 mail.example.com ESMTP\r\n", "Frame too large"),
    ],
)
async def test_something_that_is_no_server_is_named(says: bytes, error: str) -> None:
    async with FakeServer(lambda command: says) as server, linked(server) as link:
        with pytest.raises(Unreachable, match=rf"Cannot reach .*: {error}") as told:
            await ask(link)
        assert told.value.__notes__ == [
            "a URL names the TCP port: the first one that `headrace serve` prints, 6789 by default"
        ]


@pytest.mark.alone
async def test_a_link_that_was_cut_is_made_again_and_what_was_under_way_is_lost() -> None:
    hears = deaf_but_for("Hello")
    async with FakeServer(lambda command: hears(command)) as server, linked(server) as link:
        lost = asyncio.create_task(ask(link))
        await until(lambda: len(server.asked) == 2)
        began = time.monotonic()
        server.connections[0].transport.abort()
        with pytest.raises(ConnectionLost, match=r"^Connection lost$"):
            await lost
        assert time.monotonic() - began < 1
        assert link.state is LinkState.RECONNECTING
        hears = protocol_2
        await ask(link)
        assert link.health[0].errors == 1


async def test_a_link_counts_as_dead_after_three_silent_pings() -> None:
    async with (
        FakeServer(deaf_but_for("Hello")) as server,
        linked(server, ping_interval=0.02, command_timeout=0.02, max_command_timeouts=0) as link,
    ):
        await link.start()
        await until(lambda: len(server.connections) == 2)
        assert sum(command["cmd"] == "Ping" for command in server.asked) == 3


async def test_only_a_silent_link_is_pinged() -> None:
    async with FakeServer(protocol_2) as server, linked(server, ping_interval=0.5) as link:
        await link.start()
        began = time.monotonic()
        while time.monotonic() - began < 1.2:
            await ask(link, SubscribeEvents(queue="q"))
            await asyncio.sleep(0.01)
        assert [command["cmd"] for command in server.asked if command["cmd"] == "Ping"] == []
        await until(lambda: server.asked[-1]["cmd"] == "Ping")


@pytest.mark.parametrize("limit", [1, 3])
async def test_a_link_counts_as_dead_after_silent_commands_without_any_ping(limit: int) -> None:
    async with (
        FakeServer(deaf_but_for("Hello")) as server,
        linked(server, ping_interval=0, max_command_timeouts=limit) as link,
    ):
        await link.start()
        other = asyncio.create_task(ask(link, WaitJob(id="j"), 30))
        for _ in range(limit):
            with pytest.raises(CommandTimeout, match=r"Ping got no answer within 0.03 s"):
                await ask(link, timeout=0.03)
        with pytest.raises(ConnectionLost):
            await other
        await until(lambda: len(server.connections) == 2)


async def test_an_answer_between_timeouts_keeps_the_link() -> None:
    async with (
        FakeServer(deaf_but_for("Hello", "Ping")) as server,
        linked(server, ping_interval=0) as link,
    ):
        await link.start()
        for _ in range(3):
            for _ in range(2):
                with pytest.raises(CommandTimeout):
                    await ask(link, WaitJob(id="j"), 0.02)
            await ask(link)
        assert (len(server.connections), link.errors) == (1, 0)


async def test_timeouts_may_be_told_to_mean_nothing() -> None:
    async with (
        FakeServer(deaf_but_for("Hello")) as server,
        linked(server, ping_interval=0, max_command_timeouts=0) as link,
    ):
        await link.start()
        for _ in range(6):
            with pytest.raises(CommandTimeout):
                await ask(link, timeout=0.01)
        assert (len(server.connections), link.state) == (1, LinkState.CONNECTED)


async def test_there_is_one_rhythm_of_pings_however_often_the_link_was_made() -> None:
    hears = deaf_but_for("Hello")
    async with FakeServer(lambda command: hears(command)) as server, linked(server, ping_interval=0.05) as link:
        await link.start()
        for count in range(1, 4):
            await until(lambda count=count: sum(c["cmd"] == "Ping" for c in server.asked) == count)
            server.connections[-1].transport.abort()  # with a ping under way
            await until(lambda count=count: len(server.connections) == count + 1)
            await until(lambda: link.state is LinkState.CONNECTED)
        hears = protocol_2
        asked, began = len(server.asked), time.monotonic()
        await until(lambda: len(server.asked) == asked + 8)
        assert time.monotonic() - began > 7 * 0.05 * 0.9


async def test_a_ping_that_found_no_room_is_not_the_last_one() -> None:
    def answer(command: dict[str, Any]) -> dict[str, Any] | None:
        return None if command.get("id") == "first" else protocol_2(command)

    class Pinging(Link):
        def submit(self, command: Any, done: Any, timeout: float) -> None:
            pings.extend([command] * isinstance(command, Ping))
            super().submit(command, done, timeout)

    pings: list[Any] = []
    async with FakeServer(answer) as server, linked(server, Pinging, ping_interval=0.1, max_in_flight=1) as link:
        await link.start()
        outcomes: list[Any] = []
        for name in ["first", *["other"] * MAX_WAITING]:
            link.submit(WaitJob(id=name), outcomes.append, 30.0)
        await until(lambda: pings)
        server.connections[0].write(encode_frame({"ok": True, "completed": True, "reqId": server.asked[-1]["reqId"]}))
        await until(lambda: len(outcomes) == MAX_WAITING + 1)
        await until(lambda: server.asked[-1]["cmd"] == "Ping")


async def test_a_command_that_waits_for_an_event_waits_no_longer_for_a_connection() -> None:
    async with FakeServer(deaf_but_for("Hello")) as server, linked(server) as link:
        await link.start()
        sent = asyncio.create_task(ask(link, WaitJob(id="j", timeout=50), 0.5))
        await until(lambda: server.asked[-1]["cmd"] == "WaitJob")
        with pytest.raises(CommandTimeout, match=r"WaitJob got no answer within 0.5 s"):
            await sent  # the reply may be under way, and what was sent has its whole time
        await server.__aexit__()
        await until(lambda: link.state is LinkState.RECONNECTING)
        with pytest.raises(Unreachable, match=r"No connection to 127.0.0.1:\d+ within 0.05 s"):
            await ask(link, WaitJob(id="j", timeout=50), 5.0)


async def test_what_was_not_sent_in_time_says_that_nothing_was_done() -> None:
    async with FakeServer(protocol_2) as server, linked(server) as link:
        await link.start()
        await server.__aexit__()
        await until(lambda: link.state is LinkState.RECONNECTING)
        with pytest.raises(Unreachable, match=r"No connection to 127.0.0.1:\d+ within 0.05 s"):
            await ask(link, timeout=0.05)


async def test_a_forced_reconnect_gives_the_connection_up() -> None:
    async with FakeServer(deaf_but_for("Hello")) as server, linked(server) as link:
        lost = asyncio.create_task(ask(link))
        await until(lambda: len(server.asked) == 2)
        link.force_reconnect()
        with pytest.raises(ConnectionLost):
            await lost
        await until(lambda: link.state is LinkState.CONNECTED)
        assert len(server.connections) == 2


async def test_what_is_asked_while_a_connection_is_given_up_goes_over_the_next_one() -> None:
    async with FakeServer(protocol_2) as server, linked(server) as link:
        await link.start()
        link.force_reconnect()
        await ask(link)  # the old connection is gone, and nobody has said so yet
        assert len(server.connections) == 2


async def test_a_forced_reconnect_does_not_wait_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client.link.reconnect_delay", lambda attempt: 60.0)
    async with FakeServer(protocol_2) as server, linked(server) as link:
        await link.start()
        server.connections[0].transport.abort()
        await until(lambda: link.state is LinkState.RECONNECTING)
        link.force_reconnect()
        await until(lambda: link.state is LinkState.CONNECTED)


async def test_who_is_not_let_in_any_more_is_told_and_tries_on() -> None:
    def refuse(command: dict[str, Any]) -> dict[str, Any]:
        return {"ok": False, "error": "Not authenticated", "reqId": command["reqId"]}

    hears: Any = protocol_2
    async with FakeServer(lambda command: hears(command)) as server, linked(server) as link:
        await link.start()
        hears = refuse
        link.force_reconnect()
        await until(lambda: link.state is LinkState.RECONNECTING)
        with pytest.raises(NotAuthenticated, match="token="):
            await ask(link)
        hears = protocol_2
        await ask(link)


async def test_a_pool_fails_over_to_the_links_that_stand() -> None:
    async with FakeServer(protocol_2) as server, linked(server, Pool, pool_size=4) as pool:
        for _ in range(8):
            await ask(pool)
        await until(lambda: len(server.connections) == 4)
        server.connections[1].transport.abort()
        server.connections[2].transport.abort()
        await until(lambda: sum(health.errors for health in pool.health) == 2)
        for _ in range(8):
            await ask(pool, timeout=1)


async def test_when_a_server_is_away_even_links_that_never_stood_wait_for_it() -> None:
    async with FakeServer(protocol_2) as server, linked(server, Pool, pool_size=4) as pool:
        await pool.start()
        await server.__aexit__()
        await until(lambda: pool.health[0].state is LinkState.RECONNECTING)
        waiting = [asyncio.create_task(ask(pool)) for _ in range(8)]
        for _ in range(4):
            await asyncio.sleep(0)
            waiting.append(asyncio.create_task(ask(pool)))
        await until(lambda: pool.health[0].errors >= 2)
        assert not any(task.done() for task in waiting)
        server._server = await asyncio.start_server(server._serve, "127.0.0.1", server.port)
        assert len(await asyncio.gather(*waiting)) == 12


async def test_a_link_that_gets_through_lets_the_others_try_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands may wait on any of them, and the next try of each may be later than their time allows."""
    delays = iter([60.0, 0.5])
    monkeypatch.setattr("headrace.client.link.reconnect_delay", lambda attempt: next(delays, 0.1))
    async with FakeServer(protocol_2) as server, linked(server, Pool, pool_size=2) as pool:
        for _ in range(4):
            await ask(pool)
        await until(lambda: len(server.connections) == 2)
        for connection in server.connections:
            connection.transport.abort()
        await until(lambda: [health.state for health in pool.health] == [LinkState.RECONNECTING] * 2)
        waiting = []
        for _ in range(2):
            waiting.append(asyncio.create_task(ask(pool)))
            await asyncio.sleep(0.001)
        assert len(await asyncio.gather(*waiting)) == 2
