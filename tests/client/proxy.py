"""A network that fails on command: a TCP proxy that passes, cuts, swallows or refuses."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.ports import free_port


class Proxy:
    """Between a client and the server on `target`. Runs on the loop of the test."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self.connections = 0
        self.port = free_port()

    async def __aenter__(self) -> Proxy:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._passes.set()
        await self.refuse()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def refuse(self) -> None:
        """Cut everything and let nobody in."""
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End every connection with a reset, whatever is on its way."""
        for writer in list(self._writers):
            writer.transport.abort()

    def swallow(self) -> None:
        """Take every byte and pass none on: both sides believe that they are connected."""
        self._passes.clear()

    def pass_again(self) -> None:
        self._passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(there_writer)
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
            self._writers.discard(there_writer)
        self._writers.discard(writer)
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if self._passes.is_set():
                    writer.write(data)
                    await writer.drain()
        writer.close()
