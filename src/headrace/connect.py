"""From a URL to a client. The only module that knows both sides: sockets to a server and the engine in this process.

    sqlite:///path.db        an engine in this process on one file (sqlite:////abs/path.db for an absolute path)
    memory://                an engine in this process, gone with it; memory://name is shared by that name
    headrace://host:6789     a server; ?token=...; headraces:// with TLS; bunqueue:// is the same
    valkey://host:6379/0     an engine in this process on shared queues, without any server; ?prefix=glide

Options of a connection may stand in the query: ?pool_size=2&command_timeout=5s. Without a URL that of HEADRACE_URL is
meant, or a server on this machine; without a token that of HEADRACE_TOKEN. Clients of one URL share what is behind it:
it is closed by the last one that lets go.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from headrace.client.channel import Channel
from headrace.client.client import Client
from headrace.client.policy import ConnectionOptions
from headrace.durations import seconds
from headrace.errors import ConfigError, InvalidCommand

if TYPE_CHECKING:
    from headrace.nearby import Nearby

DEFAULT_URL: Final = "headrace://localhost:6789"
_REMOTE: Final = {"headrace": False, "bunqueue": False, "headraces": True, "bunqueues": True}
_AT_LEAST_ONE: Final = ("pool_size", "max_in_flight", "max_ping_failures")
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}

_ON_VALKEY: Final = ("valkey", "valkeys", "valkey+cluster", "valkeys+cluster", "redis", "rediss")

_Key = tuple[Any, ...]


class _Shared(Struct):
    client: Client
    users: int = 0


_lock = threading.Lock()
_shared: Final[dict[_Key, _Shared]] = {}


def open_client(url: str | None = None, **options: Any) -> Client:
    """The client for a URL; give it back with `release_client`. Nothing is connected before somebody asks."""
    url = url or os.environ.get("HEADRACE_URL") or DEFAULT_URL
    key = (_canonical(url), *sorted((name, repr(value)) for name, value in options.items()))
    with _lock:
        shared = _shared.get(key)
        if shared is None or shared.client.is_closed:
            shared = _shared[key] = _Shared(_make_client(url, options))
        shared.users += 1
        return shared.client


def release_client(client: Client) -> bool:
    """Whether it was the last one: then the client has to be closed."""
    with _lock:
        key = next((key for key, shared in _shared.items() if shared.client is client), None)
        if key is None:
            return True
        _shared[key].users -= 1
        is_last = _shared[key].users == 0
        if is_last:
            del _shared[key]
        return is_last


def _new_lock() -> None:
    """In a forked child: whoever held the lock stayed with the parent."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def _canonical(url: str) -> str:
    return f"sqlite:{_file_of(url).resolve()}" if _scheme_of(url) == "sqlite" else url


def _scheme_of(url: str) -> str:
    """Without looking at the rest: a cluster has several hosts, which urlsplit does not understand."""
    return url.partition("://")[0].lower()


def _make_client(url: str, options: dict[str, Any]) -> Client:
    scheme = _scheme_of(url)
    if scheme in _REMOTE:
        chosen = connection_options(url, **options)
        return Client(partial(_open_pool, chosen), chosen.command_timeout)
    if scheme in _ON_VALKEY and not options:
        return _client_on_valkey(url)
    if scheme not in ("sqlite", "memory", *_ON_VALKEY):
        raise ConfigError(
            f"{url!r} is not the URL of a queue: use sqlite:///file.db, memory://, headrace://host:6789 or valkey://host:6379"
        )
    given = [name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)] + list(options)
    if given:
        raise ConfigError(f"{given[0]} is an option of connections to a server, not of {scheme}:// URLs")
    return Client(partial(_open_embedded, _file_of(url) if scheme == "sqlite" else None))


def _file_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigError(f"{url!r} has two slashes; a file is sqlite:///relative.db or sqlite:////absolute.db")
    path = Path(unquote(parts.path)[1:])
    if not path.name:
        raise ConfigError(f"{url!r} names no file: use for example sqlite:///jobs.db, or memory://")
    return path


# -- options of connections --------------------------------------------------------------------------------------------


def connection_options(url: str, **options: Any) -> ConnectionOptions:
    """The options of a URL, and those given by name on top of them."""
    known = dict(zip(ConnectionOptions.__struct_fields__, ConnectionOptions.__struct_defaults__, strict=True))
    chosen: dict[str, Any] = {"token": os.environ.get("HEADRACE_TOKEN") or None}
    try:
        parts = urlsplit(url)
        if parts.hostname:
            chosen["host"] = parts.hostname
        if parts.port is not None:
            chosen["port"] = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not an address: {error}") from None
    for name, value in [*parse_qsl(parts.query, keep_blank_values=True), *options.items()]:
        if name not in known:
            raise ConfigError(f"unknown connection option {name!r}; there are: {', '.join(sorted(known))}")
        chosen[name] = _converted(name, value, known[name])
    if _REMOTE[parts.scheme] and "tls" not in chosen:
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


async def _open_pool(options: ConnectionOptions) -> Channel:
    from headrace.client.pool import Pool

    pool = Pool(options)
    try:
        await pool.start()
    except BaseException:
        await pool.close()
        raise
    return pool


def _client_on_valkey(url: str) -> Client:
    try:
        from headrace.nearby import Nearby
    except ImportError as error:
        raise ConfigError(f'{error.name} is missing: pip install "headrace[valkey]"') from error
    near = Nearby()
    return Client(partial(_open_on_valkey, url, near), near=near)


async def _open_on_valkey(url: str, near: Nearby) -> Channel:
    from headrace.backends.valkey.backend import ValkeyBackend
    from headrace.embedded import EmbeddedEngine

    backend = ValkeyBackend(url)
    home = EmbeddedEngine(None, backend=backend)
    await home.start()
    near.open(backend)
    return home.open_peer(owns_home=True)


async def _open_embedded(path: Path | None) -> Channel:
    from headrace.embedded import EmbeddedEngine

    home = EmbeddedEngine(path)
    await home.start()
    return home.open_peer(owns_home=True)
