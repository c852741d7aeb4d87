"""A blocking client for tests, written against the protocol and not against our own code: sockets and msgpack only."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any

import msgpack


class Client:
    """One connection. `call` sends a command and waits for its reply; `send`/`recv` pipeline."""

    def __init__(self, port: int, host: str = "127.0.0.1", timeout: float = 10.0) -> None:
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def call(self, cmd: str, **fields: Any) -> dict[str, Any]:
        self.send(cmd, **fields)
        return self.recv()

    def ok(self, cmd: str, **fields: Any) -> dict[str, Any]:
        """`call`, and the reply must be a success."""
        reply = self.call(cmd, **fields)
        assert reply.get("ok") is True, (cmd, reply)
        return reply

    def error(self, cmd: str, **fields: Any) -> str:
        """`call`, and the reply must be a failure; its text."""
        reply = self.call(cmd, **fields)
        assert reply.get("ok") is False, (cmd, reply)
        return str(reply["error"])

    def send(self, cmd: str, **fields: Any) -> None:
        self.send_value({"cmd": cmd, **fields})

    def send_value(self, value: Any) -> None:
        self.send_frame(msgpack.packb(value))

    def send_frame(self, body: bytes) -> None:
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def recv(self) -> Any:
        return msgpack.unpackb(self.recv_frame(), strict_map_key=False)

    def recv_frame(self) -> bytes:
        (length,) = struct.unpack(">I", self._exactly(4))
        return self._exactly(length)

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            chunk = self.socket.recv(1 << 20)
            if not chunk:
                raise ConnectionError("the server closed the connection")
            self._buffer += chunk
        out, self._buffer = self._buffer[:size], self._buffer[size:]
        return out

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_until_closed(sock: socket.socket, data: bytes) -> None:
    """For a thread: a client that never pauses."""
    with suppress(OSError):
        while True:
            sock.sendall(data)
