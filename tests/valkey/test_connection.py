"""One connection to Valkey: what becomes of its calls when the server hangs, or is made anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.backends.valkey import wakes
from headrace.backends.valkey.connection import Connection, Unreachable
from headrace.backends.valkey.url import parse_url
from headrace.errors import StorageUnavailable
from tests.valkeyserver import shared_server
from tests.waiting import until

SECONDS = 0.4


class Peer:
    """A server that answers so many commands on each connection, then hangs."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        self.open += 1
        left = self.answers
        while data := await reader.read(65536):
            for _ in range(min(left, data.count(b"*"))):
                writer.write(b"+OK\r\n")
                left -= 1
        self.open -= 1
        writer.close()


@asynccontextmanager
async def served(answers: int) -> AsyncIterator[tuple[Peer, Connection]]:
    peer = Peer(answers)
    server = await asyncio.start_server(peer.serve, "127.0.0.1")
    peer.port = server.sockets[0].getsockname()[1]
    connection = Connection(parse_url(f"valkey://127.0.0.1:{peer.port}?timeout={SECONDS}"), "127.0.0.1", peer.port)
    yield peer, connection
    await connection.close()
    server.close()


async def test_a_call_on_a_connection_that_was_made_anew_has_a_deadline_too() -> None:
    async with served(answers=2) as (peer, connection), asyncio.timeout(10):
        assert await connection.call("PING") == b"OK"
        peer.writers[0].transport.abort()
        await connection.lost()
        await connection.call("PING")
        with pytest.raises(StorageUnavailable, match="did not answer"):
            await connection.call("PING")


async def test_a_connection_whose_greeting_is_not_answered_is_not_left_open() -> None:
    async with served(answers=0) as (peer, connection), asyncio.timeout(10):
        for _ in range(2):
            with pytest.raises(Unreachable):
                await connection.call("PING")
        assert len(peer.writers) == 2
        await until(lambda: peer.open == 0)


async def test_calls_that_wait_for_a_connection_hear_that_it_was_closed() -> None:
    async with served(answers=0) as (peer, connection), asyncio.timeout(10):
        calling = asyncio.create_task(connection.call("PING"))
        await until(lambda: peer.open == 1)
        await connection.close()
        with pytest.raises(StorageUnavailable, match="closed"):
            await calling


class Loading:
    """A server that takes subscriptions and says to a PING that it loads its data."""

    def __init__(self) -> None:
        self.subscribed = self.refused = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        while data := await reader.read(65536):
            if b"SUBSCRIBE" in data:
                self.subscribed += 1
                writer.write(b"*3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n")
            elif b"PING" in data:
                self.refused += 1
                writer.write(b"-LOADING the dataset is being loaded\r\n")
            else:
                writer.write(b"+OK\r\n")
        writer.close()


async def test_news_are_heard_again_after_a_server_that_was_loading_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakes, "_PING_EVERY_S", 0.02)
    loading = Loading()
    server = await asyncio.start_server(loading.serve, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    url = parse_url(f"valkey://127.0.0.1:{port}")
    news = wakes.Wakes(url, lambda: url.hosts, ["news"], lambda *_: None, lambda: None)
    await news.open()
    await until(lambda: loading.refused)
    before = loading.subscribed
    loading.writers[-1].transport.abort()
    await until(lambda: loading.subscribed > before)
    await news.close()
    server.close()


async def test_whoever_begins_to_wait_while_news_are_subscribed_to_shares_the_subscription() -> None:
    """Somebody in every turn of the loop: also in the one between the answer and who asked for it."""
    url = parse_url(shared_server().url)
    news = wakes.Wakes(url, lambda: url.hosts, ["news"], lambda *_: None, lambda: None)
    waiting = [asyncio.create_task(news.open())]
    while not waiting[0].done():
        waiting.append(asyncio.create_task(news.open()))
        await asyncio.sleep(0)
    subscribed = news._connection
    await asyncio.gather(*waiting)
    assert news._connection is subscribed
    await news.close()
