"""Where Valkey is: `valkey://[user:password@]host[:6379][/db][?prefix=glide&timeout=5]`.

`valkeys://` is TLS (`redis://` and `rediss://` are understood too); `valkey+cluster://a:7000,b:7001` is a cluster.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from headrace.errors import InvalidCommand
from headrace.notation import place

_SCHEMES: Final = {
    "valkey": (False, False),
    "valkeys": (True, False),
    "redis": (False, False),
    "rediss": (True, False),
    "valkey+cluster": (False, True),
    "valkeys+cluster": (True, True),
}
_OPTIONS: Final = ("prefix", "timeout", "ca", "insecure", "events")
DEFAULT_PORT: Final = 6379
MIN_EVENTS: Final = 100
MAX_EVENTS: Final = 10_000_000

Address = tuple[str, int]


class ValkeyUrl(Struct, frozen=True):
    hosts: tuple[Address, ...]
    username: str | None = None
    password: str | None = None
    db: int = 0
    prefix: str = "glide"
    timeout_s: float = 5.0
    is_tls: bool = False
    is_cluster: bool = False
    ca_file: str | None = None
    is_insecure: bool = False
    """TLS without checking who answers: for tests only."""
    events: int | None = None
    """How many entries the event stream of each queue keeps; None leaves that as it is."""

    @property
    def shown(self) -> str:
        """The URL without its password, for messages."""
        where = ",".join(f"{host}:{port}" for host, port in self.hosts)
        scheme = f"valkey{'s' if self.is_tls else ''}{'+cluster' if self.is_cluster else ''}"
        return f"{scheme}://{where}/{self.db}?prefix={self.prefix}"


_URL: Final = re.compile(r"(?P<scheme>[a-z+]+)://(?P<place>[^/?#]+)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?")


def is_valkey_url(text: str) -> bool:
    return text.partition("://")[0] in _SCHEMES


def parse_url(text: str) -> ValkeyUrl:
    # Not urlsplit: it knows one host, and refuses several of which one is an IPv6 address.
    parts = _URL.fullmatch(text)
    if parts is None or parts["scheme"] not in _SCHEMES:
        raise InvalidCommand(f"not a Valkey URL: {place(text)!r}; write valkey://host:6379/0?prefix=glide")
    if "@" in parts["path"]:
        raise InvalidCommand(f"a / in a user or password has to be written as %2F, in {place(text)!r}")
    is_tls, is_cluster = _SCHEMES[parts["scheme"]]
    credentials, _, where = parts["place"].rpartition("@")
    username, _, password = credentials.partition(":")
    hosts = tuple(_host(one, text) for one in where.split(","))
    if len(hosts) > 1 and not is_cluster:
        raise InvalidCommand(f"several hosts need valkey+cluster://, in {place(text)!r}")
    options = dict(parse_qsl(parts["query"] or "", keep_blank_values=True))
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise InvalidCommand(f"unknown option {unknown[0]!r} in {place(text)!r}; known are {', '.join(_OPTIONS)}")
    return ValkeyUrl(
        hosts,
        unquote(username) or None,
        unquote(password) or None,
        _db(parts["path"], text, is_cluster=is_cluster),
        _prefix(options.get("prefix", "glide")),
        _timeout(options.get("timeout", "5")),
        is_tls,
        is_cluster,
        options.get("ca"),
        options.get("insecure") == "1",
        _events(options.get("events")),
    )


def _host(text: str, url: str) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[^]]+\]|[^:\[\]]+)(?::(\d+))?", text)
    if match is None or not 0 < int(match[2] or DEFAULT_PORT) < 65_536:
        raise InvalidCommand(f"the address is not host:port, in {place(url)!r}")
    return match[1].strip("[]"), int(match[2] or DEFAULT_PORT)


def _db(path: str, url: str, *, is_cluster: bool) -> int:
    number = path.strip("/") or "0"
    if not number.isdigit() or (is_cluster and number != "0"):
        which = "a number and 0 in a cluster" if is_cluster else "a number"
        raise InvalidCommand(f"the database must be {which}, in {place(url)!r}")
    return int(number)


def _prefix(text: str) -> str:
    if not re.fullmatch(r"[^\s{}]{1,128}", text):
        raise InvalidCommand(f"the prefix {text!r} must have 1 to 128 characters and no spaces or braces")
    return text


def _events(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or not MIN_EVENTS <= int(text) <= MAX_EVENTS:
        raise InvalidCommand(f"events must be {MIN_EVENTS:,} to {MAX_EVENTS:,} entries, not {text!r}")
    return int(text)


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 600:
        raise InvalidCommand(f"the timeout must be 0.05 to 600 seconds, not {text!r}")
    return seconds
