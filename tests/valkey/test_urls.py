"""Where Valkey is: what a URL may say, and what it is told when it is wrong."""

from __future__ import annotations

import pytest

from headrace.backends.valkey.url import ValkeyUrl, parse_url
from headrace.errors import InvalidCommand


def test_the_shortest_url_has_defaults() -> None:
    assert parse_url("valkey://store") == ValkeyUrl((("store", 6379),))


def test_everything_can_be_said() -> None:
    url = parse_url("valkeys://me:s%40cret@store:7000/3?prefix=mail&timeout=0.5&ca=/etc/ca.pem")
    assert url == ValkeyUrl((("store", 7000),), "me", "s@cret", 3, "mail", 0.5, is_tls=True, ca_file="/etc/ca.pem")
    assert "cret" not in url.shown


def test_a_cluster_has_several_hosts() -> None:
    url = parse_url("valkey+cluster://a:7000,b:7001,[::1]:7002")
    assert (url.hosts, url.is_cluster) == ((("a", 7000), ("b", 7001), ("::1", 7002)), True)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://store", "not a Valkey URL"),
        ("valkey://", "not a Valkey URL"),
        ("valkey://a,b", r"need valkey\+cluster"),
        ("valkey://store:port", "not host:port"),
        ("valkey://store:70000", "not host:port"),
        ("valkey://store/first", "must be a number"),
        ("valkey+cluster://a/1", "0 in a cluster"),
        ("valkey://store?prefix=a{b", "no spaces or braces"),
        ("valkey://store?timeout=soon", "0.05 to 600"),
        ("valkey://store?events=5", "100 to 10,000,000"),
        ("valkey://store?pool=3", "unknown option 'pool'"),
        ("valkey://user:a/b@store", "written as %2F, in 'valkey://store'"),
    ],
)
def test_mistakes_are_named(url: str, text: str) -> None:
    with pytest.raises(InvalidCommand, match=text):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "valkie://user:s3cret@store",
        "valkey://user:s3cret@store?pool=3",
        "valkey://user:s3cret@a,b",
        "valkey://user:s3cret@store:port",
        "valkey://user:s3cret@store/first",
        "valkey://user:s3/s3@store",
        "valkey://user:s3?s3@store",
    ],
)
def test_a_mistake_is_told_without_the_password(url: str) -> None:
    with pytest.raises(InvalidCommand) as told:
        parse_url(url)
    assert "s3" not in str(told.value)
