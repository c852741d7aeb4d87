"""One HTTP request and its response, independent of the transport."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from headrace.commands._base import Reply
from headrace.errors import HeadraceError, StorageUnavailable
from headrace.server.jsonwire import plain, to_json
from headrace.server.routes import BadRequest, Endpoint, MethodNotAllowed

if TYPE_CHECKING:
    from headrace.server.httpsession import Plain

JSON: Final = b"application/json"
_ONCE: Final = frozenset((b"host", b"authorization", b"content-type", b"origin"))
NO_STORE: Final = b"Cache-Control: no-store\r\n"
_REASONS: Final = {
    101: b"Switching Protocols",
    200: b"OK", 204: b"No Content", 304: b"Not Modified", 400: b"Bad Request", 401: b"Unauthorized",
    403: b"Forbidden", 404: b"Not Found", 405: b"Method Not Allowed", 408: b"Request Timeout", 409: b"Conflict",
    413: b"Content Too Large", 415: b"Unsupported Media Type", 426: b"Upgrade Required", 429: b"Too Many Requests",
    431: b"Request Header Fields Too Large", 500: b"Internal Server Error", 501: b"Not Implemented",
    503: b"Service Unavailable",
}  # fmt: skip


class TooLarge(HeadraceError):
    code = "too_large"
    status = 413


class HeadTooLarge(HeadraceError):
    code = "head_too_large"
    status = 431


class TooSlow(HeadraceError):
    code = "too_slow"
    status = 408


class Request:
    """One request; `refusal` is why it will not be served."""

    __slots__ = (
        "body",
        "endpoint",
        "head_bytes",
        "headers",
        "host",
        "is_known",
        "keeps_alive",
        "method",
        "parameters",
        "path",
        "query",
        "refusal",
        "size",
        "target",
        "token",
    )

    def __init__(self) -> None:
        self.method = "GET"
        self.target = b""
        self.path = ""
        self.query = ""
        self.host = ""
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.size = 0
        self.head_bytes = 0
        self.keeps_alive = True
        self.refusal: HeadraceError | None = None
        self.endpoint: Endpoint | Plain | None = None
        self.parameters: dict[str, str] = {}
        self.token: str | None = None
        self.is_known = False

    def add_header(self, name: bytes, value: bytes) -> None:
        """`name` is in lower case. Some headers may not be repeated: which of the values counts would be ambiguous."""
        if name in self.headers:
            if name in _ONCE:
                self.refusal = BadRequest(f"{name.decode()} is given twice")
            value = self.headers[name] + b", " + value
        self.headers[name] = value

    def head_without_upgrade(self, version: str) -> bytes:
        """The head of the request without its Upgrade header."""
        lines = [b"%s %s HTTP/%s" % (self.method.encode(), self.target, version.encode())]
        lines += [name + b": " + value for name, value in self.headers.items() if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def is_head(self) -> bool:
        return self.method == "HEAD"


class Response(Struct):
    status: int
    body: bytes = b""
    content_type: bytes = JSON
    headers: bytes = NO_STORE
    keeps_alive: bool = True
    promises: bool = False
    """Whether it reports a write that must be synced to disk first."""
    is_of_command: bool = False
    """Whether it reports changes of this tick: then a failed commit turns it into an error."""
    begins: Any = None
    """What the connection becomes once this is sent (httpsession.Begin)."""


def encode_response(response: Response, request: Request, cors: bytes = b"") -> bytes:
    status, body = response.status, response.body
    keeps_alive = response.keeps_alive and request.keeps_alive
    if response.begins is not None:
        return b"HTTP/1.1 %d %s\r\n%s%s\r\n" % (status, _REASONS[status], response.headers, cors) + body
    content = b"Content-Type: %s\r\nContent-Length: %d\r\n" % (response.content_type, len(body))
    return b"".join(
        (
            b"HTTP/1.1 %d %s\r\n" % (status, _REASONS[status]),
            b"" if status in (204, 304) else content,
            b"Date: %s\r\nX-Content-Type-Options: nosniff\r\n" % _date(),
            response.headers,
            cors,
            b"\r\n" if keeps_alive else b"Connection: close\r\n\r\n",
            b"" if request.is_head else body,
        )
    )


_now: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    global _now
    second = int(time.time())
    if _now[0] != second:
        _now = (second, formatdate(second, usegmt=True).encode())
    return _now[1]


def error_response(error: HeadraceError, status: int | None = None) -> Response:
    response = Response(status or error.status, to_json({"ok": False, "error": str(error)}))
    if isinstance(error, MethodNotAllowed):
        response.headers += b"Allow: " + ", ".join(error.allowed).encode() + b"\r\n"
    if response.status == 401:
        response.headers += b"WWW-Authenticate: Bearer\r\n"
    if response.status == 426:
        response.headers += b"Sec-WebSocket-Version: 13\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return response


def unsynced(response: Response, error: BaseException) -> Response:
    """What a response becomes when the sync it promises failed."""
    if not response.promises:
        return response
    return error_response(StorageUnavailable(f"Storage error: not synced to disk ({error})"))


def reply_response(reply: Reply, endpoint: Endpoint) -> Response:
    status = 200 if reply.ok else endpoint.route.fail or 503
    if not endpoint.route.lift:
        return Response(status, to_json(reply), is_of_command=True)
    shown: Any = plain(msgspec.msgpack.encode(reply))
    for name in endpoint.route.lift:
        shown = shown[name]
    if isinstance(shown, str):
        return Response(status, shown.encode(), b"text/plain; version=0.0.4; charset=utf-8", is_of_command=True)
    return Response(status, to_json({"ok": True, **shown} if isinstance(shown, dict) else shown), is_of_command=True)
