"""The HTTP side as an ASGI application, to be mounted in FastAPI, Starlette or any other ASGI framework.

    home = EmbeddedEngine(Path("jobs.db"))    # in the lifespan of the application: home.start(), home.stop()
    app.mount("/queue", AsgiApp(home))

API, dashboard, server-sent events and WebSocket are those of `headrace serve`: a scope becomes a request of the same
router and runs in the same session, so no handler exists twice. Only the owner of the socket differs.

Rules: everything runs on the loop of the engine's ticker. A server on another loop or thread may call all the same;
its messages are carried over. Who may ask is decided as in `access`: by the tokens of the engine, and without any by
Host and Origin (`Settings.allowed_hosts`, `cors_allow_origin`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol
from urllib.parse import quote

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Message, Ping, TextMessage

from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError, StorageUnavailable
from headrace.server.exchange import Request, Response, TooLarge, unsynced
from headrace.server.http import HttpServer
from headrace.server.httpsession import MAX_BODY_BYTES, HttpSession, Takeover
from headrace.server.ticker import Release, Ticker

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_PIPE_HIGH: Final = 64 * 1024
_REFUSED: Final = 1008
# The server in front has already done the handshake; ours expects to see its headers.
_UPGRADE: Final = {
    b"upgrade": b"websocket",
    b"connection": b"upgrade",
    b"sec-websocket-version": b"13",
    b"sec-websocket-key": base64.b64encode(bytes(16)),
}


class Home(Protocol):
    """Where the engine lives, such as an EmbeddedEngine; it must have been started before the first request."""

    engine: Engine
    ticker: Ticker


class AsgiApp:
    """`async app(scope, receive, send)` for http, websocket and lifespan."""

    def __init__(self, home: Home, settings: Settings | None = None) -> None:
        self._home = home
        self._settings = settings or Settings()
        self._server: HttpServer | None = None
        self._connections: set[AsgiConnection] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._carry(scope, receive, send)

    async def close(self) -> None:
        """End the streams; the engine is its owner's to stop. Called by the lifespan, if there is one."""
        for connection in list(self._connections):
            connection.close()
        if self._server is not None:
            self._server.hub.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        if self._server is not None:
            await _on(self._home.ticker.loop, self.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _carry(self, scope: Scope, receive: Receive, send: Send) -> None:
        here = asyncio.get_running_loop()
        if here is self._home.ticker.loop:
            await self._serve(scope, receive, send)
        else:
            there = lambda: self._serve(scope, lambda: _on(here, receive), lambda m: _on(here, send, m))  # noqa: E731
            await _on(self._home.ticker.loop, there)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._server is None:
            self._server = HttpServer(self._home.engine, self._settings, self._home.ticker)
        connection = AsgiConnection(self._server, str((scope.get("client") or ("",))[0]))
        self._connections.add(connection)
        try:
            serve = _serve_websocket if scope["type"] == "websocket" else _serve_http
            await serve(connection, scope, receive, send)
        finally:
            self._connections.discard(connection)
            connection.end()


async def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., Awaitable[Any]], *given: Any) -> Any:
    """The outcome of a call on another loop, or on this one."""
    if loop is asyncio.get_running_loop():
        return await call(*given)

    async def run() -> Any:
        return await call(*given)

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), loop))


# -- one scope as a connection -----------------------------------------------------------------------------------------


class Pipe:
    """Stands in for a transport: what is written is picked up by the task that sends it on."""

    def __init__(self) -> None:
        self.takeover: Takeover | None = None
        self._buffer = bytearray()
        self._is_closed = False
        self._filled = asyncio.Event()
        self.is_cut = asyncio.Event()
        """The client is to be disconnected, whatever is still being sent to it."""
        self.may_read = asyncio.Event()
        self.may_read.set()

    def pause_reading(self) -> None:
        self.may_read.clear()

    def resume_reading(self) -> None:
        self.may_read.set()

    def write(self, data: bytes | bytearray) -> None:
        if not self._is_closed:
            self._buffer += data
            self._filled.set()
            if self.takeover is not None and len(self._buffer) > _PIPE_HIGH:
                self.takeover.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._filled.set()

    def abort(self) -> None:
        self._buffer.clear()
        self.is_cut.set()
        self.close()

    async def take(self) -> bytes:
        """What was written since the last call; b"" when the pipe is closed."""
        await self._filled.wait()
        taken = bytes(self._buffer)
        self._buffer.clear()
        if not self._is_closed:
            self._filled.clear()
        if self.takeover is not None:
            self.takeover.resume_writing()
        return taken


class AsgiConnection:
    """One scope as the connection of a session: one request, or the stream it becomes."""

    def __init__(self, server: HttpServer, address: str) -> None:
        self.server = server
        self.transport: Pipe | None = None
        self.session = HttpSession(server, self, address, None)
        self.answer: asyncio.Future[Response] = server.loop.create_future()
        self._takeover: Takeover | None = None

    @property
    def is_durable(self) -> bool:
        return self.session.is_durable

    def spoil(self, error: StorageUnavailable) -> None:
        self.session.spoil(error)

    def flush(self) -> None:
        for _, response in self.session.take():
            self._respond(response)

    def hold(self) -> Release:
        held = [response for _, response in self.session.take()]

        def release(error: BaseException | None) -> None:
            for response in held:
                self._respond(response if error is None else unsynced(response, error))

        return release

    def _respond(self, response: Response) -> None:
        if not self.answer.done():
            self.answer.set_result(response)

    def begin(self, response: Response) -> Takeover:
        """The response starts a stream."""
        self.transport = Pipe()
        self._takeover = self.transport.takeover = response.begins(self)
        assert self._takeover is not None
        return self._takeover

    def close(self) -> None:
        if self._takeover is not None:
            self._takeover.close()
        self.hang_up()

    def hang_up(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def end(self) -> None:
        self.transport = None
        if self._takeover is not None:
            self._takeover.connection_lost()
        self.session.close()


def _request_of(scope: Scope) -> Request:
    request = Request()
    request.method = scope.get("method", "GET")
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    request.target = path.removeprefix(quote(scope.get("root_path", "")).encode()) or b"/"
    if scope.get("query_string"):
        request.target += b"?" + scope["query_string"]
    for name, value in scope["headers"]:
        request.add_header(name.lower(), value)
    return request


def _admit(connection: AsgiConnection, request: Request, scope: Scope) -> None:
    scheme = {"ws": "http", "wss": "https"}.get(scope.get("scheme", "http"), scope.get("scheme", "http"))
    try:
        if request.refusal is None:
            connection.server.admit(request, scope.get("http_version", "1.1"), scheme)
    except HeadraceError as error:
        request.refusal = error


async def _answered(connection: AsgiConnection, request: Request, gone: Awaitable[object]) -> Response | None:
    """The response; None when the client disconnected first."""
    connection.session.receive(request)
    leaving = asyncio.ensure_future(gone)
    either: set[asyncio.Future[Any]] = {connection.answer, leaving}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not connection.answer.done():
        return None
    leaving.cancel()
    return connection.answer.result()


# -- HTTP and server-sent events ---------------------------------------------------------------------------------------


async def _serve_http(connection: AsgiConnection, scope: Scope, receive: Receive, send: Send) -> None:
    request = _request_of(scope)
    _admit(connection, request, scope)
    if request.refusal is None and not await _read_body(request, receive):
        return
    response = await _answered(connection, request, _disconnected(receive))
    if response is None:
        return
    cors = connection.server.access.cors_headers(request.headers.get(b"origin"))
    await send({"type": "http.response.start", "status": response.status, "headers": _headers_of(response, cors)})
    if response.begins is None:
        await send({"type": "http.response.body", "body": b"" if request.is_head else response.body})
    else:
        connection.begin(response)
        await _stream(connection, response.body, receive, send)


async def _read_body(request: Request, receive: Receive) -> bool:
    """Whether the whole request was received."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return False
        body = message.get("body", b"")
        request.size += len(body)
        if request.size > MAX_BODY_BYTES:
            request.refusal = TooLarge("Request body exceeds 64 MB")
            return True
        if request.is_known:  # else it will be refused
            request.body += body
        if not message.get("more_body"):
            return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers_of(response: Response, cors: bytes) -> list[tuple[bytes, bytes]]:
    lines = [line.partition(b": ") for line in (response.headers + cors).split(b"\r\n") if line]
    # The connection belongs to the server in front.
    headers = [(name.lower(), value) for name, _, value in lines if name.lower() != b"connection"]
    if response.begins is None:
        headers.append((b"x-content-type-options", b"nosniff"))
        if response.status not in (204, 304):
            length = str(len(response.body)).encode()
            headers += [(b"content-type", response.content_type), (b"content-length", length)]
    return headers


async def _stream(connection: AsgiConnection, first: bytes, receive: Receive, send: Send) -> None:
    pipe = connection.transport
    assert pipe is not None

    async def pump() -> None:
        part = first
        while part:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            part = await pipe.take()
        await send({"type": "http.response.body", "body": b""})

    await _until_first(pump(), _disconnected(receive), pipe.is_cut.wait())


async def _until_first(*works: Awaitable[object]) -> None:
    """Run several until the first one ends."""
    tasks = {asyncio.ensure_future(work) for work in works}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        with contextlib.suppress(OSError):  # the client disconnected first
            task.result()


# -- WebSocket ---------------------------------------------------------------------------------------------------------


async def _serve_websocket(connection: AsgiConnection, scope: Scope, receive: Receive, send: Send) -> None:
    """Messages are framed as a client would frame them, so that the same WebSocket class can read and write them."""
    await receive()  # websocket.connect
    request = _request_of(scope)
    request.headers |= _UPGRADE
    _admit(connection, request, scope)
    response = await _answered(connection, request, asyncio.Event().wait())
    assert response is not None
    if response.begins is None:
        await _refuse(response, scope, send)
        return
    chosen = dict(_headers_of(response, b"")).get(b"sec-websocket-protocol")
    await send({"type": "websocket.accept", "subprotocol": chosen and chosen.decode()})
    socket, wire = connection.begin(response), Connection(ConnectionType.CLIENT)
    await _until_first(
        _read_messages(connection, socket, wire, receive), _send_messages(connection, socket, wire, send)
    )


async def _refuse(response: Response, scope: Scope, send: Send) -> None:
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": _REFUSED})
        return
    headers = _headers_of(response, b"")
    await send({"type": "websocket.http.response.start", "status": response.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": response.body})


async def _read_messages(connection: AsgiConnection, socket: Takeover, wire: Connection, receive: Receive) -> None:
    pipe = connection.transport
    assert pipe is not None
    while (message := await receive())["type"] == "websocket.receive":
        text = message.get("text")
        given: Message[Any] = BytesMessage(message["bytes"]) if text is None else TextMessage(text)
        socket.data_received(wire.send(given))
        await pipe.may_read.wait()


async def _send_messages(connection: AsgiConnection, socket: Takeover, wire: Connection, send: Send) -> None:
    pipe, parts = connection.transport, []
    assert pipe is not None
    while frames := await pipe.take():
        wire.receive_data(frames)
        for event in wire.events():
            if isinstance(event, TextMessage):
                parts.append(event.data)
                if event.message_finished:
                    await send({"type": "websocket.send", "text": "".join(parts)})
                    parts.clear()
            elif isinstance(event, Ping):  # the server in front checks on the client
                socket.data_received(wire.send(event.response()))
            elif isinstance(event, CloseConnection):
                await send({"type": "websocket.close", "code": event.code})
                return
    await send({"type": "websocket.close", "code": _REFUSED})
