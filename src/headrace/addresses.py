"""Where a webhook may point: the guard against server-side request forgery (SSRF).

Two checks with one set of rules. `check_webhook_url` reads a URL the way browsers and HTTP clients do (an
address has many spellings: 0x7f.1, 017700000001 and [::ffff:7f00:1] are all 127.0.0.1) and refuses what names
this machine or a private network. `check_address` applies the same rules to what DNS answered, just before a
delivery connects. `UrlRules` is what the operator decided: internal networks that may be called after all, and
whether plain http is allowed. To block a further range add a row to _BLOCKED_V4 or _BLOCKED_V6; the first match gives
the text.
"""

from __future__ import annotations

import re
import unicodedata
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from headrace.errors import InvalidCommand

MAX_URL_LENGTH: Final = 2048

Address = IPv4Address | IPv6Address

_INVALID: Final = "Invalid URL format"
_LOCALHOST_NAMES: Final = frozenset({"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"})
_METADATA_NAME: Final = "metadata.google.internal"
_LOCALHOST_ADDRESSES: Final[frozenset[Address]] = frozenset({IPv4Address("127.0.0.1"), IPv6Address("::1")})

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
_PLAIN_IN_TARGET: Final = "!$%&'()*+,-./:;=?@[]_~|^"
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_BAD_IN_HOST: Final = re.compile(r"[\x00-\x20#%/:<>?@\[\\\]^|\x7f]")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
# What host names lose before they are looked up: soft hyphen, zero-width marks, variation selectors.
_INVISIBLE: Final = re.compile("[\u00ad\u034f\u180b-\u180d\u200b-\u200d\u2060\u2064\ufe00-\ufe0f\ufeff]")


class UrlRules(NamedTuple):
    """What the operator of this server decided about webhooks."""

    allow: tuple[IPv4Network | IPv6Network, ...] = ()
    require_https: bool = False

    def allows(self, ip: Address) -> bool:
        mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
        return any(ip in network or (mapped is not None and mapped in network) for network in self.allow)

    @property
    def allows_localhost(self) -> bool:
        return any(self.allows(ip) for ip in _LOCALHOST_ADDRESSES)


DEFAULT_RULES: Final = UrlRules()


class Destination(NamedTuple):
    """A URL taken apart the way it will be called: nothing in it needs to be read a second time."""

    scheme: str
    host: str | Address
    port: int
    target: str
    """Path and query, ready for the request line."""
    credentials: str
    """`user:password` as written in the URL, or nothing."""

    @property
    def authority(self) -> str:
        """What belongs into the Host header."""
        host = f"[{self.host}]" if isinstance(self.host, IPv6Address) else str(self.host)
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def check_webhook_url(url: str, rules: UrlRules = DEFAULT_RULES) -> Destination:
    """Raise InvalidCommand unless `url` may receive webhooks. Does not ask DNS."""
    if not url:
        raise InvalidCommand("Webhook URL is required")
    if len(url) > MAX_URL_LENGTH:
        raise InvalidCommand(f"Webhook URL too long (max {MAX_URL_LENGTH} characters)")
    destination = _take_apart(url, rules)
    host = destination.host
    if isinstance(host, str):
        _check_name(host, rules)
    elif host in _LOCALHOST_ADDRESSES and not rules.allows(host):
        raise InvalidCommand("Webhook URL cannot point to localhost")
    else:
        check_address(host, rules)
    return destination


def check_address(ip: Address, rules: UrlRules = DEFAULT_RULES) -> None:
    """Raise InvalidCommand when `ip` is this machine, a private network or nothing one can call."""
    if rules.allows(ip):
        return
    if isinstance(ip, IPv6Address):
        _refuse_inside(ip, _BLOCKED_V6)
        carried = _carried_v4(ip)
        if carried is None:
            return
        ip = carried
    _refuse_inside(ip, _BLOCKED_V4)


def _refuse_inside(ip: Address, blocked: list[tuple[IPv4Network, str]] | list[tuple[IPv6Network, str]]) -> None:
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


def _check_name(name: str, rules: UrlRules) -> None:
    name = name.rstrip(".")
    if (name in _LOCALHOST_NAMES or name.endswith(".localhost")) and not rules.allows_localhost:
        raise InvalidCommand("Webhook URL cannot point to localhost")
    # On premises such names are ordinary; there it is the address behind the name that decides, when it is called.
    if name == _METADATA_NAME or (name.endswith(".internal") and not rules.allow):
        raise InvalidCommand("Webhook URL cannot point to cloud metadata endpoints")


def _take_apart(url: str, rules: UrlRules) -> Destination:
    """The parts as a client would use them; a name comes back in lower case."""
    text = re.sub(r"[\t\r\n]", "", url.strip(_EDGES))
    match = _SCHEME.match(text)
    if match is None:
        raise InvalidCommand(_INVALID)
    scheme = match[1].lower()
    if scheme not in _DEFAULT_PORTS:
        raise InvalidCommand("Webhook URL must use http or https protocol")
    # Clients take any number of slashes of either kind, even none, as the two that belong there.
    text = text[match.end() :].lstrip("/\\")
    authority = _AUTHORITY_END.split(text, maxsplit=1)[0]
    credentials, _, host_and_port = authority.rpartition("@")
    host, port = _split_port(host_and_port)
    if not host or (port and not _is_port(port)):
        raise InvalidCommand(_INVALID)
    place = _v6(host[1:-1]) if host.startswith("[") else _name_or_v4(host)
    if rules.require_https and scheme != "https":
        raise InvalidCommand("Webhook URL must use https")
    number = int(port) if port else _DEFAULT_PORTS[scheme]
    return Destination(scheme, place, number, _target(text[len(authority) :]), credentials)


def _target(text: str) -> str:
    path, mark, query = text.partition("#")[0].partition("?")
    path = path.replace("\\", "/")
    return quote((path or "/") + mark + query, safe=_PLAIN_IN_TARGET, errors="replace")


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
