"""What a connection does when: options, states, when a link counts as dead, how long to wait before the next try.

Pure decisions: no sockets, no clocks, no tasks. `link` asks here and acts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    import ssl

FIRST_DELAY: Final = 0.1
LAST_DELAY: Final = 30.0
JITTER: Final = 0.3
MAX_WAITING: Final = 10_000
"""Commands that may wait for a connection or for room in the window of one link."""
MAX_BLOCKING: Final = 40
"""Commands that wait for an event, per link. A server blocks everything after the fiftieth."""


class ConnectionOptions(Struct, frozen=True, kw_only=True):
    """How to reach a server and when to consider it dead. Times are seconds."""

    host: str = "localhost"
    port: int = 6789
    token: str | Callable[[], str] | None = None
    """Sent if the server asks for one. A function is called for every new connection."""
    tls: ssl.SSLContext | None = None
    pipelining: bool = True
    max_in_flight: int = 100
    """Commands in flight per connection."""
    pool_size: int = 4
    command_timeout: float = 30.0
    connect_timeout: float = 10.0
    ping_interval: float = 30.0
    """0: no pings."""
    max_ping_failures: int = 3
    max_command_timeouts: int = 3
    """Consecutive timeouts after which the link counts as dead; 0: never."""

    def current_token(self) -> str | None:
        return self.token() if callable(self.token) else self.token


class LinkState(enum.Enum):
    DISCONNECTED = "disconnected"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"


class Vitals:
    """Counts the signs of a dead link. A half-open socket accepts writes and never replies."""

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._failed_pings = 0
        self._timeouts = 0

    def success(self) -> None:
        self._failed_pings = self._timeouts = 0

    def ping_failed(self) -> bool:
        """Whether the link is dead."""
        self._failed_pings += 1
        return self._failed_pings >= self._options.max_ping_failures

    def command_timed_out(self) -> bool:
        """Whether the link is dead."""
        self._timeouts += 1
        return 0 < self._options.max_command_timeouts <= self._timeouts


def reconnect_delay(attempt: int) -> float:
    """Seconds before the attempt-th try in a row: doubling, with jitter so that a fleet does not reconnect at once."""
    import random  # pulls in hashes and more, for something that hardly ever happens

    delay = min(FIRST_DELAY * 2.0 ** min(attempt, 16), LAST_DELAY)
    return delay * random.uniform(1 - JITTER, 1 + JITTER)
