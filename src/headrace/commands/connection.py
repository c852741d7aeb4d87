"""Commands about the connection itself: handshake, authentication, subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from headrace import __version__
from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.model import Finite, Many, ShortText, WatchedQueue

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer

PROTOCOL_VERSION = 2
CAPABILITIES = ("pipelining",)
ERROR_CODES = "error-codes"
"""A capability that a client may declare: errors then carry a `code` beside the text."""
# Clients check for this name; it says which protocol is spoken, not which program speaks it.
SERVER = "bunqueue"

AuthToken = Annotated[str, Meta(max_length=65_536, extra=dict.fromkeys(("required", "max_length"), "Invalid token"))]


class Greeting(Reply):
    protocol_version: int
    capabilities: list[str]
    server: str
    version: str


@command(Greeting, category="Monitoring")
class Hello(Command[Greeting], tag="Hello"):
    """Negotiate protocol version and capabilities. It is optional: clients may leave it out."""

    protocol_version: Finite | None = None
    capabilities: Many[ShortText] | None = None

    async def run(self, engine: Engine, peer: Peer) -> Greeting:
        peer.wants_codes = ERROR_CODES in (self.capabilities or ())
        return Greeting(
            protocol_version=PROTOCOL_VERSION,
            capabilities=list(CAPABILITIES),
            server=SERVER,
            version=__version__,
        )


@command(Ok, category="Auth", flags=Flag.OPEN | Flag.BLOCKING, errors=("Invalid token",))
class Auth(Command[Ok], tag="Auth"):
    """Authenticate the connection with a token. A later failure does not revoke an earlier success."""

    token: AuthToken

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.authenticate(self.token, peer)
        return Ok()


@command(Ok, category="Events", flags=Flag.CONNECTION)
class SubscribeEvents(Command[Ok], tag="SubscribeEvents"):
    """Send the events of one queue, or with `*` of all, over this connection; replaces an earlier subscription."""

    queue: WatchedQueue

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.follow(self.queue)
        engine.subscribe(self.queue, peer)
        return Ok()


@command(Ok, category="Events", flags=Flag.CONNECTION)
class UnsubscribeEvents(Command[Ok], tag="UnsubscribeEvents"):
    """Send no more events over this connection."""

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        engine.unsubscribe(peer)
        return Ok()
