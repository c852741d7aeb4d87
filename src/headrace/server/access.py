"""Access control for HTTP: tokens, and protection from foreign web pages (CSRF, DNS rebinding).

Two cases. With tokens, a request needs one of them; browsers send none by themselves, so a foreign page gains nothing.
Without tokens the server trusts its machine, and a browser on it runs pages from anywhere: so the Host must be a name
of this server (a page that rebinds its own name to 127.0.0.1 sends its own), and what a browser says about the origin
of a request (Origin, Sec-Fetch-Site) must name this server or an allowed origin.
"""

from __future__ import annotations

import base64
import binascii
import socket
from ipaddress import ip_address
from typing import Final

from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.errors import HeadraceError, NotAuthenticated

HEALTH_PATHS: Final = frozenset(("/health", "/healthz", "/live", "/ready"))
"""Open to everybody under any name: probes call by address."""

_LOOPBACK_NAMES: Final = frozenset(("localhost", "127.0.0.1", "[::1]"))
_WILDCARDS: Final = frozenset(("0.0.0.0", "::", ""))
_TOKEN_PROTOCOL: Final = "bearer."


class Forbidden(HeadraceError):
    code = "forbidden"
    status = 403


class Unconfigured(HeadraceError):
    code = "unconfigured"
    status = 503


class Access:
    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._scheme = "https" if settings.tls_cert else "http"
        self._allowed_origins = frozenset(settings.cors_allow_origin)
        self._metrics_auth = settings.metrics_auth
        self._is_wildcard = settings.bind_host in _WILDCARDS
        self._names = _LOOPBACK_NAMES | {name.lower() for name in settings.allowed_hosts} | _names_of(settings)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def token_of(self, headers: dict[bytes, bytes]) -> str | None:
        """The token of a request: `Bearer <token>`, or the token alone; of a WebSocket also among its subprotocols."""
        given = _text(headers.get(b"authorization", b"")).strip()
        if not given and headers.get(b"upgrade", b"").lower() == b"websocket":
            return _offered_token(subprotocols(headers))
        scheme, _, rest = given.partition(" ")
        token = rest.strip() if scheme.lower() == "bearer" else given
        return token or None

    def is_open(self, path: str) -> bool:
        """Whether the path needs no token. Unconfigured: it needs one, and there is none to be had."""
        if path == "/prometheus":
            if self._metrics_auth and not self._engine.tokens:
                raise Unconfigured("METRICS_AUTH is set but there are no tokens")
            return not self._metrics_auth
        return path in HEALTH_PATHS

    def check_token(self, token: str | None) -> bool:
        """Whether the request is let in; NotAuthenticated when it does not even try."""
        if not self._engine.tokens:
            return True
        if token is None:
            raise NotAuthenticated("Unauthorized")
        return self._engine.knows(token)

    # -- web pages -----------------------------------------------------------------------------------------------------

    def check_host(self, host: str) -> None:
        if not self._engine.tokens and not self._is_ours(host):
            raise Forbidden(f"Host {host or '(none)'} is not a name of this server: --allowed-hosts adds one")

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host).lower()
        if name in self._names:
            return True
        # On all interfaces any address may be ours; only names can be made to point here by others.
        return self._is_wildcard and _is_address(name)

    def check_origin(self, headers: dict[bytes, bytes], host: str, scheme: str | None = None) -> None:
        """Refuse what a page of another origin sends, unless it was allowed by name. `scheme`: if not our own."""
        if self._engine.tokens:
            return
        origin = headers.get(b"origin")
        if origin is not None:
            text = origin.decode("latin-1")
            if text != f"{scheme or self._scheme}://{host}" and not self._allows(text):
                raise Forbidden(f"Origin {text} is not allowed: --cors-allow-origin adds one")
        elif headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            # Browsers send no Origin with images, scripts and links; a GET would pull a job all the same.
            raise Forbidden("Requests from other sites are not allowed")

    def _allows(self, origin: str) -> bool:
        return origin in self._allowed_origins or "*" in self._allowed_origins

    def cors_headers(self, origin: bytes | None) -> bytes:
        """Tells the browser that this origin, and no other, may read the answer."""
        if origin is None or not self._allows(origin.decode("latin-1")):
            return b""
        return b"Access-Control-Allow-Origin: " + origin + b"\r\nVary: Origin\r\n"


def _text(value: bytes) -> str:
    """Shells write headers in UTF-8, browsers in Latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def subprotocols(headers: dict[bytes, bytes]) -> list[str]:
    """What a WebSocket client offers to speak."""
    offered = headers.get(b"sec-websocket-protocol", b"").decode("latin-1").split(",")
    return [name for name in map(str.strip, offered) if name]


def _offered_token(offered: list[str]) -> str | None:
    """Pages cannot set headers of a WebSocket but these names, in which base64url is all that a token may look like."""
    for name in offered:
        if name.startswith(_TOKEN_PROTOCOL):
            text = name.removeprefix(_TOKEN_PROTOCOL)
            try:
                return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return ""  # a wrong one, answered as slowly as any other
    return None


def _names_of(settings: Settings) -> frozenset[str]:
    bound = settings.bind_host.lower()
    if bound in _WILDCARDS:
        return frozenset((socket.gethostname().lower(),))
    return frozenset((f"[{bound}]" if ":" in bound else bound,))


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
