"""From the URL of a server to the options of a connection: ?token=...&command_timeout=5s, headraces:// with TLS.

To add an option: a field of `ConnectionOptions`. Its type says how its text is read; its limits stand in `_check`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from headrace.client.policy import ConnectionOptions
from headrace.durations import seconds
from headrace.errors import ConfigError, InvalidCommand

DEFAULT_URL: Final = "headrace://localhost:6789"
SERVER_SCHEMES: Final = {"headrace": False, "bunqueue": False, "headraces": True, "bunqueues": True}
"""The schemes of servers, and whether they mean TLS."""
_AT_LEAST_ONE: Final = ("pool_size", "max_in_flight", "max_ping_failures")
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}


def default_url() -> str:
    """The URL where none is given."""
    return os.environ.get("HEADRACE_URL") or DEFAULT_URL


def connection_options(url: str, **options: Any) -> ConnectionOptions:
    """The options of a URL, and those given by name on top of them. Without a token HEADRACE_TOKEN counts."""
    known = dict(zip(ConnectionOptions.__struct_fields__, ConnectionOptions.__struct_defaults__, strict=True))
    chosen: dict[str, Any] = {"token": os.environ.get("HEADRACE_TOKEN") or None}
    try:
        parts = urlsplit(url)
        if parts.hostname:
            chosen["host"] = parts.hostname
        if parts.port is not None:
            chosen["port"] = parts.port
    except ValueError as error:
        # Without the query: a token has no place in a message.
        raise ConfigError(f"{url.partition('?')[0]!r} is not an address: {error}") from None
    if "@" in parts.netloc:
        raise ConfigError(f"a {parts.scheme}:// URL has no user: write ?token=... at its end")
    if parts.path not in ("", "/"):
        raise ConfigError(f"a {parts.scheme}:// URL has no path, and this one has {parts.path!r}")
    for name, value in [*parse_qsl(parts.query, keep_blank_values=True), *options.items()]:
        if name not in known:
            raise ConfigError(f"unknown connection option {name!r}; there are: {', '.join(sorted(known))}")
        chosen[name] = _converted(name, value, known[name])
    if SERVER_SCHEMES[parts.scheme] and "tls" not in chosen:
        import ssl

        chosen["tls"] = ssl.create_default_context()
    return ConnectionOptions(**chosen)


def _converted(name: str, value: Any, default: Any) -> Any:
    try:
        return _check(name, _CONVERTERS.get(type(default), _unchanged)(name, value))
    except (ValueError, KeyError, TypeError, InvalidCommand):
        raise ConfigError(f"{name}={value!r} is not understood") from None


def _unchanged(name: str, value: Any) -> Any:
    if name == "tls" and isinstance(value, str):
        raise ConfigError("tls takes an ssl.SSLContext; in a URL write headraces:// instead")
    return value


def _span(name: str, value: Any) -> float:
    return seconds(float(value) if isinstance(value, str) and value.replace(".", "").isdigit() else value, name)


def _whole(name: str, value: Any) -> int:
    number = int(value)
    if isinstance(value, float) and value != number:
        raise ValueError
    return number


_CONVERTERS: Final[dict[type, Callable[[str, Any], Any]]] = {
    bool: lambda name, value: value if isinstance(value, bool) else _TRUTHS[value],
    int: _whole,
    float: _span,
}


def _check(name: str, value: Any) -> Any:
    if name in _AT_LEAST_ONE and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
    if name in ("command_timeout", "connect_timeout") and value == 0:
        raise ConfigError(f"{name} must be longer than 0")
    if name == "port" and not 0 < value < 65536:
        raise ConfigError(f"port must be from 1 to 65535, not {value}")
    if name == "max_command_timeouts" and value < 0:
        raise ConfigError(f"{name} must be 0 (never) or more, not {value}")
    return value
