"""The connection of Spark's tasks to a server: what it survives, and whom it lets down how. No Spark needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.commands._base import Command
from headrace.commands.jobs import PushBatch, PushedBatch, PushEntry
from headrace.commands.monitoring import Ping
from headrace.commands.queries import GetJobByCustomId
from headrace.errors import ConfigError, HeadraceError, NotAuthenticated, NotFound
from headrace.pipeline.connection import Connection
from headrace.pipeline.options import Options
from tests.conformance.rig import pack
from tests.serverprocess import ServerProcess


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "headrace.db") as running:
        yield running


def url(server: ServerProcess) -> str:
    return f"headrace://127.0.0.1:{server.port}"


def push(n: int) -> PushBatch:
    return PushBatch(queue="q", jobs=[PushEntry(data=pack(n), custom_id=f"job-{n}", id_ttl=60_000)])


def waiting(server: ServerProcess) -> int:
    with server.client() as client:
        return int(client.ok("GetJobCounts", queue="q")["counts"]["waiting"])


def test_many_commands_are_under_way_and_all_are_answered(server: ServerProcess) -> None:
    with Connection(url(server)) as connection:
        assert len([*connection.stream(map(push, range(500)), in_flight=7)]) == 500
        assert connection.ask(Ping()).data.pong
    assert waiting(server) == 500


def test_a_refusal_is_an_answer_and_ends_a_stream(server: ServerProcess) -> None:
    def asked() -> Iterator[Command[PushedBatch]]:
        yield push(1)
        yield PushBatch(queue="", jobs=[])

    with Connection(url(server)) as connection:
        lookups = [GetJobByCustomId(custom_id="nobody"), GetJobByCustomId(custom_id="nobody-else")]
        assert [type(outcome) for outcome in connection.outcomes(lookups, 5)] == [NotFound, NotFound]
        with pytest.raises(HeadraceError, match="Queue"):
            list(connection.stream(asked(), 5))
        assert connection.ask(Ping()).data.pong


def test_an_error_of_who_makes_the_commands_is_not_taken_for_the_end(server: ServerProcess) -> None:
    """Else half of the rows would count as all of them."""

    def broken() -> Iterator[PushBatch]:
        yield push(1)
        raise ConnectionResetError("what the rows come from is gone")

    with Connection(url(server)) as connection, pytest.raises(ConnectionResetError, match="come from"):
        list(connection.stream(broken(), 5))


def test_patience_begins_when_the_server_goes_and_not_with_its_last_answer(server: ServerProcess) -> None:
    """Whoever makes the commands may take longer than a server may be away."""
    patience_s = 0.5

    def slow() -> Iterator[PushBatch]:
        yield push(1)
        yield push(2)
        began = time.monotonic()
        while time.monotonic() - began <= patience_s:
            server.kill()
            server.start()
        yield push(3)

    with Connection(url(server), patience_s=patience_s) as connection:
        assert len([*connection.stream(slow(), in_flight=1)]) == 3
    assert waiting(server) == 3


def test_what_was_not_answered_is_asked_again(server: ServerProcess) -> None:
    def restarting() -> Iterator[PushBatch]:
        for n in range(60):
            if n == 30:
                server.kill()
                server.start()
            yield push(n)

    with Connection(url(server)) as connection:
        assert len([*connection.stream(restarting(), in_flight=20)]) == 60
    assert waiting(server) == 60


def test_a_server_that_stays_away_is_an_error_that_names_it(server: ServerProcess) -> None:
    with Connection(url(server), patience_s=0.3) as connection:
        connection.ask(Ping())
        server.kill()
        with pytest.raises(HeadraceError, match=rf"no answer from the server at 127\.0\.0\.1:{server.port} for 0 s"):
            connection.ask(Ping())


def test_a_token_is_taken_from_the_option_the_url_or_the_environment_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerProcess(tmp_path / "headrace.db", "--auth-tokens", "right") as server:
        monkeypatch.setenv("HEADRACE_TOKEN", "wrong")
        monkeypatch.setenv("OF_THE_TEAM", "right")
        for given in (
            {"url": f"{url(server)}?token=right"},
            {"url": f"{url(server)}?token=wrong", "token": "right"},
            {"url": url(server), "tokenEnv": "OF_THE_TEAM"},
        ):
            with Options.parse(given).connect() as connection:
                assert connection.ask(Ping()).data.pong
        with Connection(url(server)) as connection, pytest.raises(NotAuthenticated, match="does not let us in") as told:
            connection.ask(Ping())
        assert "wrong" not in str(told.value)


@pytest.mark.parametrize(
    "address", ["valkey://:secret@host", "http://host?token=secret", "secret", "headrace://host:port?token=secret"]
)
def test_a_wrong_address_is_refused_without_showing_what_it_may_hide(address: str) -> None:
    with pytest.raises(ConfigError) as told:
        Connection(address)
    assert "secret" not in str(told.value)
