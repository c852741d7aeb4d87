"""AddWebhook, RemoveWebhook, ListWebhooks, SetWebhookEnabled: what is stored and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.steps import OK, UUID7
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

URL = "https://hooks.example.com/in"


def _view(client: Client, webhook: str) -> dict[str, object]:
    (view,) = [hook for hook in client.ok("ListWebhooks")["data"]["webhooks"] if hook["id"] == webhook]
    return dict(view)


def test_add_webhook_answers_with_what_was_stored(client: Client, queue: str) -> None:
    reply = client.call("AddWebhook", url=URL, events=["job.completed"], queue=queue, secret="s3cret")
    data = reply["data"]
    assert UUID7.fullmatch(data["webhookId"])
    assert isinstance(data["createdAt"], float)
    assert {k: data[k] for k in ("url", "events", "queue")} == {
        "url": URL,
        "events": ["job.completed"],
        "queue": queue,
    }
    assert set(data) == {"webhookId", "url", "events", "queue", "createdAt"}
    without = client.call("AddWebhook", url=URL, events=[])["data"]
    assert "queue" not in without


def test_list_webhooks_never_shows_the_secret(client: Client) -> None:
    webhook = client.ok("AddWebhook", url=URL, events=["job.failed"], secret="s3cret")["data"]["webhookId"]
    reply = client.call("ListWebhooks")
    assert set(reply["data"]) == {"webhooks", "stats"}
    view = _view(client, webhook)
    created = view.pop("createdAt")
    assert isinstance(created, float)
    assert view == {
        "id": webhook,
        "url": URL,
        "events": ["job.failed"],
        "lastTriggered": None,
        "successCount": 0,
        "failureCount": 0,
        "enabled": True,
    }
    stats = reply["data"]["stats"]
    assert stats["total"] == len(reply["data"]["webhooks"])
    assert stats["enabled"] == sum(hook["enabled"] for hook in reply["data"]["webhooks"])


def test_a_webhook_can_be_switched_off_and_on(client: Client) -> None:
    webhook = client.ok("AddWebhook", url=URL, events=[])["data"]["webhookId"]
    assert client.call("SetWebhookEnabled", id=webhook, enabled=False) == OK
    assert _view(client, webhook)["enabled"] is False
    assert client.call("SetWebhookEnabled", id=webhook, enabled=True) == OK
    assert _view(client, webhook)["enabled"] is True
    assert client.error("SetWebhookEnabled", id="nobody", enabled=True) == "Webhook not found"
    assert client.error("SetWebhookEnabled", id=webhook) == "enabled is required"


def test_remove_webhook_forgets_it(client: Client) -> None:
    webhook = client.ok("AddWebhook", url=URL, events=[])["data"]["webhookId"]
    assert client.call("RemoveWebhook", webhookId=webhook) == {"ok": True, "data": {"removed": True}}
    assert client.error("RemoveWebhook", webhookId=webhook) == "Webhook not found"
    assert webhook not in [hook["id"] for hook in client.ok("ListWebhooks")["data"]["webhooks"]]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (None, "Webhook URL is required"),
        ("", "Webhook URL is required"),
        ("https://example.com/" + "x" * 2048, "Webhook URL too long (max 2048 characters)"),
        ("not a url", "Invalid URL format"),
        ("ftp://example.com", "Webhook URL must use http or https protocol"),
        ("http://localhost:80/x", "Webhook URL cannot point to localhost"),
        ("http://127.0.0.1", "Webhook URL cannot point to localhost"),
        ("http://2130706433/", "Webhook URL cannot point to localhost"),
        ("http://[::1]/", "Webhook URL cannot point to localhost"),
        ("http://a.localhost/", "Webhook URL cannot point to localhost"),
        ("http://127.1.2.3/", "Webhook URL cannot point to loopback IP"),
        ("http://10.0.0.1/", "Webhook URL cannot point to private IP"),
        ("http://172.16.0.1/", "Webhook URL cannot point to private IP"),
        ("http://192.168.1.1/", "Webhook URL cannot point to private IP"),
        ("http://169.254.169.254/", "Webhook URL cannot point to link-local IP"),
        ("http://[fe80::1]/", "Webhook URL cannot point to link-local IP"),
        ("http://[fd00::1]/", "Webhook URL cannot point to private (ULA) IP"),
        ("http://[::ffff:10.0.0.1]/", "Webhook URL cannot point to private IP"),
        ("http://0.0.0.0/", "Webhook URL cannot point to unspecified IP"),
        ("http://metadata.google.internal/", "Webhook URL cannot point to cloud metadata endpoints"),
        (5, "url must be a string"),
    ],
)
def test_addresses_inside_the_network_are_refused(client: Client, url: object, error: str) -> None:
    before = client.ok("ListWebhooks")["data"]["stats"]["total"]
    assert client.error("AddWebhook", url=url, events=["job.pushed"]) == error
    assert client.ok("ListWebhooks")["data"]["stats"]["total"] == before


def test_plain_http_is_refused_where_https_is_required(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db", "--webhook-require-https") as server, server.client() as client:
        assert client.error("AddWebhook", url="http://example.com", events=[]) == "Webhook URL must use https"
        assert client.error("AddWebhook", url="HTTP:example.com", events=[]) == "Webhook URL must use https"
        client.ok("AddWebhook", url="https://example.com", events=[])


def test_unknown_events_are_refused_by_name(client: Client) -> None:
    valid = "Valid: job.pushed, job.started, job.completed, job.failed, job.progress"
    error = client.error("AddWebhook", url=URL, events=["job.pushed", "job.eaten", "x"])
    assert error == f"Invalid webhook event(s): job.eaten, x. {valid}"
    one = client.error("AddWebhook", url=URL, events=["x"])
    assert one == "Invalid webhook event(s): x. Valid: job.pushed, job.started, job.completed, job.failed, job.progress"
    assert client.error("AddWebhook", url=URL) == "events is required"
    assert client.error("AddWebhook", url=URL, events="job.pushed") == "events must be an array"
