"""From a URL to a client. The only module that knows both sides: sockets to a server and the engine in this process.

    sqlite:///path.db        an engine in this process on one file (sqlite:////abs/path.db for an absolute path)
    memory://                an engine in this process, gone with it; memory://name is shared by that name
    headrace://host:6789     a server; ?token=...; headraces:// with TLS; bunqueue:// is the same
    valkey://host:6379/0     an engine in this process on shared queues, without any server; ?prefix=glide

Options of a connection may stand in the query: ?pool_size=2&command_timeout=5s. Clients of one URL share what is
behind it.
"""

from __future__ import annotations

import dataclasses
import ssl
import threading
import typing
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from headrace.client.channel import Channel
from headrace.client.client import Client
from headrace.client.policy import ConnectionOptions
from headrace.config import ConfigError
from headrace.durations import seconds

DEFAULT_URL: Final = "headrace://localhost:6789"
_REMOTE: Final = {"headrace": False, "bunqueue": False, "headraces": True, "bunqueues": True}
_ON_VALKEY: Final = ("valkey", "valkeys", "valkey+cluster", "valkeys+cluster", "redis", "rediss")
_SPANS: Final = frozenset(("command_timeout", "connect_timeout", "ping_interval"))


class _Shared(typing.NamedTuple):
    client: Client
    users: list[object]


_lock: Final = threading.Lock()
_shared: Final[dict[tuple[Any, ...], _Shared]] = {}


def open_client(url: str = DEFAULT_URL, **options: Any) -> Client:
    """The client for a URL; give it back with `release_client`. Nothing is connected before somebody asks."""
    key = (_canonical(url), *sorted((name, repr(value)) for name, value in options.items()))
    with _lock:
        shared = _shared.get(key)
        if shared is None or shared.client.is_closed:
            shared = _shared[key] = _Shared(_make_client(url, options), [])
        shared.users.append(key)
        return shared.client


def release_client(client: Client) -> bool:
    """Whether it was the last one: then the client has to be closed."""
    with _lock:
        for key, shared in _shared.items():
            if shared.client is client:
                shared.users.pop()
                if not shared.users:
                    del _shared[key]
                return not shared.users
    return True


def _canonical(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return f"sqlite:{_file_of(url).resolve()}"
    return url


def _make_client(url: str, options: dict[str, Any]) -> Client:
    scheme = urlsplit(url).scheme
    if scheme in _REMOTE:
        chosen = connection_options(url, **options)
        return Client(lambda: _open_pool(chosen), chosen.command_timeout)
    if options:
        raise ConfigError(f"{next(iter(options))} is an option of connections to a server, not of {scheme}:// URLs")
    if scheme == "sqlite":
        path = _file_of(url)
        return Client(lambda: _open_embedded(path))
    if scheme == "memory":
        return Client(lambda: _open_embedded(None))
    if scheme in _ON_VALKEY:
        return Client(lambda: _open_on_valkey(url))
    raise ConfigError(
        f"{url!r} is no URL of a queue: use sqlite:///file.db, memory://, headrace://host:6789 or valkey://host:6379"
    )


def _file_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigError(f"{url!r} has two slashes; a file is sqlite:///relative.db or sqlite:////absolute.db")
    path = unquote(parts.path)[1:]
    if not path:
        raise ConfigError(f"{url!r} names no file: use for example sqlite:///jobs.db, or memory://")
    return Path(path)


def connection_options(url: str, **options: Any) -> ConnectionOptions:
    """The options of a URL, and those given by name on top of them."""
    parts = urlsplit(url)
    known = {field.name for field in dataclasses.fields(ConnectionOptions)}
    chosen: dict[str, Any] = {}
    try:
        if parts.hostname:
            chosen["host"] = parts.hostname
        if parts.port:
            chosen["port"] = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no address: {error}") from None
    for name, value in [*parse_qsl(parts.query), *options.items()]:
        if name not in known:
            raise ConfigError(f"unknown connection option {name!r}; there are: {', '.join(sorted(known))}")
        chosen[name] = _converted(name, value)
    if _REMOTE[parts.scheme] and "tls" not in chosen:
        chosen["tls"] = ssl.create_default_context()
    return ConnectionOptions(**chosen)


def _converted(name: str, value: Any) -> Any:
    default = getattr(ConnectionOptions(), name)
    try:
        if name in _SPANS:
            return seconds(float(value) if isinstance(value, str) and value.replace(".", "").isdigit() else value, name)
        if isinstance(default, bool):
            return value if isinstance(value, bool) else {"true": True, "1": True, "false": False, "0": False}[value]
        return int(value) if isinstance(default, int) else value
    except (ValueError, KeyError):
        raise ConfigError(f"{name}={value!r} is not understood") from None


async def _open_pool(options: ConnectionOptions) -> Channel:
    from headrace.client.pool import Pool

    pool = Pool(options)
    try:
        await pool.start()
    except BaseException:
        await pool.close()
        raise
    return pool


async def _open_on_valkey(url: str) -> Channel:
    try:
        from headrace.backends.valkey.backend import ValkeyBackend
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install headrace[valkey]") from error
    from headrace.embedded import EmbeddedEngine

    home = EmbeddedEngine(None, backend=ValkeyBackend(url))
    await home.start()
    return home.open_peer(owns_home=True)


async def _open_embedded(path: Path | None) -> Channel:
    from headrace.embedded import EmbeddedEngine

    home = EmbeddedEngine(path)
    await home.start()
    return home.open_peer(owns_home=True)
