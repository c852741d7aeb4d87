"""A real server with its HTTP side on, and a small HTTP client that is not ours."""

from __future__ import annotations

import http.client
import json
import re
import socket
from pathlib import Path
from typing import Any, NamedTuple

from tests.ports import free_port
from tests.serverprocess import ServerProcess


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert self.json["ok"] is False, self.json
        return str(self.json["error"])


class WebServer(ServerProcess):
    """`headrace serve` with HTTP on a free port."""

    def __init__(self, data_path: Path | str = ":memory:", *flags: str, env: dict[str, str] | None = None) -> None:
        self.http_port = free_port()
        super().__init__(data_path, "--http-port", str(self.http_port), *flags, env=env)

    def http(self, token: str | None = None, timeout: float = 10.0) -> Http:
        return Http(self.http_port, token, timeout)

    def raw(self, timeout: float = 5.0) -> Raw:
        return Raw(self.http_port, timeout)


class Http:
    """One keep-alive connection."""

    def __init__(self, port: int, token: str | None = None, timeout: float = 10.0) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self.token = token

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        data = body
        if body is not None and not isinstance(body, bytes):
            data = json.dumps(body).encode()
        if data is not None:
            sent["Content-Type"] = "application/json"
        self.connection.request(method, path, data, {**sent, **(headers or {})})
        response = self.connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, found, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.call("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, body: Any = None) -> Answer:
        return self.call("POST", path, body)

    def ok(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.call(method, path, body)
        assert answer.status == 200, (method, path, answer)
        return answer.json

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Http:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Raw:
    """A bare socket, for requests that no client library would send."""

    def __init__(self, port: int, timeout: float = 5.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, data: bytes) -> Answer:
        self.send(data)
        return self.answer()

    def answer(self) -> Answer:
        """The next response; its body is read by Content-Length."""
        head = self.head()
        lines = head.decode().split("\r\n")
        status = int(lines[0].split()[1])
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        if status == 100:
            return Answer(status, headers, b"")
        return Answer(status, headers, self.take(int(headers.get("content-length", 0))))

    def head(self) -> bytes:
        return self.until(b"\r\n\r\n")

    def until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._fill()
        at = self._buffer.index(mark) + len(mark)
        out, self._buffer = self._buffer[:at], self._buffer[at:]
        return out

    def take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._fill()
        out, self._buffer = self._buffer[:size], self._buffer[size:]
        return out

    def _fill(self) -> None:
        chunk = self.socket.recv(1 << 16)
        if not chunk:
            raise ConnectionError("the server closed the connection")
        self._buffer += chunk

    def is_ended(self) -> bool:
        """Whether the server ends it in order, without a reset; waits for it up to the timeout."""
        try:
            while chunk := self.socket.recv(1 << 16):
                self._buffer += chunk
        except OSError:
            return False
        return True

    def is_closed(self) -> bool:
        """Whether the server has closed; waits for it up to the timeout."""
        try:
            while chunk := self.socket.recv(1 << 16):
                self._buffer += chunk
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SseEvent(NamedTuple):
    id: str
    name: str
    data: Any


class SseClient:
    """Reads a stream of server-sent events off a bare socket."""

    def __init__(self, port: int, path: str = "/events", timeout: float = 10.0, **headers: str) -> None:
        self.raw = Raw(port, timeout)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.raw.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode())
        self.head = self.raw.head().decode()
        self.status = int(self.head.split()[1])
        if self.status == 200:
            self.greeting = self.raw.until(b"\n\n").decode()

    def next(self) -> SseEvent:
        """The next event; comments are passed over."""
        while True:
            text = self.raw.until(b"\n\n").decode()
            fields = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
            if "data" in fields:
                return SseEvent(fields.get("id", ""), fields.get("event", ""), json.loads(fields["data"]))

    def take(self, count: int, prefix: str = "job:") -> list[SseEvent]:
        """The next `count` events whose name begins so."""
        found: list[SseEvent] = []
        while len(found) < count:
            event = self.next()
            if event.name.startswith(prefix):
                found.append(event)
        return found

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> SseClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
