"""AddLog, GetLogs, ClearLogs."""

from __future__ import annotations

import pytest

from tests.protocol.steps import OK, bury, complete, push, state
from tests.wireclient import Client

ADDED = {"ok": True, "data": {"added": True}}


def _messages(client: Client, job_id: str, **fields: object) -> list[str]:
    return [line["message"] for line in client.ok("GetLogs", id=job_id, **fields)["data"]["logs"]]


def test_log_lines_come_back_in_order_with_time_and_level(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    assert client.call("AddLog", id=job_id, message="one") == ADDED
    for level in ("info", "warn", "error"):
        assert client.call("AddLog", id=job_id, message=level, level=level) == ADDED
    reply = client.call("GetLogs", id=job_id)
    assert set(reply["data"]) == {"logs", "count"}
    assert reply["data"]["count"] == 4
    assert [(line["level"], line["message"]) for line in reply["data"]["logs"]] == [
        ("info", "one"),
        ("info", "info"),
        ("warn", "warn"),
        ("error", "error"),
    ]
    for line in reply["data"]["logs"]:
        assert set(line) == {"timestamp", "level", "message"}
        assert isinstance(line["timestamp"], float)


def test_parts_of_a_log_are_chosen_by_both_ends_included(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    for n in range(5):
        client.ok("AddLog", id=job_id, message=str(n))
    assert _messages(client, job_id, start=1, end=3) == ["1", "2", "3"]
    assert _messages(client, job_id, start=3) == ["3", "4"]
    assert _messages(client, job_id, end=-1) == ["0", "1", "2", "3", "4"]
    assert _messages(client, job_id, start=9) == []
    assert client.ok("GetLogs", id=job_id, start=1, end=1)["data"]["count"] == 5


@pytest.mark.parametrize("level", ["debug", "INFO", ""])
def test_a_line_of_another_level_is_kept_as_info(client: Client, queue: str, level: str) -> None:
    job_id = push(client, queue)
    assert client.call("AddLog", id=job_id, message="x", level=level) == ADDED
    assert [line["level"] for line in client.ok("GetLogs", id=job_id)["data"]["logs"]] == ["info"]


def test_a_level_that_is_no_text_is_refused(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    assert client.error("AddLog", id=job_id, message="x", level=5) == "level must be a string"
    assert _messages(client, job_id) == []


def test_logs_are_taken_in_every_state(client: Client, queue: str) -> None:
    push(client, queue)
    for job_id in (complete(client, queue), bury(client, queue), push(client, queue, delay=60_000)):
        assert client.call("AddLog", id=job_id, message=state(client, job_id)) == ADDED
        assert _messages(client, job_id) == [state(client, job_id)]
    assert client.error("AddLog", id="nobody", message="x") == "Job not found"
    assert client.error("AddLog", id=job_id) == "message is required"
    assert client.call("GetLogs", id="nobody") == {"ok": True, "data": {"logs": [], "count": 0}}


def test_the_newest_hundred_lines_are_kept_or_what_the_job_asks_for(client: Client, queue: str) -> None:
    plain, short = push(client, queue), push(client, queue, keepLogs=2)
    for n in range(103):
        client.ok("AddLog", id=plain, message=str(n))
        client.ok("AddLog", id=short, message=str(n))
    assert _messages(client, plain) == [str(n) for n in range(3, 103)]
    assert _messages(client, short) == ["101", "102"]


def test_clear_logs_removes_all_but_the_newest(client: Client, queue: str) -> None:
    job_id = push(client, queue)
    for n in range(4):
        client.ok("AddLog", id=job_id, message=str(n))
    assert client.call("ClearLogs", id=job_id, keepLogs=2) == OK
    assert _messages(client, job_id) == ["2", "3"]
    assert client.call("ClearLogs", id=job_id) == OK
    assert _messages(client, job_id) == []
    assert client.call("ClearLogs", id="nobody") == OK
