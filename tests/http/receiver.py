"""A real HTTP server in a thread that receives webhooks: it records every request and answers as it is told."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One request as it came in."""

    at: float
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def is_signed_with(self, secret: str) -> bool:
        return (
            self.headers.get("X-Webhook-Signature") == hmac.new(secret.encode(), self.body, hashlib.sha256).hexdigest()
        )


Answer = Callable[[BaseHTTPRequestHandler, Call], None]


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    """Answer every request with this status."""

    def reply(handler: BaseHTTPRequestHandler, call: Call) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):  # who has seen enough may hang up
            handler.wfile.write(body)

    return reply


def as_asked(handler: BaseHTTPRequestHandler, call: Call) -> None:
    """Answer with the status that stands at the end of the path."""
    answer(int(call.path.rpartition("/")[2]))(handler, call)


def in_turn(*answers: Answer) -> Answer:
    """The first answer for the first request and so on; the last one stays."""
    left = list(answers)

    def reply(handler: BaseHTTPRequestHandler, call: Call) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler, call)

    return reply


class Receiver:
    """Listens on `host`; `answer` may be exchanged at any time."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.answer = answer(200)
        self.calls: list[Call] = []
        self._came = threading.Condition()
        self._server = ThreadingHTTPServer((host, port), self._handler())
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port
        self.scheme = "http" if tls is None else "https"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hook"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                call = Call(time.monotonic(), self.path, dict(self.headers), body)
                receiver.note(call)
                receiver.answer(self, call)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def note(self, call: Call) -> None:
        with self._came:
            self.calls.append(call)
            self._came.notify_all()

    def wait_for(self, count: int, timeout: float = 20.0) -> list[Call]:
        """The calls, once there are at least `count`."""
        with self._came:
            came = self._came.wait_for(lambda: len(self.calls) >= count, timeout)
            assert came, f"{len(self.calls)} of {count} requests came: {[call.body for call in self.calls]}"
            return list(self.calls)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
