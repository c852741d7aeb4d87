"""One blocking connection to a server, for Spark's tasks: they have no event loop, and are short-lived.

The protocol is the client's `Conversation`; the socket and the retries are here. Only idempotent commands
go through it (reads, and pushes that carry an id with `idTtl`): when the connection breaks, it is reopened and what
was not answered is sent again, until the server has been away for `patience_s`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, TypeVar
from urllib.parse import parse_qs

from headrace.client.conversation import Conversation, Question
from headrace.client.policy import ConnectionOptions
from headrace.client.urls import SERVER_SCHEMES, connection_options, default_url
from headrace.commands._base import Command, Reply
from headrace.errors import ConfigError, HeadraceError, NotAuthenticated, Unreachable

R = TypeVar("R", bound=Reply)

PATIENCE_S: Final = 30.0
"""How long a server may be away."""
_PAUSE_S: Final = 0.2
_RECEIVED_AT_ONCE: Final = 1 << 20


def _options_of(url: str | None, token: str | None, token_env: str) -> ConnectionOptions:
    """The token that was given, else that of the URL, else that of the environment."""
    url = url or default_url()
    scheme, has_scheme, _ = url.partition("://")
    if scheme.lower() not in SERVER_SCHEMES:
        # The rest may hold a password or a token.
        found = f"{scheme}://..." if has_scheme else "a text without a scheme"
        raise ConfigError(f"the address of a server is headrace://host:6789 (with TLS headraces://), not {found}")
    if token is None and "token" not in parse_qs(url.partition("?")[2]):
        token = os.environ.get(token_env)
    return connection_options(url, **({"token": token} if token else {}))


class _Asked(Generic[R]):
    """A command until it is answered, on however many connections."""

    def __init__(self, command: Command[R]) -> None:
        self.command = command
        self.heard_by: Conversation | None = None
        self.outcome: R | HeadraceError | None = None

    def answer(self, outcome: R | HeadraceError) -> None:
        self.outcome = outcome


class Connection:
    """`ask` sends one command; `stream` and `outcomes` keep several in flight."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        token_env: str = "HEADRACE_TOKEN",
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._options = _options_of(url, token, token_env)
        self._patience_s = patience_s
        self._socket: socket.socket | None = None
        self._conversation = Conversation(self._options, _ignore)

    def ask(self, command: Command[R]) -> R:
        return next(self.stream([command], in_flight=1))

    def stream(self, commands: Iterable[Command[R]], in_flight: int) -> Iterator[R]:
        """The replies, in whatever order they come; the first refusal ends them."""
        for outcome in self.outcomes(commands, in_flight):
            if isinstance(outcome, HeadraceError):
                raise outcome
            yield outcome

    def outcomes(self, commands: Iterable[Command[R]], in_flight: int) -> Iterator[R | HeadraceError]:
        """The replies and refusals, in whatever order they come."""
        source = iter(commands)
        under_way: list[_Asked[R]] = []
        while True:
            # Outside of `_attend`: an error of whoever makes the commands is not one of the connection.
            while len(under_way) < in_flight and (command := next(source, None)) is not None:
                under_way.append(_Asked(command))
                self._attend(under_way, waits=False)
            if not under_way:
                return
            self._attend(under_way, waits=True)
            yield from [asked.outcome for asked in under_way if asked.outcome is not None]
            under_way = [asked for asked in under_way if asked.outcome is None]

    def _attend(self, under_way: list[_Asked[R]], *, waits: bool) -> None:
        """Send what has not been sent on this connection yet and, if `waits`, wait for a reply."""
        away_since: float | None = None
        while True:
            try:
                self._open()
                for asked in under_way:
                    if asked.heard_by is not self._conversation:
                        asked.heard_by = self._conversation
                        self._conversation.ask(Question(asked.command, asked.answer))
                        self._send()
                while waits and all(asked.outcome is None for asked in under_way):
                    self._hear()
                return
            except OSError as error:
                self.close()
                away_since = time.monotonic() if away_since is None else away_since
                if time.monotonic() - away_since >= self._patience_s:
                    raise self._despair(error) from error
            except BaseException:
                self.close()
                raise
            time.sleep(min(_PAUSE_S, self._patience_s))

    def _open(self) -> None:
        if self._socket is not None:
            return
        options = self._options
        timeout = min(options.connect_timeout, self._patience_s)
        self._socket = socket.create_connection((options.host, options.port), timeout)
        # A server that says nothing for so long is given up, and asked again on another connection.
        self._socket.settimeout(2 * self._patience_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if options.tls is not None:
            self._socket = options.tls.wrap_socket(self._socket, server_hostname=options.host)
        self._conversation = Conversation(options, _ignore)
        self._conversation.greet()
        self._send()
        while not self._conversation.is_ready:
            self._hear()
            if (failure := self._conversation.failure) is not None:
                is_locked = isinstance(failure, NotAuthenticated)
                raise NotAuthenticated(f"{self._where} does not let us in: {failure}") if is_locked else failure

    @property
    def _where(self) -> str:
        return f"the server at {self._options.host}:{self._options.port}"

    def _despair(self, error: OSError) -> Unreachable:
        return Unreachable(f"no answer from {self._where} for {self._patience_s:.0f} s: {error}")

    def _send(self) -> None:
        assert self._socket is not None
        if self._conversation.has_output:
            self._socket.sendall(self._conversation.take())

    def _hear(self) -> None:
        assert self._socket is not None
        data = self._socket.recv(_RECEIVED_AT_ONCE)
        if not data:
            raise ConnectionError("it closed the connection")
        self._conversation.receive(data)
        self._send()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ignore(_event: Any) -> None:
    """Nothing was subscribed to."""
