"""Hello, Auth and the rules of the connection itself that need no broken frames."""

from __future__ import annotations

from headrace import __version__
from tests.protocol.steps import OK
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
