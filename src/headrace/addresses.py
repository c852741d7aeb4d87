"""Where a webhook may point: the guard against requests into our own network.

Two checks with one set of rules. `check_webhook_url` reads a URL the way browsers and HTTP clients do (an
address has many spellings: 0x7f.1, 017700000001 and [::ffff:7f00:1] are all 127.0.0.1) and refuses what names
this machine or a private network. `check_address` applies the same rules to what DNS answered, just before a
delivery connects. To block a further range add a row to _BLOCKED_V4 or _BLOCKED_V6; the first match gives the
text.
"""

from __future__ import annotations

import re
import unicodedata
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final
from urllib.parse import unquote_to_bytes

from headrace.errors import InvalidCommand

MAX_URL_LENGTH: Final = 2048

_INVALID: Final = "Invalid URL format"
_LOCALHOST_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_LOCALHOST_ADDRESSES: Final = frozenset({IPv4Address("127.0.0.1"), IPv6Address("::1")})

_BLOCKED_V4: Final = [
    (IPv4Network(network), kind)
    for network, kind in [
        ("0.0.0.0/8", "unspecified IP"),
        ("10.0.0.0/8", "private IP"),
        ("172.16.0.0/12", "private IP"),
        ("192.168.0.0/16", "private IP"),
        ("169.254.0.0/16", "link-local IP"),
        ("127.0.0.0/8", "loopback IP"),
        ("100.64.0.0/10", "private IP"),  # carrier NAT, and the metadata service of one cloud
        ("192.0.0.0/24", "reserved IP"),  # protocol assignments, and the metadata service of another
        ("198.18.0.0/15", "private IP"),  # laboratory networks
        ("224.0.0.0/4", "multicast IP"),
        ("240.0.0.0/4", "reserved IP"),
    ]
]
_BLOCKED_V6: Final = [
    (IPv6Network(network), kind)
    for network, kind in [
        ("::/128", "unspecified IP"),
        ("::1/128", "loopback IP"),
        ("fc00::/7", "private (ULA) IP"),
        ("fe80::/10", "link-local IP"),
        ("fec0::/10", "private IP"),
        ("64:ff9b:1::/48", "private IP"),  # NAT64 of a single site
        ("ff00::/8", "multicast IP"),
    ]
]
# IPv6 ranges that carry an IPv4 address, and how far right it has to be shifted. Traffic to them ends there.
_CARRIERS: Final = [
    (IPv6Network("::ffff:0:0/96"), 0),  # mapped
    (IPv6Network("::/96"), 0),  # compatible
    (IPv6Network("::ffff:0:0:0/96"), 0),  # translated
    (IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (IPv6Network("2002::/16"), 80),  # 6to4
]
_TEREDO: Final = IPv6Network("2001::/32")

_EDGES: Final = "".join(map(chr, range(0x21)))
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_AUTHORITY_END: Final = re.compile(r"[/\\?#]")
_BAD_IN_HOST: Final = re.compile(r"[\x00-\x20#%/:<>?@\[\\\]^|\x7f]")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
# What host names lose before they are looked up: soft hyphen, zero-width marks, variation selectors.
_INVISIBLE: Final = re.compile("[\u00ad\u034f\u180b-\u180d\u200b-\u200d\u2060\u2064\ufe00-\ufe0f\ufeff]")


def check_webhook_url(url: str) -> None:
    """Raise InvalidCommand unless `url` may receive webhooks. Does not ask DNS."""
    if not url:
        raise InvalidCommand("Webhook URL is required")
    if len(url) > MAX_URL_LENGTH:
        raise InvalidCommand(f"Webhook URL too long (max {MAX_URL_LENGTH} characters)")
    host = _host_of(url)
    if isinstance(host, str):
        _check_name(host)
    elif host in _LOCALHOST_ADDRESSES:
        raise InvalidCommand("Webhook URL cannot point to localhost")
    else:
        check_address(host)


def check_address(ip: IPv4Address | IPv6Address) -> None:
    """Raise InvalidCommand when `ip` is this machine, a private network or nothing one can call."""
    if isinstance(ip, IPv6Address):
        _refuse_inside(ip, _BLOCKED_V6)
        carried = _carried_v4(ip)
        if carried is None:
            return
        ip = carried
    _refuse_inside(ip, _BLOCKED_V4)


def _refuse_inside(
    ip: IPv4Address | IPv6Address, blocked: list[tuple[IPv4Network, str]] | list[tuple[IPv6Network, str]]
) -> None:
    for network, kind in blocked:
        if ip in network:
            raise InvalidCommand(f"Webhook URL cannot point to {kind}")


def _carried_v4(ip: IPv6Address) -> IPv4Address | None:
    bits = int(ip)
    if ip in _TEREDO:
        return IPv4Address(~bits & 0xFFFFFFFF)
    for network, shift in _CARRIERS:
        if ip in network:
            return IPv4Address((bits >> shift) & 0xFFFFFFFF)
    return None


def _check_name(name: str) -> None:
    name = name.rstrip(".")
    if name in _LOCALHOST_NAMES or name.endswith(".localhost"):
        raise InvalidCommand("Webhook URL cannot point to localhost")
    if name.endswith(".internal"):
        raise InvalidCommand("Webhook URL cannot point to cloud metadata endpoints")


def _host_of(url: str) -> str | IPv4Address | IPv6Address:
    """The host as a client would connect to it; a name comes back in lower case."""
    text = re.sub(r"[\t\r\n]", "", url.strip(_EDGES))
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise InvalidCommand(_INVALID)
    if scheme[1].lower() not in ("http", "https"):
        raise InvalidCommand("Webhook URL must use http or https protocol")
    # Clients take any number of slashes of either kind, even none, as the two that belong there.
    authority = _AUTHORITY_END.split(text[scheme.end() :].lstrip("/\\"), maxsplit=1)[0]
    host, port = _split_port(authority.rpartition("@")[2])
    if not host or (port and not _is_port(port)):
        raise InvalidCommand(_INVALID)
    return _v6(host[1:-1]) if host.startswith("[") else _name_or_v4(host)


def _split_port(host_and_port: str) -> tuple[str, str]:
    if host_and_port.startswith("["):
        host, bracket, rest = host_and_port.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise InvalidCommand(_INVALID)
        return host + bracket, rest[1:]
    host, _, port = host_and_port.partition(":")
    return host, port


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text.lstrip("0")) <= 5 and int(text) <= 65535


def _v6(text: str) -> IPv6Address:
    if "%" in text:  # a zone id names an interface of this machine
        raise InvalidCommand(_INVALID)
    try:
        return IPv6Address(text)
    except AddressValueError:
        raise InvalidCommand(_INVALID) from None


def _name_or_v4(host: str) -> str | IPv4Address:
    name = _plain_name(host)
    labels = name.split(".")
    if labels[-1] == "" and len(labels) > 1:
        labels.pop()
    # A last label that is a number makes the whole host a number, or nonsense.
    return _v4(labels) if _NUMBER.fullmatch(labels[-1]) else name


def _plain_name(host: str) -> str:
    """Undo percent-encoding and look-alike characters, so that a name has one spelling."""
    try:
        decoded = unquote_to_bytes(host).decode("utf-8")
        folded = unicodedata.normalize("NFKC", _INVISIBLE.sub("", decoded)).casefold()
        name = unicodedata.normalize("NFKC", folded).replace("\u3002", ".")
        ascii_name = name if name.isascii() else name.encode("idna").decode("ascii")
    except UnicodeError:
        raise InvalidCommand(_INVALID) from None
    if not ascii_name or _BAD_IN_HOST.search(ascii_name):
        raise InvalidCommand(_INVALID)
    return ascii_name


def _v4(labels: list[str]) -> IPv4Address:
    """One to four numbers, decimal, octal or hexadecimal; the last one fills all bytes that are left."""
    if len(labels) > 4:
        raise InvalidCommand(_INVALID)
    *firsts, last = map(_number, labels)
    if any(first > 255 for first in firsts) or last >= 256 ** (4 - len(firsts)):
        raise InvalidCommand(_INVALID)
    bits = last
    for position, first in enumerate(firsts):
        bits += first << (24 - 8 * position)
    return IPv4Address(bits)


def _number(label: str) -> int:
    try:
        if label.startswith("0x"):
            return int(label[2:] or "0", 16)
        if not (label.isascii() and label.isdigit()):
            raise ValueError(label)
        return int(label, 8 if label.startswith("0") and label != "0" else 10)
    except ValueError:
        raise InvalidCommand(_INVALID) from None
