"""HTTP/1.1: the shell around `routes` and `driving`. Requests in, responses out, in the order in which they came.

Rules:
- One request of a connection runs at a time; what is pipelined behind it waits. So responses are in order without
  bookkeeping, and a connection costs no more than the one command it runs.
- A response leaves after the commit of what it reports, as on TCP.
- Whether a request is allowed is decided by its headers: the body of a request that will be refused is not buffered,
  and trailers are only counted.
- A request that cannot be parsed gets one error response, and then the connection is closed.

Everything that is not a command (pages, health texts, streams) is a `Plain`; see `HttpServer`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

import httptools

from headrace.commands._base import Flag
from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError, StorageUnavailable
from headrace.server.access import HEALTH_PATHS, Access
from headrace.server.exchange import HeadTooLarge, Request, Response, TooLarge, TooSlow, encode_response, unsynced
from headrace.server.httpsession import MAX_BODY_BYTES, HttpSession, Plain, Takeover
from headrace.server.listener import FAREWELL_S, Listener, part, see_off
from headrace.server.live import Hub
from headrace.server.openapi import Description
from headrace.server.pages import API_PAGE, DASHBOARD, Folder, Page, Report
from headrace.server.routes import BadRequest, Endpoint, Router, WrongContent, endpoints
from headrace.server.sse import EventStreams
from headrace.server.ticker import Parcels, Release, Ticker
from headrace.server.valve import Valve
from headrace.server.websocket import Sockets

MAX_HEAD_BYTES: Final = 16 * 1024
_BACKLOG_LIMIT: Final = 32
_READ_BYTES: Final = 16 * 1024

PREFLIGHT: Final = (
    b"Access-Control-Allow-Methods: GET, POST, PUT, DELETE, OPTIONS\r\n"
    b"Access-Control-Allow-Headers: Content-Type, Authorization, Last-Event-ID\r\n"
    b"Access-Control-Max-Age: 86400\r\n"
)


# -- the socket --------------------------------------------------------------------------------------------------------


class HttpConnection(asyncio.BufferedProtocol):
    """Reads requests from a socket and writes the responses of the session.

    It reads in small pieces: the parser cannot stop halfway, however many requests a piece contains.
    """

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.session: HttpSession
        self._parser = httptools.HttpRequestParser(self)
        self._request: Request | None = None
        self._has_head = False
        self._unread_head = 0
        self._is_deaf = False
        self._has_heard_all = False
        self.still_sends = False
        self._is_half_closed = False
        self._valve = Valve(_BACKLOG_LIMIT)
        self._parcels = Parcels(self._write)
        self._deadline = 0.0
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._early: bytes | None = None
        self.takeover: Takeover | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        peer = transport.get_extra_info("peername")
        self.session = HttpSession(self.server, self, str(peer[0]) if peer else "", self.server.new_budget())
        self.server.joined(self)
        if self.server.is_full:
            self._fail(StorageUnavailable("Too many connections"))
        self._set_deadline()

    # -- reading -------------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.server.inbox

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.server.inbox[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._has_heard_all:
            self.still_sends = True
            return
        if self.takeover is not None:
            self.takeover.data_received(data)
            return
        if self._is_deaf or self.session.is_closing:
            if self._early is not None:  # data may follow an upgrade before it has been answered
                self._early += data
                self._valve.is_behind = True
                self._set_reading()
            return
        if self._request is not None:
            self._unread_head += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._fail(BadRequest("Bad request"))
        request = self._request
        if request is not None and max(self._unread_head, request.head_bytes) > MAX_HEAD_BYTES:
            self._fail(HeadTooLarge("Request headers exceed 16 KB"))
        self._set_deadline()
        if self.session.backlog:
            self._set_reading()

    def _parse(self, data: bytes) -> None:
        """The parser stops at every Upgrade, before the body. Only upgrades to WebSocket are accepted."""
        left: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as upgrade:
                left = memoryview(left)[upgrade.args[0] :]
            if self._request is None:
                self._is_deaf = True
                self._early = bytes(left)
                return
            head = self._request.head_without_upgrade(self._parser.get_http_version())
            self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(head)

    def _is_declined(self, request: Request) -> bool:
        """Whether it asks for a protocol we do not speak, such as h2c: then it is treated as a plain request."""
        if not self._parser.should_upgrade() or request.method == "CONNECT" or request.refusal is not None:
            return False
        return request.method != "GET" or request.headers.get(b"upgrade", b"").lower() != b"websocket"

    def on_message_begin(self) -> None:
        self._request = Request()
        self._has_head = False
        self._unread_head = 0
        self._began = self.server.loop.time()

    def on_url(self, url: bytes) -> None:
        request = self._request
        if request is not None:
            request.target += url
            request.head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._request
        if request is None:
            return
        request.head_bytes += len(name) + len(value) + 4
        if not self._has_head:
            request.add_header(name.lower(), value)

    def on_headers_complete(self) -> None:
        request = self._request
        if request is None:
            return
        request.method = self._parser.get_method().decode("latin-1")
        if self._is_declined(request):
            return  # its head is fed again: see _parse
        self._has_head = True
        self._unread_head = 0
        version = self._parser.get_http_version()
        # HTTP/1.0: the response ends with the connection, and there is no 100 Continue.
        is_old = version == "1.0"
        request.keeps_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade() and not is_old
        if request.head_bytes > MAX_HEAD_BYTES:
            self._fail(HeadTooLarge("Request headers exceed 16 KB"))
            return
        if request.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            # A proxy in front may see the end of such a body elsewhere (request smuggling).
            self._fail(BadRequest("Transfer-Encoding must be chunked"))
            return
        if request.refusal is None:
            try:
                self.server.admit(request, version)
            except HeadraceError as error:
                request.refusal = error
        length = request.headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            self._fail(TooLarge("Request body exceeds 64 MB"))
        elif request.headers.get(b"expect", b"").lower() == b"100-continue" and not is_old:
            self._meet_expectation(request)

    def _meet_expectation(self, request: Request) -> None:
        """Say at once whether the body is wanted: the client waits for that. After a refusal it may come or not."""
        if request.refusal is not None:
            self._fail(request.refusal)
        elif not self.session.is_busy and not self._parcels and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        request = self._request
        if request is None:
            return
        self._unread_head = 0
        request.size += len(body)
        if request.size > MAX_BODY_BYTES:
            self._fail(TooLarge("Request body exceeds 64 MB"))
        elif request.refusal is None and request.is_known:
            request.body += body

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or self._is_declined(request):
            return
        self._request = None
        if not self._is_deaf:
            self.session.receive(request)

    def _fail(self, error: HeadraceError) -> None:
        """Send this error and ignore everything that follows."""
        if self._is_deaf:
            return
        self._is_deaf = True
        request = self._request or Request()
        self._request = None
        request.refusal = error
        request.keeps_alive = False
        self.session.receive(request)

    def eof_received(self) -> bool:
        """The client will send no more. Pending responses are still sent; long polls and streams are dropped."""
        is_answering = self.session.is_busy or bool(self._parcels)
        if self.session.is_waiting or self.takeover is not None or not is_answering:
            return False
        self._is_half_closed = True
        return self.server.tls is None

    # -- time ----------------------------------------------------------------------------------------------------------

    def _set_deadline(self) -> None:
        settings, now = self.server.settings, self.server.loop.time()
        if self._request is not None:
            began = now if self._has_head else self._began
            self._deadline = began + settings.http_request_timeout_ms / 1000
        else:
            self._deadline = now + settings.http_keep_alive_ms / 1000
        if self._timer is None:
            self._timer = self.server.loop.call_at(self._deadline, self._look_at_clock)
        elif self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = self.server.loop.call_at(self._deadline, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._timer = None
        if self.transport is None or self.takeover is not None:
            return
        is_our_turn = self._request is None or not self._valve.is_open
        if self.session.is_busy and is_our_turn and not self._valve.is_choked:
            self._begin_anew()  # the server is busy, not the client
        elif self.server.loop.time() < self._deadline:
            self._timer = self.server.loop.call_at(self._deadline, self._look_at_clock)
        elif self._request is None or self._valve.is_choked:
            self._close_idle(self.transport)
        else:
            self._fail(TooSlow("Request timeout"))
            self._set_deadline()

    def _close_idle(self, transport: asyncio.Transport) -> None:
        """Close, unless the client is still reading its responses; abort if it reads nothing at all."""
        unsent, before = transport.get_write_buffer_size(), self._unsent
        self._unsent = unsent
        if not unsent:
            transport.close()
        elif unsent == before:
            transport.abort()
        else:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Restart the timeout: the client was not the one to wait for."""
        self._began = self.server.loop.time()
        self._set_deadline()

    # -- writing -------------------------------------------------------------------------------------------------------

    @property
    def is_durable(self) -> bool:
        return self.session.is_durable

    def spoil(self, error: StorageUnavailable) -> None:
        self.session.spoil(error)

    def _encode(self, answers: list[tuple[Request, Response]]) -> bytes:
        cors = self.server.access.cors_headers
        return b"".join(
            encode_response(response, request, cors(request.headers.get(b"origin"))) for request, response in answers
        )

    def flush(self) -> None:
        answers = self.session.take()
        if answers:
            self._parcels.leave(self._encode(answers))

    def hold(self) -> Release:
        answers = self.session.take()
        fill = self._parcels.hold()

        def release(error: StorageUnavailable | None) -> None:
            if error is None:
                fill(self._encode(answers))
            else:
                fill(self._encode([(request, unsynced(response, error)) for request, response in answers]))

        return release

    def _write(self, out: bytes | bytearray) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        transport.write(out)
        if self._parcels or self.session.is_busy:
            return
        if self.session.stream is not None:
            self._take_over(self.session.stream)
        elif self.session.is_closing or self._is_half_closed:
            if self._is_deaf:
                self.hang_up()
            else:
                transport.close()
        elif not self._valve.is_open:
            self._set_reading()

    def hang_up(self) -> None:
        """Close behind what was written; a client that goes on sending gets a moment to read it."""
        self._has_heard_all = True
        if self.transport is not None:
            self.transport = part(self.transport)
            see_off(self, self.server.loop)

    def _take_over(self, begin: Callable[[HttpConnection], Takeover]) -> None:
        """All earlier responses have been sent: from now on the connection belongs to the stream."""
        self.takeover = begin(self)
        early, self._early = self._early, None
        self._valve.is_choked = self._valve.is_behind = False
        self._set_reading()
        if early:
            self.takeover.data_received(early)

    def pause_writing(self) -> None:
        if self.takeover is not None:
            self.takeover.pause_writing()
            return
        self._valve.is_choked = self.session.is_choked = True
        self._set_reading()

    def resume_writing(self) -> None:
        if self.takeover is not None:
            self.takeover.resume_writing()
            return
        self._valve.is_choked = self.session.is_choked = False
        self._set_reading()
        self.session.work_off()

    def _set_reading(self) -> None:
        self._valve.set(self.transport, self.session)

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return self.session.is_busy or (self.takeover is not None and self.takeover.is_busy)

    def hear_no_more(self) -> None:
        self._has_heard_all = True

    def close(self) -> None:
        """The server stops. Who waits for replies has as long to read them as the server takes; events are no debt."""
        if self.takeover is not None:
            self.takeover.close()
            if self.takeover.only_listens:
                self.server.loop.call_later(FAREWELL_S, self.abort)
        if self.transport is not None:
            self.transport = part(self.transport)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.transport = None
        if self.takeover is not None:
            self.takeover.connection_lost()
        self.session.close()
        self.server.left(self)


# -- the server --------------------------------------------------------------------------------------------------------


class Text:
    """A fixed text."""

    is_open = True

    def __init__(self, text: bytes) -> None:
        self._response = Response(200, text, b"text/plain; charset=utf-8")

    def serve(self, session: HttpSession, request: Request) -> Response:
        return self._response


class HttpServer(Listener[HttpConnection]):
    def __init__(self, engine: Engine, settings: Settings, ticker: Ticker, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(engine, settings, ticker, tls)
        self.access = Access(engine, settings)
        self.inbox = memoryview(bytearray(_READ_BYTES))
        """Receive buffer, shared by all connections: each copies its data out before the next one reads."""
        self.router: Router[Endpoint | Plain] = Router()
        self.hub = Hub(engine, settings, self.loop)
        self._streams = EventStreams(self.hub, settings.max_sse_clients)
        self._sockets = Sockets(self.hub, settings.max_ws_clients)
        engine.figures.transports |= {"websocket": lambda: self._sockets.count, "sse": lambda: self._streams.count}
        self._add_routes()

    def _add_routes(self) -> None:
        for endpoint in endpoints():
            self.router.add(endpoint.route.method, endpoint.route.path, endpoint)
            if endpoint.route.method == "GET" and not endpoint.spec.flags & Flag.WRITE:
                self.router.add("HEAD", endpoint.route.path, endpoint)
        for path in ("/healthz", "/live"):
            self.add_plain(path, Text(b"OK"))
        self.add_plain("/", Page(DASHBOARD / "index.html"))
        self.add_plain("/assets/{file}", Folder(DASHBOARD))
        self.add_plain("/docs", Page(API_PAGE / "index.html"))
        self.add_plain("/docs/{file}", Folder(API_PAGE))
        self.add_plain("/openapi.json", Description())
        self.add_plain("/report", Report(self.settings.report))
        for suffix in ("", "/queues/{queue}"):
            self.router.add("GET", f"/events{suffix}", self._streams)
            self.router.add("GET", f"/ws{suffix}", self._sockets)

    def add_plain(self, path: str, target: Plain) -> None:
        self.router.add("GET", path, target)
        self.router.add("HEAD", path, target)

    # -- requests ------------------------------------------------------------------------------------------------------

    def admit(self, request: Request, version: str, scheme: str | None = None) -> None:
        """Route and authorize a request as soon as its headers are complete; raises the reason if it is refused."""
        headers = request.headers
        _read_target(request)
        request.host = headers.get(b"host", b"").decode("latin-1")
        if not request.host and version != "1.0":
            raise BadRequest("The Host header is missing")
        if request.method == "OPTIONS":
            request.endpoint, request.is_known = _PREFLIGHT, True
            return
        if request.path not in HEALTH_PATHS:
            self.access.check_host(request.host)
        request.endpoint, request.parameters = self.router.find(request.method, request.path)
        is_page = not isinstance(request.endpoint, Endpoint) and request.endpoint.is_open
        if not is_page and request.path not in HEALTH_PATHS:
            self.access.check_origin(headers, request.host, scheme)
        _check_content(headers)
        request.token = self.access.token_of(headers)
        request.is_known = is_page or self.access.is_open(request.path) or self.access.check_token(request.token)

    # -- connections ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._listen(lambda: HttpConnection(self), self.settings.http_port)

    async def stop(self, time_is_up: asyncio.Event) -> None:
        self.hub.close()
        await super().stop(time_is_up)


class _Preflight:
    is_open = True

    def serve(self, session: HttpSession, request: Request) -> Response:
        return Response(204, headers=PREFLIGHT)


_PREFLIGHT: Final = _Preflight()


def _read_target(request: Request) -> None:
    try:
        target = request.target.decode("ascii")
    except UnicodeDecodeError:
        raise BadRequest("The path is not ASCII: escape other characters") from None
    if not target.startswith("/") and target != "*":
        target = _absolute_path(request.target)
    request.path, _, request.query = target.partition("#")[0].partition("?")


def _absolute_path(target: bytes) -> str:
    """Proxies may send an absolute URL."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise BadRequest("The path is not valid") from None
    return ((url.path or b"/") + (b"?" + url.query if url.query else b"")).decode("ascii")


def _check_content(headers: dict[bytes, bytes]) -> None:
    """Bodies are plain UTF-8 JSON: no forms, no other character sets, no compression."""
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    if has_body and headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise WrongContent("Content-Encoding is not supported")
    given = headers.get(b"content-type")
    if not has_body or given is None:
        return
    kind, _, options = given.decode("latin-1").partition(";")
    kind, options = kind.strip().lower(), options.strip().lower().replace('"', "")
    if kind != "application/json" and not kind.endswith("+json"):
        raise WrongContent("Content-Type must be application/json")
    if options and options != "charset=utf-8":
        raise WrongContent("The body must be UTF-8")
