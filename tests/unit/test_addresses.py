"""Webhook addresses: every spelling of a forbidden host is refused with the text of the protocol."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.addresses import MAX_URL_LENGTH, check_address, check_webhook_url
from headrace.errors import InvalidCommand

INVALID = "Invalid URL format"
PROTOCOL = "Webhook URL must use http or https protocol"
LOCALHOST = "localhost"
LOOPBACK = "loopback IP"
UNSPECIFIED = "unspecified IP"
PRIVATE = "private IP"
ULA = "private (ULA) IP"
LINK_LOCAL = "link-local IP"
METADATA = "cloud metadata endpoints"
MULTICAST = "multicast IP"
RESERVED = "reserved IP"

FORBIDDEN_HOSTS = [
    # names
    ("localhost", LOCALHOST),
    ("LOCALHOST", LOCALHOST),
    ("LocalHost.", LOCALHOST),
    ("api.localhost", LOCALHOST),
    ("api.localhost.", LOCALHOST),
    ("%6c%6Fcalhost", LOCALHOST),
    ("\u2113ocalhost", LOCALHOST),
    ("ｌｏｃａｌｈｏｓｔ", LOCALHOST),  # noqa: RUF001 (full-width letters are the point)
    ("local\u00adhost", LOCALHOST),
    ("local\u200bhost", LOCALHOST),
    ("localhost.localdomain", LOCALHOST),
    ("ip6-localhost", LOCALHOST),
    ("metadata.google.internal", METADATA),
    ("METADATA.google.internal.", METADATA),
    ("db.internal", METADATA),
    ("metadata。google。internal", METADATA),
    # 127.0.0.1 in its many spellings
    ("127.0.0.1", LOCALHOST),
    ("127.0.0.1.", LOCALHOST),
    ("127.1", LOCALHOST),
    ("127.0.1", LOCALHOST),
    ("2130706433", LOCALHOST),
    ("017700000001", LOCALHOST),
    ("0x7f000001", LOCALHOST),
    ("0X7F.1", LOCALHOST),
    ("0177.0.0.1", LOCALHOST),
    ("0x7f.0.0.0x1", LOCALHOST),
    ("①②⑦.⓪.⓪.①", LOCALHOST),
    ("127。0。0。1", LOCALHOST),
    ("１２７．０．０．１", LOCALHOST),  # noqa: RUF001
    ("127.0.0.%31", LOCALHOST),
    ("[::1]", LOCALHOST),
    ("[0:0:0:0:0:0:0:1]", LOCALHOST),
    ("user:secret@127.0.0.1", LOCALHOST),
    ("example.com@127.0.0.1", LOCALHOST),
    ("a@b@127.0.0.1", LOCALHOST),
    # the rest of the forbidden IPv4 ranges
    ("127.0.0.2", LOOPBACK),
    ("127.255.255.255", LOOPBACK),
    ("0", UNSPECIFIED),
    ("0.0.0.0", UNSPECIFIED),
    ("0x", UNSPECIFIED),
    ("0.1.2.3", UNSPECIFIED),
    ("10.0.0.1", PRIVATE),
    ("012.1", PRIVATE),
    ("167772161", PRIVATE),
    ("172.16.0.1", PRIVATE),
    ("172.31.255.255", PRIVATE),
    ("192.168.0.1", PRIVATE),
    ("0xc0.0xa8.1", PRIVATE),
    ("100.100.100.200", PRIVATE),
    ("198.18.0.1", PRIVATE),
    ("169.254.169.254", LINK_LOCAL),
    ("0xA9FEA9FE", LINK_LOCAL),
    ("192.0.0.192", RESERVED),
    ("224.0.0.1", MULTICAST),
    ("255.255.255.255", RESERVED),
    # IPv6
    ("[::]", UNSPECIFIED),
    ("[0::0]", UNSPECIFIED),
    ("[fc00::1]", ULA),
    ("[fd00:ec2::254]", ULA),
    ("[FDFF::]", ULA),
    ("[fe80::1]", LINK_LOCAL),
    ("[febf::1]", LINK_LOCAL),
    ("[fec0::1]", PRIVATE),
    ("[ff02::1]", MULTICAST),
    # IPv4 inside IPv6
    ("[::ffff:127.0.0.1]", LOOPBACK),
    ("[::ffff:7f00:1]", LOOPBACK),
    ("[0:0:0:0:0:FFFF:7F00:1]", LOOPBACK),
    ("[::ffff:10.0.0.1]", PRIVATE),
    ("[::ffff:169.254.169.254]", LINK_LOCAL),
    ("[::ffff:0.0.0.0]", UNSPECIFIED),
    ("[::127.0.0.1]", LOOPBACK),
    ("[::a00:1]", PRIVATE),
    ("[::ffff:0:192.168.0.1]", PRIVATE),
    ("[64:ff9b::127.0.0.1]", LOOPBACK),
    ("[64:ff9b::a9fe:a9fe]", LINK_LOCAL),
    ("[64:ff9b:1::1]", PRIVATE),
    ("[2002:7f00:1::]", LOOPBACK),
    ("[2002:c0a8:101::1]", PRIVATE),
    ("[2001:0:4136:e378:8000:63bf:80ff:fffe]", LOOPBACK),
]


def refusal(url: str) -> str | None:
    try:
        check_webhook_url(url)
    except InvalidCommand as error:
        return str(error)
    return None


@pytest.mark.parametrize(("host", "kind"), FORBIDDEN_HOSTS)
@pytest.mark.parametrize("shape", ["http://{}/hook", "HTTPS://{}:8080", "https:{}?a=b", "http:/\\{}#x"])
def test_a_forbidden_host_is_refused_in_every_spelling(host: str, kind: str, shape: str) -> None:
    assert refusal(shape.format(host)) == f"Webhook URL cannot point to {kind}"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook",
        "http://example.com",
        "https://user:pw@example.com:8443/a?b=c#d",
        "https://EXAMPLE.com.",
        "https://bücher.example/",
        "https://xn--bcher-kva.example/",
        "https://a_b.example",
        "https://notlocalhost",
        "https://localhost.example.com",
        "https://internal.example.com",
        "https://127.0.0.1.nip.io",
        "http://8.8.8.8",
        "http://172.15.0.1",
        "http://172.32.0.1",
        "http://192.167.1.1",
        "http://203.0.113.7:9000",
        "http://[2606:4700::1111]/x",
        "http://[::ffff:8.8.8.8]",
        "http://[64:ff9b::808:808]",
        "http://[2002:808:808::1]",
        "https://example.com/?next=http://127.0.0.1",
        "https://example.com#@127.0.0.1",
        "https://example.com:",
        "  https://example.com\n",
    ],
)
def test_a_public_address_is_accepted(url: str) -> None:
    assert refusal(url) is None


@pytest.mark.parametrize(
    "url",
    [
        " ",
        "foo",
        "//example.com",
        "://example.com",
        "http://",
        "http:",
        "https:///",
        "http://@/x",
        "http://:80",
        "http://exa mple.com",
        "http://a<b",
        "http://a%00b",
        "http://a%2fb",
        "http://%ff",
        "http://a%zz",
        "http://example.com:99999",
        "http://example.com: 80",
        "http://example.com:8o",
        "http://example.com:٣",
        "http://example.com:" + "9" * 2000,
        "http://256.1.1.1",
        "http://1.2.3.4.5",
        "http://4294967296",
        "http://1.2.3.08",
        "http://1.2.3.0xg.4",
        "http://foo.0x4",
        "http://[::1",
        "http://[::1]x",
        "http://[fe80::1%25eth0]",
        "http://[fe80::1%eth0]",
        "http://[127.0.0.1]",
        "http://[::ffff:0x7f.1]",
        "http://[]",
        "http://" + "a" * 300 + "ü.com",
    ],
)
def test_what_is_no_url_is_refused_as_such(url: str) -> None:
    assert refusal(url) == INVALID


@pytest.mark.parametrize(
    "url", ["ftp://example.com", "file:///etc/passwd", "javascript:1", "gopher://x", "ws://x", "mailto:x"]
)
def test_other_protocols_are_refused(url: str) -> None:
    assert refusal(url) == PROTOCOL


def test_errors_come_in_the_order_of_the_reference() -> None:
    assert refusal("") == "Webhook URL is required"
    assert refusal("x" * (MAX_URL_LENGTH + 1)) == "Webhook URL too long (max 2048 characters)"
    assert refusal("ftp://127.0.0.1") == PROTOCOL
    assert refusal("http://127.0.0.1:99999") == INVALID


def test_the_longest_url_is_accepted() -> None:
    url = "https://example.com/"
    assert refusal(url + "x" * (MAX_URL_LENGTH - len(url))) is None


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", LOOPBACK),
        ("::1", LOOPBACK),
        ("fe80::1%eth0", LINK_LOCAL),
        ("::ffff:10.1.2.3", PRIVATE),
        ("169.254.169.254", LINK_LOCAL),
        ("fd00::1", ULA),
    ],
)
def test_a_resolved_address_is_held_to_the_same_rules(address: str, kind: str) -> None:
    with pytest.raises(InvalidCommand) as caught:
        check_address(ip_address(address))
    assert str(caught.value) == f"Webhook URL cannot point to {kind}"


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:1.1.1.1"])
def test_a_resolved_public_address_is_accepted(address: str) -> None:
    check_address(ip_address(address))


@given(st.text(max_size=60), st.sampled_from(["", "http://", "https:", "http://["]))
def test_no_text_gets_more_than_a_refusal(text: str, start: str) -> None:
    refusal(start + text)


@given(st.integers(0, 2**32 - 1))
def test_every_ipv4_address_is_judged_alike_in_all_spellings(bits: int) -> None:
    dotted = str(ip_address(bits))
    verdict = refusal(f"http://{dotted}")
    for spelling in (str(bits), hex(bits), f"0{bits:o}", f"{bits >> 24}.{bits & 0xFFFFFF}"):
        assert refusal(f"http://{spelling}") == verdict
