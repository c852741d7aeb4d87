"""Hello, Auth and the rules of the connection itself that need no broken frames."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from headrace import __version__
from tests.protocol.steps import OK, counts
from tests.serverprocess import ServerProcess
from tests.wireclient import Client


def test_hello_answers_with_the_version_of_the_protocol(client: Client) -> None:
    expected = {
        "ok": True,
        "protocolVersion": 2,
        "capabilities": ["pipelining"],
        "server": "bunqueue",
        "version": __version__,
    }
    assert client.call("Hello") == expected
    assert client.call("Hello", protocolVersion=3, capabilities=["pipelining", "x"]) == expected


def test_auth_is_fine_when_no_tokens_are_configured(client: Client) -> None:
    assert client.call("Auth", token="whatever") == OK
    assert client.error("Auth") == "Invalid token"
    assert client.call("Ping")["ok"] is True


def test_commands_are_known_by_their_exact_name(client: Client) -> None:
    assert client.call("push", reqId="1") == {"ok": False, "error": "Unknown command: push", "reqId": "1"}
    assert client.error("Nonsense") == "Unknown command: Nonsense"


@pytest.mark.parametrize("how", ["plain", "durable", "sliced"])
def test_who_only_stops_sending_is_still_answered(server: ServerProcess, client: Client, queue: str, how: str) -> None:
    with server.client() as leaving:
        if how == "sliced":
            leaving.send("PUSHB", queue=queue, jobs=[{"data": n} for n in range(3000)], reqId="1")
        else:
            leaving.send("PUSH", queue=queue, data=1, durable=how == "durable", reqId="1")
        leaving.send("GetJobCounts", queue=f"{queue}.other", reqId="2")
        leaving.socket.shutdown(socket.SHUT_WR)
        replies = [leaving.recv(), leaving.recv()]
        assert sorted((reply["reqId"], reply["ok"]) for reply in replies) == [("1", True), ("2", True)]
        with pytest.raises(ConnectionError):
            leaving.recv()
    assert counts(client, queue) == {"waiting": 3000 if how == "sliced" else 1}


def test_a_connection_too_many_is_told_so_even_if_it_has_sent_much(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db", "--max-connections", "1") as server, server.client() as first:
        first.ok("Ping")
        for _ in range(20):
            with server.client() as other:
                for _ in range(20):
                    other.send("Ping", pad="x" * 5000)
                assert other.recv() == {"ok": False, "error": "Too many connections"}
        assert first.ok("Ping")["data"]["pong"] is True
