"""From a URL to a client. The only module that knows both sides: sockets to a server and the engine in this process.

    sqlite:///path.db        an engine in this process on one file (sqlite:////abs/path.db for an absolute path)
    memory://                an engine in this process, gone when it ends; memory://name is shared by that name
    headrace://host:6789     a server; ?token=...; headraces:// with TLS; bunqueue:// is the same
    valkey://host:6379/0     an engine in this process on shared queues, without any server; ?prefix=glide

Connection options may be given in the query: ?pool_size=2&command_timeout=5s. The default URL is HEADRACE_URL, or
a server on this machine; the default token is HEADRACE_TOKEN. Clients of one URL share what is behind it: the last one
to close closes it.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit
from weakref import WeakValueDictionary

from msgspec import Struct

from headrace.client.channel import Channel
from headrace.client.client import Client
from headrace.client.policy import ConnectionOptions
from headrace.client.urls import SERVER_SCHEMES, connection_options, default_url
from headrace.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from headrace.nearby import Nearby

_ON_VALKEY: Final = ("valkey", "valkeys", "valkey+cluster", "valkeys+cluster", "redis", "rediss")

_Key = tuple[Any, ...]


class _Shared(Struct):
    client: Client
    users: int = 0


_lock = threading.Lock()
_shared: Final[dict[_Key, _Shared]] = {}
_known: Final[WeakValueDictionary[_Key, Client]] = WeakValueDictionary()
"""Also those that nobody uses: whoever kept a queue or a job of one can use it again when it is opened again."""


def chosen_url(url: str | None) -> str:
    """The URL, or the one that counts where none is given."""
    if not isinstance(url, str | None):
        raise ConfigError(f'a URL is a text, not {url!r}: that of a file is f"sqlite:///{{path}}"')
    return url or default_url()


def open_client(url: str | None = None, **options: Any) -> Client:
    """The client for a URL; give it back with `release_client`. It connects with the first command."""
    url = chosen_url(url)
    key = (_canonical(url), *sorted((name, repr(value)) for name, value in options.items()))
    with _lock:
        client = _known.get(key)
        if client is None:
            client = _known[key] = _make_client(url, options)
        elif client.is_closed:
            client.reopen(_make_client(url, options))
        _shared.setdefault(key, _Shared(client)).users += 1
        return client


def release_client(client: Client) -> Future[None] | None:
    """Release it. The last one closes it: the returned awaitable finishes when that is done."""
    with _lock:
        key = next((key for key, shared in _shared.items() if shared.client is client), None)
        if key is not None:
            _shared[key].users -= 1
            if _shared[key].users > 0:
                return None
            del _shared[key]
        return client.close()  # in here, so that whoever opens it next comes after it


def _new_lock() -> None:
    """In a forked child: whoever held the lock stayed with the parent."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def _canonical(url: str) -> str:
    return f"sqlite:{file_of(url).resolve()}" if _scheme_of(url) == "sqlite" else url


def _scheme_of(url: str) -> str:
    """Without looking at the rest: a cluster has several hosts, which urlsplit does not understand."""
    return url.partition("://")[0].lower()


def _make_client(url: str, options: dict[str, Any]) -> Client:
    scheme = _scheme_of(url)
    if scheme in SERVER_SCHEMES:
        chosen = connection_options(url, **options)
        return Client(partial(_open_pool, chosen), chosen.command_timeout)
    if scheme in _ON_VALKEY and not options:
        return _client_on_valkey(url)
    if scheme not in ("sqlite", "memory", *_ON_VALKEY):
        from headrace.notation import place

        wanted = "use sqlite:///file.db, memory://, headrace://host:6789 or valkey://host:6379"
        raise ConfigError(f"{place(url)!r} is not the URL of a queue: {wanted}")
    given = [name for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True)] + list(options)
    if given:
        raise ConfigError(f"{given[0]} is an option of connections to a server, not of {scheme}:// URLs")
    return Client(partial(_open_embedded, file_of(url) if scheme == "sqlite" else None))


def file_of(url: str) -> Path:
    """The file that a sqlite:// URL names."""
    parts = urlsplit(url)
    if parts.netloc:
        raise ConfigError(f"{url!r} has two slashes; a file is sqlite:///relative.db or sqlite:////absolute.db")
    path = Path(unquote(parts.path)[1:])
    if not path.name:
        raise ConfigError(f"{url!r} names no file: use for example sqlite:///jobs.db, or memory://")
    return path


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
    from headrace.backends.valkey.connection import Hopeless, is_lasting
    from headrace.embedded import EmbeddedEngine

    backend = ValkeyBackend(url)
    home = EmbeddedEngine(None, backend=backend)
    try:
        await home.start()
    except StorageUnavailable as error:
        if is_lasting(error):
            raise Hopeless(str(error)) from error
        raise
    near.open(backend)
    return home.open_peer(owns_home=True)


async def _open_embedded(path: Path | None) -> Channel:
    from headrace.embedded import EmbeddedEngine

    home = EmbeddedEngine(path)
    await home.start()
    return home.open_peer(owns_home=True)
