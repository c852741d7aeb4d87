"""A client that pipelines without end is served, but does not hold up the others."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable

import msgpack
import pytest

from headrace.frames import encode_frame
from headrace.server import httpsession, session, websocket
from tests.http.webserver import WebServer

JOBS = 8000
UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def _frame(queue: str, number: int) -> bytes:
    return encode_frame({"cmd": "PUSH", "queue": queue, "data": 1, "reqId": number})


def _message(queue: str, number: int) -> bytes:
    text = json.dumps({"cmd": "PUSH", "queue": queue, "data": 1, "reqId": number}).encode()
    return bytes((0x81, 0x80 + len(text))) + bytes(4) + text  # masked with zeros


def _request(queue: str, number: int) -> bytes:
    return b'POST /queues/%s/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"data":1}' % queue.encode()


def _connect(web: WebServer, how: str) -> socket.socket:
    port = web.port if how == "tcp" else web.http_port
    connected = socket.create_connection(("127.0.0.1", port), timeout=60)
    if how == "websocket":
        connected.sendall(UPGRADE)
        assert connected.recv(1000).endswith(b"\r\n\r\n")
    return connected


def _answers(connected: socket.socket, wanted: int, mark: bytes) -> int:
    """How many answers come, until there are as many as wanted or the server closes the connection."""
    seen, rest = 0, b""
    while seen < wanted and (read := connected.recv(1 << 20)):
        rest += read
        seen += rest.count(mark)
        rest = rest[-len(mark) + 1 :]
    return seen


@pytest.mark.parametrize(
    ("how", "write", "mark", "limit"),
    [
        ("tcp", _frame, msgpack.packb("ok") + msgpack.packb(True), session.MAX_PER_TICK),
        ("websocket", _message, b'"ok":true', websocket.MAX_PER_TURN),
        ("http", _request, b'"ok":true', httpsession.MAX_PER_TICK),
    ],
    ids=["tcp", "websocket", "http"],
)
def test_others_are_answered_while_one_client_pipelines(
    web: WebServer, how: str, write: Callable[[str, int], bytes], mark: bytes, limit: int
) -> None:
    queue = f"fair.{how}"
    with _connect(web, how) as flood, web.client() as other:
        other.ok("Ping")
        os.kill(web.pid, signal.SIGSTOP)
        try:
            flood.sendall(b"".join(write(queue, number) for number in range(JOBS)))
            if how != "websocket":
                flood.shutdown(socket.SHUT_WR)  # whoever only stops sending is still answered
            other.send("Count", queue=queue)
        finally:
            os.kill(web.pid, signal.SIGCONT)
        assert other.recv()["count"] <= 2 * limit
        assert _answers(flood, JOBS, mark) == JOBS
        assert other.ok("Count", queue=queue)["count"] == JOBS
