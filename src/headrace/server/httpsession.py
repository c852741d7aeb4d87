"""One HTTP connection without its socket: requests run one after the other, responses wait for the end of the tick."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec import Struct

from headrace.commands._base import Reply
from headrace.commands.connection import Auth
from headrace.engine.engine import MAX_AUTH_FAILURES
from headrace.errors import (
    HeadraceError,
    Internal,
    InvalidCommand,
    NotAuthenticated,
    NotFound,
    RateLimited,
    Refused,
    StorageUnavailable,
)
from headrace.model import MAX_FRAME_BYTES, MAX_OUTBOX_BYTES
from headrace.server.driving import Driver
from headrace.server.exchange import Request, Response, error_response, reply_response
from headrace.server.routes import BadRequest, Endpoint, build
from headrace.server.session import TOO_LARGE, Budget
from headrace.server.ticker import Outlet

if TYPE_CHECKING:
    from headrace.server.http import HttpServer

log: Final = logging.getLogger("headrace.server")

MAX_BODY_BYTES: Final = MAX_FRAME_BYTES
MAX_PER_TICK: Final = 128
"""How many requests of one connection are answered per tick, so that it does not hold up the others."""
_COMMAND_ERRORS: Final = (InvalidCommand, NotFound, Refused)
"""Errors of the command itself, for which a route may define its own status."""


class Plain(Protocol):
    """Something at a path that is not a command. It responds at once; its response may start a stream."""

    is_open: bool

    def serve(self, session: HttpSession, request: Request) -> Response: ...


class Carrier(Outlet, Protocol):
    """What a session sends through: a socket, or an ASGI scope of the application it is mounted in."""

    server: HttpServer
    session: HttpSession
    transport: Any
    """Takes bytes (write, get_write_buffer_size, is_closing, close, abort) and gives them (pause_reading,
    resume_reading); None once it is closed."""

    def hang_up(self) -> None:
        """Close behind what was written, without losing it to a client that goes on sending."""

    def abort(self) -> None: ...


class Takeover(Protocol):
    """What a connection has become: a stream of events, a WebSocket."""

    @property
    def only_listens(self) -> bool:
        """Whether it has never asked for anything but events."""

    @property
    def is_busy(self) -> bool:
        """Whether it was asked for something that is not answered yet."""

    def data_received(self, data: bytes) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def connection_lost(self) -> None: ...
    def close(self) -> None:
        """Say the last word; then the connection is closed."""


Begin = Callable[[Carrier], Takeover]


class HttpSession(Driver[Request]):
    """Runs the requests of a connection one after the other."""

    def __init__(self, server: HttpServer, connection: Carrier, address: str, budget: Budget | None) -> None:
        super().__init__(
            server.engine,
            address,
            stir=partial(server.ticker.stir, connection),
            later=server.loop.call_soon,
            held=None,
        )
        self.server = server
        self.connection = connection
        self.is_closing = False
        self.is_choked = False
        self.stream: Begin | None = None
        self._budget = budget
        self.backlog: deque[Request] = deque()
        self._current: Request | None = None
        self._out: list[tuple[Request, Response]] = []
        self._out_bytes = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._current or self.backlog or self._out)

    @property
    def backlog_bytes(self) -> int:
        return sum([request.size for request in self.backlog])

    def receive(self, request: Request) -> None:
        """Serve it when those before it are answered; behind the last response of a connection nothing is."""
        if not self.is_closing:
            self.backlog.append(request)
            self.work_off()

    def work_off(self) -> None:
        while self.backlog and self._current is None and not self.is_closing and not self.is_choked:
            if self._out_bytes > MAX_OUTBOX_BYTES or len(self._out) >= MAX_PER_TICK:
                break
            self._current = self.backlog.popleft()
            self._serve(self._current)

    def _serve(self, request: Request) -> None:
        endpoint = request.endpoint
        if request.refusal is not None or endpoint is None:
            self._refuse(request.refusal or NotFound("Not found"), request)
        elif self._budget is not None and not self._budget.grant(1, self._engine.clock.monotonic_ms()):
            self._refuse(RateLimited(), request)
        elif not request.is_known:
            # A wrong token: let the engine refuse it, which delays repeated guesses.
            self.is_authenticated = False
            self._start(Auth(token=request.token or ""), request)
        elif isinstance(endpoint, Endpoint):
            self._run(endpoint, request)
        else:
            self._serve_plain(endpoint, request)

    def _run(self, endpoint: Endpoint, request: Request) -> None:
        try:
            command = build(endpoint, request.parameters, request.query, request.body)
        except HeadraceError as error:
            self._refuse(error, request)
            return
        except Exception:
            log.exception("a request could not be read")
            self._refuse(BadRequest("Invalid request"), request)
            return
        request.body.clear()
        self.is_authenticated = True
        self._start(command, request)

    def _serve_plain(self, endpoint: Plain, request: Request) -> None:
        try:
            response = endpoint.serve(self, request)
        except HeadraceError as error:
            self._refuse(error, request)
            return
        except Exception:
            log.exception("%s failed", request.path)
            self._refuse(Internal(), request)
            return
        self._send(response, request)

    # -- answers -------------------------------------------------------------------------------------------------------

    def _answer(self, reply: Struct, key: Request) -> None:
        assert isinstance(reply, Reply)
        assert isinstance(key.endpoint, Endpoint)
        try:
            response = reply_response(reply, key.endpoint)
        except Exception:
            log.exception("the answer to %s could not be written", key.path)
            response = error_response(Internal())
        if self._backend.sync_requests:
            self._backend.sync_requests = 0
            response.promises = True
        self._send(response, key)

    def _refuse(self, error: HeadraceError, key: Request) -> None:
        status = None
        if isinstance(error, NotAuthenticated):
            error = NotAuthenticated("Unauthorized")
            key.keeps_alive = key.keeps_alive and self.auth_failures < MAX_AUTH_FAILURES
        elif isinstance(key.endpoint, Endpoint) and key.refusal is None and isinstance(error, _COMMAND_ERRORS):
            status = key.endpoint.route.fail
        response = error_response(error, status)
        response.is_of_command = key.refusal is None
        self._send(response, key)

    def _send(self, response: Response, request: Request) -> None:
        if len(response.body) > MAX_BODY_BYTES:
            response = error_response(TOO_LARGE)
        self._out.append((request, response))
        self._out_bytes += len(response.body)
        self._current = None
        if response.begins is not None or not (response.keeps_alive and request.keeps_alive):
            self.stream = response.begins
            self.is_closing = True
            self.backlog.clear()
        self._stir()

    def _ended(self, key: Request) -> None:
        if self.backlog:
            self._later(self.work_off)

    def take(self) -> list[tuple[Request, Response]]:
        """The responses that may be sent now: called after the commit."""
        out, self._out, self._out_bytes = self._out, [], 0
        if self.backlog:
            self._later(self.work_off)
        return out

    @property
    def is_durable(self) -> bool:
        return any(response.promises for _, response in self._out)

    def spoil(self, error: StorageUnavailable) -> None:
        spoilt = error_response(error)
        self._out = [(request, spoilt if response.is_of_command else response) for request, response in self._out]

    def close(self) -> None:
        self.is_closing = True
        self.backlog.clear()
        self._out.clear()
        self._give_up()
