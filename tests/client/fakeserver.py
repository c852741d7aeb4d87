"""The other side of a conversation, for tests that decide what it says: in memory, or behind a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.client.conversation import Conversation, Question
from headrace.client.policy import ConnectionOptions
from headrace.commands.monitoring import Ping
from headrace.frames import Frames, encode_frame

HELLO_2 = {"ok": True, "protocolVersion": 2, "capabilities": ["pipelining"], "server": "bunqueue", "version": "1"}
HELLO_1 = {**HELLO_2, "protocolVersion": 1}


class Talk:
    """A conversation whose server is the test."""

    def __init__(self, **options: Any) -> None:
        self.events: list[bytes] = []
        self.conversation = Conversation(
            ConnectionOptions(**options), lambda event: self.events.append(msgspec.msgpack.decode(event))
        )
        self._frames = Frames()

    def heard(self) -> list[dict[str, Any]]:
        """What the server was sent since the last time."""
        return [msgspec.msgpack.decode(frame) for frame in self._frames.feed(bytes(self.conversation.take()))]

    def say(self, *replies: dict[str, Any]) -> None:
        self.conversation.receive(b"".join(encode_frame(reply) for reply in replies))

    def greeted(self, hello: dict[str, Any] = HELLO_2) -> Talk:
        self.conversation.greet()
        (asked,) = self.heard()
        self.say({**hello, "reqId": asked["reqId"]})
        return self

    def ask(self, command: Any = None) -> list[Any]:
        """Ask something; the outcome, once there is one, is the only entry of the list."""
        outcome: list[Any] = []
        self.conversation.ask(Question(command or Ping(), outcome.append))
        return outcome


Answer = Callable[[dict[str, Any]], dict[str, Any] | bytes | None]


class FakeServer:
    """A real socket that answers each command with what `answer` gives: a reply, raw bytes, or nothing."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.connections: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self.connections:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self.connections), return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        frames = Frames()
        while data := await reader.read(65536):
            for frame in frames.feed(data):
                command = msgspec.msgpack.decode(frame)
                self.asked.append(command)
                reply = self.answer(command)
                if reply is not None:
                    writer.write(reply if isinstance(reply, bytes) else encode_frame(reply))
        writer.close()


def protocol_2(command: dict[str, Any]) -> dict[str, Any]:
    body = HELLO_2 if command["cmd"] == "Hello" else {"ok": True, "data": {"pong": True, "time": 1}}
    return {**body, "reqId": command["reqId"]}
