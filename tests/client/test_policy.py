"""Decisions about connections: when one is dead, how long to wait, what its options may be."""

from __future__ import annotations

import ssl
from typing import Any
from weakref import WeakValueDictionary

import pytest

from headrace import connect
from headrace.client.client import Client
from headrace.client.policy import ConnectionOptions, Vitals, reconnect_delay
from headrace.client.urls import DEFAULT_URL, connection_options
from headrace.commands.monitoring import Ping
from headrace.config import ConfigError
from headrace.connect import open_client, release_client


def test_delays_double_from_a_tenth_of_a_second_to_half_a_minute_and_spread_by_a_third() -> None:
    for attempt in range(40):
        middle = min(0.1 * 2**attempt, 30.0)
        delays = [reconnect_delay(attempt) for _ in range(300)]
        assert min(delays) >= 0.7 * middle
        assert max(delays) <= 1.3 * middle
        assert min(delays) < 0.85 * middle < 1.15 * middle < max(delays)


def test_three_failed_pings_are_death() -> None:
    vitals = Vitals(ConnectionOptions())
    assert [vitals.ping_failed() for _ in range(3)] == [False, False, True]


def test_three_timeouts_in_a_row_are_death_even_without_pings() -> None:
    vitals = Vitals(ConnectionOptions(ping_interval=0))
    assert [vitals.command_timed_out() for _ in range(3)] == [False, False, True]


def test_any_success_is_life() -> None:
    vitals = Vitals(ConnectionOptions())
    for _ in range(5):
        assert not vitals.ping_failed()
        assert not vitals.ping_failed()
        assert not vitals.command_timed_out()
        assert not vitals.command_timed_out()
        vitals.success()


def test_timeouts_need_not_be_death() -> None:
    vitals = Vitals(ConnectionOptions(max_command_timeouts=0))
    assert not any(vitals.command_timed_out() for _ in range(100))


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_have_the_documented_names_and_defaults() -> None:
    options = connection_options("headrace://")
    assert (options.host, options.port) == ("localhost", 6789)
    assert (options.pipelining, options.max_in_flight, options.pool_size) == (True, 100, 4)
    assert (options.command_timeout, options.ping_interval) == (30, 30)
    assert (options.max_ping_failures, options.max_command_timeouts) == (3, 3)
    assert options.tls is None


def test_options_stand_in_the_url_or_beside_it() -> None:
    url = "bunqueue://[::1]:7000?token=s%26t&pool_size=2&command_timeout=5s&ping_interval=0&pipelining=false"
    options = connection_options(url, pool_size=3, connect_timeout="250ms")
    assert (options.host, options.port, options.token) == ("::1", 7000, "s&t")
    assert (options.pool_size, options.command_timeout, options.connect_timeout) == (3, 5, 0.25)
    assert (options.ping_interval, options.pipelining) == (0, False)
    assert connection_options("headrace://a?command_timeout=1.5").command_timeout == 1.5
    assert connection_options("headrace://a", host="b", port=1, max_in_flight=7).host == "b"


def test_a_token_may_be_a_function_that_is_asked_anew() -> None:
    tokens = iter(["old", "new"])
    options = connection_options("headrace://a", token=lambda: next(tokens))
    assert [options.current_token(), options.current_token()] == ["old", "new"]


def test_the_s_in_the_scheme_means_tls() -> None:
    assert isinstance(connection_options("headraces://a").tls, ssl.SSLContext)
    own = ssl.create_default_context()
    assert connection_options("headraces://a", tls=own).tls is own


def test_a_token_of_the_environment_serves_those_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN", "a b")
    assert connection_options("headrace://a").token == "a b"
    assert connection_options("headrace://a?token=x").token == "x"
    assert connection_options("headrace://a", token="y").token == "y"
    monkeypatch.setenv("HEADRACE_TOKEN", "")
    assert connection_options("headrace://a").token is None


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("headrace://a:70000", {}, "is not an address"),
        ("headrace://secret@a:6789", {}, "a headrace:// URL has no user: write ?token=... at its end"),
        ("headrace://a:6789/0", {}, "a headrace:// URL has no path, and this one has '/0'"),
        ("headrace://a?colour=red", {}, "unknown connection option 'colour'; there are: command_timeout"),
        ("headrace://a", {"port": 70000}, "port must be from 1 to 65535"),
        ("headrace://a?port=0", {}, "port must be from 1 to 65535"),
        ("headrace://a", {"pool_size": 0}, "pool_size must be at least 1"),
        ("headrace://a?max_in_flight=0", {}, "max_in_flight must be at least 1"),
        ("headrace://a", {"max_ping_failures": 0}, "max_ping_failures must be at least 1"),
        ("headrace://a", {"max_command_timeouts": -1}, "must be 0 (never) or more"),
        ("headrace://a?pool_size=many", {}, "pool_size='many' is not understood"),
        ("headrace://a", {"pool_size": 1.5}, "pool_size=1.5 is not understood"),
        ("headrace://a?pipelining=perhaps", {}, "pipelining='perhaps' is not understood"),
        ("headrace://a", {"pipelining": []}, "pipelining=[] is not understood"),
        ("headrace://a?command_timeout=soon", {}, "command_timeout='soon' is not understood"),
        ("headrace://a?command_timeout=0", {}, "command_timeout must be longer than 0"),
        ("headrace://a?tls=yes", {}, "headraces://"),
        ("http://a", {}, "is not the URL of a queue: use sqlite:///file.db"),
        ("jobs.db", {}, "is not the URL of a queue"),
        ("sqlite://jobs.db", {}, "has two slashes"),
        ("sqlite:///", {}, "names no file"),
        ("sqlite:////", {}, "names no file"),
        ("sqlite:///jobs.db?mode=ro", {}, "mode is an option of connections to a server, not of sqlite:// URLs"),
        ("memory://", {"pool_size": 2}, "pool_size is an option of connections to a server"),
    ],
)
def test_what_cannot_be_connected_to_is_refused_before_it_is_tried(url: str, options: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_client(url, **options)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "url", ["headrac://a:6789?token=s3cret", "headrac://a?token=s3cret@s3cret", "postgres://me:s3cret@a/b"]
)
def test_a_url_that_is_refused_is_told_without_its_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_client(url)
    assert "s3cret" not in str(refused.value)


# -- sharing -----------------------------------------------------------------------------------------------------------


def test_clients_of_one_url_are_one_until_the_last_lets_go() -> None:
    one, two = open_client("headrace://shared:1"), open_client("headrace://shared:1")
    other = open_client("headrace://shared:1", pool_size=2)
    assert one is two is not other
    assert (release_client(one), one.is_closed) == (None, False)
    assert (_has_closed(two), _has_closed(other)) == (True, True)
    again = open_client("headrace://shared:1")
    assert (again is one, again.is_closed) == (True, False)
    assert _has_closed(again)
    assert _has_closed(again), "who is not counted is the last one"


def _has_closed(client: Client) -> bool:
    closing = release_client(client)
    if closing is not None:
        closing.result(5)
    return closing is not None and client.is_closed


def test_a_file_is_one_however_it_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = open_client("sqlite:///jobs.db"), open_client(f"sqlite:///{tmp_path}/./jobs.db")
    assert one is two
    assert [_has_closed(one), _has_closed(two)] == [False, True]


def test_a_client_that_somebody_closed_is_open_to_whoever_opens_it() -> None:
    one = open_client("memory://closed")
    one.close().result(5)
    two = open_client("memory://closed")
    two.ask_blocking(Ping())
    assert [_has_closed(one), _has_closed(two)] == [False, True]


@pytest.mark.parametrize(
    ("variable", "given", "meant"),
    [
        (None, None, DEFAULT_URL),
        ("memory://env", None, "memory://env"),
        ("memory://env", "memory://mine", "memory://mine"),
        ("", None, DEFAULT_URL),
    ],
)
def test_the_environment_names_the_url_when_nobody_else_does(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, given: str | None, meant: str
) -> None:
    monkeypatch.setattr(connect, "_shared", {})  # apps of other tests may use the default, too
    monkeypatch.setattr(connect, "_known", WeakValueDictionary())
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    if variable is not None:
        monkeypatch.setenv("HEADRACE_URL", variable)
    one, two = open_client(given), open_client(meant)
    assert one is two
    assert [_has_closed(one), _has_closed(two)] == [False, True]
