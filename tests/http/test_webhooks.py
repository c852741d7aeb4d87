"""Webhook deliveries as a receiver sees them: what is sent, in which order, how often, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgpack
import pytest

from headrace.addresses import UrlRules, check_webhook_url
from headrace.model import Event, Webhook
from headrace.server.outgoing import DeliveryFailed, Outgoing
from headrace.server.webhooks import MAX_DATA_BYTES, MAX_PENDING, MAX_PENDING_BYTES, Hook, message
from tests.http.hookrig import OUTSIDE, rig_with
from tests.http.receiver import Answer, Call, Receiver, answer, as_asked, in_turn
from tests.protocol.steps import UUID7
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client

ALL = ["job.pushed", "job.started", "job.completed", "job.failed", "job.progress"]
ALLOW = ("--webhook-allow", "127.0.0.0/8")
QUICK = (*ALLOW, "--webhook-retry-delay-ms", "20")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("hooks") / "headrace.db", *QUICK) as running:
        yield running


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as listening:
        yield listening


@pytest.fixture
def hook(client: Client, receiver: Receiver, queue: str) -> Iterator[Callable[..., str]]:
    """Adds webhooks for the queue of the test and removes them at its end."""
    added: list[str] = []

    def add(events: list[str], **fields: Any) -> str:
        fields = {"url": receiver.url, "queue": queue, **fields}
        added.append(client.ok("AddWebhook", events=events, **fields)["data"]["webhookId"])
        return added[-1]

    yield add
    for webhook in added:
        client.call("RemoveWebhook", webhookId=webhook)


def view(client: Client, webhook: str) -> dict[str, Any]:
    (found,) = [hook for hook in client.ok("ListWebhooks")["data"]["webhooks"] if hook["id"] == webhook]
    return dict(found)


def view_when(client: Client, webhook: str, is_reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The webhook as listed, once its figures say what is waited for."""

    def shown() -> dict[str, Any] | None:
        return found if is_reached(found := view(client, webhook)) else None

    return eventually(shown)


def push(client: Client, queue: str, data: object = None, **options: Any) -> str:
    return str(client.ok("PUSH", queue=queue, data=data, **options)["id"])


def hang(handler: BaseHTTPRequestHandler, call: Call) -> None:
    """Never answer; the thread ends when the other side hangs up."""
    handler.rfile.read(1)


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_each_event_of_a_job_is_posted_with_what_belongs_to_it(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(ALL)
    done = push(client, queue, {"a": 1})
    client.ok("PULL", queue=queue)
    client.ok("Progress", id=done, progress=40, message="half way")
    client.ok("ACK", id=done, result={"sum": [1, 2.5, None, "ü"]})
    lost = push(client, queue, {"b": 2}, maxAttempts=1)
    client.ok("PULL", queue=queue)
    client.ok("FAIL", id=lost, error="no luck")
    bodies = [call.json for call in receiver.wait_for(7)]
    assert all(isinstance(body.pop("timestamp"), int) for body in bodies)
    common = {"jobId": done, "queue": queue}
    assert bodies == [
        {"event": "job.pushed", **common},
        {"event": "job.started", **common},
        {"event": "job.progress", **common, "progress": 40, "data": {"progress": 40, "message": "half way"}},
        {"event": "job.completed", **common, "data": {"sum": [1, 2.5, None, "ü"]}},
        {"event": "job.pushed", "jobId": lost, "queue": queue},
        {"event": "job.started", "jobId": lost, "queue": queue},
        {
            "event": "job.failed",
            "jobId": lost,
            "queue": queue,
            "error": "no luck",
            "terminal": True,
            "data": {"b": 2},
        },
    ]


def test_the_headers_name_event_time_and_delivery(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.pushed"], url=receiver.url + "?a=b c&d=ü#fragment")
    push(client, queue)
    push(client, queue)
    first, second = receiver.wait_for(2)
    assert first.path == "/hook?a=b%20c&d=%C3%BC"
    assert first.headers["Host"] == f"127.0.0.1:{receiver.port}"
    assert first.headers["Content-Type"] == "application/json"
    assert first.headers["User-Agent"].startswith("Headrace/")
    assert first.headers["X-Webhook-Event"] == "job.pushed"
    assert first.headers["X-Webhook-Timestamp"] == str(first.json["timestamp"])
    assert UUID7.fullmatch(first.headers["X-Webhook-Id"])
    assert first.headers["X-Webhook-Id"] != second.headers["X-Webhook-Id"]
    assert "X-Webhook-Signature" not in first.headers
    assert "Authorization" not in first.headers


def test_a_secret_signs_the_exact_bytes_of_the_body(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.pushed"], secret="schlüssel")
    push(client, queue)
    (call,) = receiver.wait_for(1)
    assert call.is_signed_with("schlüssel")
    assert not call.is_signed_with("other")
    assert call.headers["X-Webhook-Signature"] == call.headers["X-Webhook-Signature"].lower()


def test_a_name_and_password_in_the_url_become_basic_authentication(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.pushed"], url=receiver.url.replace("//", "//me:p%40ss@"))
    push(client, queue)
    (call,) = receiver.wait_for(1)
    assert call.headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert call.headers["Host"] == f"127.0.0.1:{receiver.port}"


def test_a_job_that_completes_without_a_result_is_posted_without_data(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.completed"])
    job = push(client, queue)
    client.ok("PULL", queue=queue)
    client.ok("ACK", id=job)
    (call,) = receiver.wait_for(1)
    assert "data" not in call.json


def test_an_attempt_that_will_be_repeated_is_posted_as_not_terminal(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.failed"])
    job = push(client, queue, maxAttempts=2, backoff=0)
    for _ in range(2):
        client.ok("PULL", queue=queue, timeout=5000)
        client.ok("FAIL", id=job, error="x")
    assert [call.json["terminal"] for call in receiver.wait_for(2)] == [False, True]


def test_jobs_that_fail_without_an_attempt_are_posted_with_their_data_too(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.failed"])
    client.ok("Discard", id=push(client, queue, {"n": 1}))
    child = push(client, queue, {"n": 2}, maxAttempts=1, failParentOnFailure=True)
    parent = push(client, queue, {"n": 3}, dependsOn=[child])
    client.ok("PULL", queue=queue)
    client.ok("FAIL", id=child, error="x")
    shown = {call.json["jobId"]: call.json["data"]["n"] for call in receiver.wait_for(3)}
    assert sorted(shown.values()) == [1, 2, 3]
    assert shown[parent] == 3


def test_results_still_come_after_somebody_else_has_waited_for_a_job(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str, server: ServerProcess
) -> None:
    hook(["job.completed"])
    first, second = push(client, queue), push(client, queue)
    client.ok("PULLB", queue=queue, count=2)
    with server.client() as other:
        other.send("WaitJob", id=first, timeout=5000)
        client.ok("ACK", id=first, result="one")
        assert other.recv()["ok"]
    client.ok("ACK", id=second, result="two")
    assert [call.json["data"] for call in receiver.wait_for(2)] == ["one", "two"]


def test_the_metrics_count_what_became_of_deliveries(tmp_path: Path, receiver: Receiver) -> None:
    """On a server of its own: a delivery of another test may be counted after that test has seen it."""
    receiver.answer = in_turn(answer(500), answer(500), answer(500), answer(500), answer(200))
    with ServerProcess(tmp_path / "h.db", *QUICK) as server, server.client() as client:
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
        push(client, "q")
        push(client, "q")
        view_when(client, webhook, lambda shown: shown["successCount"] == shown["failureCount"] == 1)
        text = str(client.ok("Prometheus")["data"]["metrics"])
    counted = dict(re.findall(r'deliveries_total{outcome="(\w+)"} (\d+)', text))
    assert counted == {"succeeded": "1", "failed": "1", "retried": "3", "dropped": "0", "refused": "0"}


@pytest.mark.parametrize(
    ("packed", "shown"),
    [
        (msgpack.packb({"n": 1, "b": b"\x00\xff"}), {"n": 1, "b": "AP8="}),
        (b"\xd4\x00\x00", None),
        (msgpack.packb(msgpack.Timestamp(0)), "1970-01-01T00:00:00Z"),
        (msgpack.packb({1: "one"}), {"1": "one"}),
        (msgpack.packb(float("nan")), None),
    ],
)
def test_values_that_json_has_no_word_for_are_posted_sensibly(packed: bytes, shown: object) -> None:
    event = Event(1, 1, "completed", 1, "q", "id")
    text = message(event, packed)
    assert Call(0, "", {}, text).json["data"] == shown


def test_keys_nested_in_keys_do_not_stop_a_delivery() -> None:
    packed = b"\x81" * 50_000 + b"\xc0" * 50_001
    shown = Call(0, "", {}, message(Event(1, 1, "completed", 1, "q", "id"), packed)).json
    assert shown["dataOmitted"] == "JSON cannot express it"


def test_a_result_that_is_too_large_is_left_out_and_the_body_says_so(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.completed"])
    job = push(client, queue)
    client.ok("PULL", queue=queue)
    client.ok("ACK", id=job, result="x" * (MAX_DATA_BYTES + 1))
    (call,) = receiver.wait_for(1)
    assert "data" not in call.json
    assert "more than" in call.json["dataOmitted"]


def test_results_of_jobs_that_are_removed_at_once_are_posted(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.completed"])
    job = push(client, queue, removeOnComplete=True)
    client.ok("PULL", queue=queue)
    client.ok("ACK", id=job, result="x" * 100_000)
    (call,) = receiver.wait_for(1)
    assert call.json["data"] == "x" * 100_000


# -- who is told -------------------------------------------------------------------------------------------------------


def test_only_wanted_events_of_the_wanted_queue_are_posted(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.started"])
    push(client, queue + "-other")
    client.ok("PULL", queue=queue + "-other")
    wanted = push(client, queue)
    client.ok("PULL", queue=queue)
    hook(["job.pushed"], queue=queue + "-end")
    push(client, queue + "-end")
    shown = {(call.json["event"], call.json["jobId"]) for call in receiver.wait_for(2)}
    assert ("job.started", wanted) in shown
    assert {event for event, _ in shown} == {"job.started", "job.pushed"}


def test_a_hook_without_queue_hears_of_all_of_them(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    hook(["job.pushed"], queue=None)
    push(client, queue)
    push(client, queue + "-other")
    assert [call.json["queue"] for call in receiver.wait_for(2)] == [queue, queue + "-other"]


def test_a_hook_without_events_hears_of_nothing(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    silent = hook([])
    hook(["job.pushed"])
    push(client, queue)
    receiver.wait_for(1)
    assert view(client, silent)["successCount"] == 0
    assert len(receiver.calls) == 1


def test_a_hook_that_is_switched_off_is_not_called_until_it_is_on_again(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    webhook = hook(["job.pushed"])
    client.ok("SetWebhookEnabled", id=webhook, enabled=False)
    push(client, queue)
    client.ok("SetWebhookEnabled", id=webhook, enabled=True)
    heard = push(client, queue)
    (call,) = receiver.wait_for(1)
    assert call.json["jobId"] == heard
    assert view_when(client, webhook, lambda shown: shown["successCount"] >= 1)["successCount"] == 1


async def test_a_hook_hears_of_what_happens_after_the_tick_in_which_it_was_added() -> None:
    with Receiver(host=OUTSIDE) as receiver:
        async with rig_with([OUTSIDE]) as (rig, _):
            await rig.add(f"http://new.example:{receiver.port}", settled=False)
            await rig.push()
            heard = await rig.push()
            await rig.until(lambda deliveries: deliveries.succeeded == 1)
        assert [call.json["jobId"] for call in receiver.calls] == [heard]


def test_what_comes_behind_a_removal_in_the_same_burst_is_not_posted(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    webhook = hook(["job.pushed"])
    client.send("RemoveWebhook", webhookId=webhook)
    client.send("PUSH", queue=queue, data=None)
    assert client.recv()["ok"]
    assert client.recv()["ok"]
    hook(["job.pushed"])
    heard = push(client, queue)
    assert [call.json["jobId"] for call in receiver.wait_for(1)] == [heard]


def test_switching_off_ends_the_retries_of_what_is_under_way(receiver: Receiver, tmp_path: Path) -> None:
    receiver.answer = answer(500)
    with (
        ServerProcess(tmp_path / "h.db", *ALLOW, "--webhook-retry-delay-ms", "1000") as server,
        server.client() as client,
    ):
        for queue in ("off", "on"):
            client.ok("AddWebhook", url=f"{receiver.url}/{queue}", events=["job.pushed"], queue=queue)
        (off,) = [hook["id"] for hook in client.ok("ListWebhooks")["data"]["webhooks"] if hook["queue"] == "off"]
        push(client, "off")
        receiver.wait_for(1)
        client.ok("SetWebhookEnabled", id=off, enabled=False)
        push(client, "on")  # it fails later than the other one, and so its retry would come later
        calls = receiver.wait_for(3)
    assert [call.path for call in calls] == ["/hook/off", "/hook/on", "/hook/on"]


# -- order, retries, time ----------------------------------------------------------------------------------------------


def test_events_arrive_in_the_order_in_which_they_happened(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    flaky = in_turn(*[answer(500), answer(200)] * 5, answer(200))
    receiver.answer = flaky
    hook(["job.pushed"])
    jobs = [push(client, queue) for _ in range(60)]
    calls = receiver.wait_for(65)
    told = list(dict.fromkeys(call.json["jobId"] for call in calls))
    assert told == jobs


@pytest.mark.alone
def test_a_failed_delivery_is_tried_again_after_one_and_two_delays_with_the_same_id(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.answer = in_turn(answer(500), answer(503), answer(204))
    env = {"WEBHOOK_RETRY_DELAY_MS": "300", "WEBHOOK_MAX_RETRIES": "3"}
    with ServerProcess(tmp_path / "h.db", *ALLOW, env=env) as server, server.client() as client:
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
        push(client, "q")
        first, second, third = receiver.wait_for(3)
        shown = view_when(client, webhook, lambda shown: shown["successCount"] == 1)
    assert 0.3 <= second.at - first.at < 0.6
    assert 0.6 <= third.at - second.at < 1.2
    assert len({call.headers["X-Webhook-Id"] for call in (first, second, third)}) == 1
    assert len({call.body for call in (first, second, third)}) == 1
    assert shown["failureCount"] == 0
    assert "lastError" not in shown


def test_every_answer_but_2xx_is_a_failure_after_three_tries(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    receiver.answer = as_asked
    statuses = [101, 300, 301, 302, 304, 307, 308, 400, 401, 404, 410, 429, 500, 503, 599]
    hooks = {status: hook(["job.pushed"], url=f"{receiver.url}/{status}") for status in statuses}
    push(client, queue)
    for status, webhook in hooks.items():
        shown = view_when(client, webhook, lambda shown: shown["failureCount"] >= 1)
        assert (shown["failureCount"], shown["successCount"], shown["lastTriggered"]) == (1, 0, None)
        assert shown["lastError"] == f"answered {status}"
    assert sorted(call.path for call in receiver.calls) == sorted(f"/hook/{status}" for status in statuses * 3)


def test_every_2xx_is_a_success_at_the_first_try(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    receiver.answer = as_asked
    statuses = [200, 201, 202, 204, 206, 299]
    hooks = [hook(["job.pushed"], url=f"{receiver.url}/{status}") for status in statuses]
    push(client, queue)
    for webhook in hooks:
        shown = view_when(client, webhook, lambda shown: shown["successCount"] >= 1)
        assert (shown["successCount"], shown["failureCount"]) == (1, 0)
        assert shown["lastTriggered"] >= shown["createdAt"]
    assert len(receiver.calls) == len(statuses)


def raw(data: bytes) -> Answer:
    def reply(handler: BaseHTTPRequestHandler, call: Call) -> None:
        handler.wfile.write(data)

    return reply


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (raw(b""), "the connection ended before the answer"),
        (raw(b"HTTP/1.1 200 OK\r\nX: y\r\n"), "the connection ended before the answer"),
        (raw(b"SSH-2.0-OpenSSH\r\n\r\n"), "the answer is not HTTP"),
        (raw(b"HTTP/1.1 9999 OK\r\n\r\n"), "the answer is not HTTP"),
        (raw(b"HTTP/1.1 103 Early Hints\r\n\r\n"), "the connection ended before the answer"),
        (raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n"), "the head of the answer is longer"),
    ],
    ids=["nothing", "half a head", "another protocol", "no status", "never final", "endless head"],
)
def test_an_answer_that_is_none_is_a_failure(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str, reply: Answer, reason: str
) -> None:
    receiver.answer = reply
    webhook = hook(["job.pushed"])
    push(client, queue)
    shown = view_when(client, webhook, lambda shown: shown["failureCount"] >= 1)
    assert shown["lastError"].startswith(reason)


@pytest.mark.parametrize(
    "reply",
    [
        raw(b"HTTP/1.0 200 OK\r\n\r\nno length at all"),
        raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"),
        answer(200, b"x" * 5_000_000),
        raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nless than promised"),
    ],
    ids=["http 1.0", "interim first", "chunked", "long body", "short body"],
)
def test_only_the_status_of_an_answer_matters(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str, reply: Answer
) -> None:
    receiver.answer = reply
    webhook = hook(["job.pushed"])
    push(client, queue)
    shown = view_when(client, webhook, lambda shown: shown["successCount"] >= 1)
    assert shown["failureCount"] == 0


def test_a_receiver_that_is_not_there_counts_as_failed(client: Client, hook: Callable[..., str], queue: str) -> None:
    with Receiver() as gone:
        url = gone.url
    webhook = hook(["job.pushed"], url=url)
    push(client, queue)
    shown = view_when(client, webhook, lambda shown: shown["failureCount"] >= 1)
    assert "refused" in shown["lastError"]


@pytest.mark.alone
@pytest.mark.timeout(60)
def test_a_receiver_that_never_answers_is_given_ten_seconds_and_holds_up_nobody(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.answer = hang
    flags = (*ALLOW, "--webhook-max-retries", "1", "--shutdown-timeout-ms", "300")
    with ServerProcess(tmp_path / "h.db", *flags) as server, server.client() as client, Receiver() as prompt:
        known = client.ok("AddWebhook", url=prompt.url, events=["job.pushed"])["data"]["webhookId"]
        push(client, "q")
        view_when(client, known, lambda shown: shown["successCount"] == 1)
        stuck = [
            client.ok("AddWebhook", url=f"{receiver.url}/{n}", events=["job.pushed"])["data"]["webhookId"]
            for n in range(20)
        ]
        began = time.monotonic()
        for _ in range(50):
            push(client, "q")
        receiver.wait_for(12)
        prompt.wait_for(51)
        assert time.monotonic() - began < 8
        assert view(client, stuck[0])["failureCount"] == 0
        shown = view_when(client, stuck[0], lambda shown: shown["failureCount"] >= 1)
        assert 9.9 <= time.monotonic() - began < 13
        assert shown["lastError"] == "no answer within 10 s"


async def test_a_receiver_that_trickles_its_answer_is_cut_off_when_the_time_in_all_is_over(receiver: Receiver) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def trickle(handler: BaseHTTPRequestHandler, call: Call) -> None:
        with contextlib.suppress(OSError):
            for _ in range(1000):
                handler.wfile.write(b"H")
                threading.Event().wait(0.02)
        loop.call_soon_threadsafe(stopped.set)

    receiver.answer = trickle
    rules = UrlRules((ip_network("127.0.0.0/8"),))
    began = time.monotonic()
    with pytest.raises(DeliveryFailed, match=r"no answer within 0\.5 s"):
        await Outgoing(rules, timeout=0.5).post(check_webhook_url(receiver.url, rules), {}, b"")
    assert 0.5 <= time.monotonic() - began < 2
    await asyncio.wait_for(stopped.wait(), 5)


# -- figures and restarts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_hooks_and_their_figures_survive_a_restart(tmp_path: Path, receiver: Receiver, is_killed: bool) -> None:
    server = ServerProcess(tmp_path / "h.db", *QUICK)
    with server, server.client() as client:
        receiver.answer = in_turn(answer(200), answer(200), answer(500))
        fields = {"url": receiver.url, "events": ["job.pushed"], "queue": "q", "secret": "s"}
        webhook = client.ok("AddWebhook", **fields)["data"]["webhookId"]
        off = client.ok("AddWebhook", **fields)["data"]["webhookId"]
        client.ok("SetWebhookEnabled", id=off, enabled=False)
        for _ in range(3):
            push(client, "q")
        before = view_when(client, webhook, lambda shown: shown["failureCount"] == 1)
        if is_killed:
            server.kill()
        else:
            server.stop()
    assert before["successCount"] == 2
    receiver.answer = answer(200)
    with server, server.client() as client:
        assert view(client, webhook) == before
        assert view(client, off)["enabled"] is False
        push(client, "q")
        after = view_when(client, webhook, lambda shown: shown["successCount"] == 3)
        assert after["failureCount"] == 1
        assert "lastError" not in after
        assert receiver.calls[-1].is_signed_with("s")
        assert view(client, off)["successCount"] == 0


def test_figures_are_stored_at_most_about_once_a_second(
    client: Client, receiver: Receiver, hook: Callable[..., str], queue: str
) -> None:
    webhook = hook(["job.pushed"])
    seen = set()
    sent = 0
    time_is_up = time.monotonic() + 2.5
    while time.monotonic() < time_is_up:
        push(client, queue)
        sent += 1
        seen.add(view(client, webhook)["successCount"])
    view_when(client, webhook, lambda shown: shown["successCount"] == sent)
    assert sent > 20
    assert len(seen) <= 5


def test_a_stop_lets_deliveries_under_way_finish(tmp_path: Path, receiver: Receiver) -> None:
    def slowly(handler: BaseHTTPRequestHandler, call: Call) -> None:
        threading.Event().wait(0.05)
        answer(200)(handler, call)

    receiver.answer = slowly
    server = ServerProcess(tmp_path / "h.db", *QUICK)
    with server, server.client() as client:
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
        for _ in range(20):
            push(client, "q")
        server.stop()
    assert len(receiver.calls) == 20
    with server, server.client() as client:
        assert view(client, webhook)["successCount"] == 20


def test_a_stop_does_not_wait_for_receivers_that_fail_and_counts_what_is_left(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.answer = answer(500)
    server = ServerProcess(tmp_path / "h.db", *ALLOW, "--webhook-retry-delay-ms", "60000")
    with server, server.client() as client:
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
        for _ in range(10):
            push(client, "q")
        receiver.wait_for(1)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 5
    with server, server.client() as client:
        shown = view(client, webhook)
        assert (shown["successCount"], shown["failureCount"]) == (0, 10)


def test_a_stop_cuts_off_a_receiver_that_hangs_when_its_time_is_up(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answer = hang
    server = ServerProcess(tmp_path / "h.db", *ALLOW, "--shutdown-timeout-ms", "1000")
    with server, server.client() as client:
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
        for _ in range(3):
            push(client, "q")
        receiver.wait_for(1)
        client.close()
        began = time.monotonic()
        server.stop()
        assert 0.9 < time.monotonic() - began < 4
    with server, server.client() as client:
        shown = view(client, webhook)
        assert shown["failureCount"] == 3
        assert shown["lastError"] == "the server stopped before the delivery"


def test_what_does_not_fit_the_queue_of_a_hook_is_dropped_and_counted(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answer = hang
    server = ServerProcess(tmp_path / "h.db", *ALLOW, "--shutdown-timeout-ms", "500")
    with server, server.client() as client:
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
        push(client, "q")
        receiver.wait_for(1)
        for _ in range(11):
            client.ok("PUSHB", queue="q", jobs=[{"data": None}] * 1000)
        shown = view_when(client, webhook, lambda shown: shown.get("droppedCount", 0) >= 1000)
        assert (shown["droppedCount"], shown["failureCount"]) == (11_000 - MAX_PENDING, 11_000 - MAX_PENDING)
        client.close()
        assert "its queue is full" in server.stop()
    with server, server.client() as client:
        assert view(client, webhook)["failureCount"] == 11_001


def test_long_errors_count_as_data_does_while_they_wait() -> None:
    hook = Hook(Webhook("id", "https://example.com", ["job.failed"], None, None, 0.0))
    event = Event(1, 0, "failed", 1, "q", error="x" * 1_000_000)
    fitting = MAX_PENDING_BYTES // 1_000_000
    assert [hook.offer(event, None) for _ in range(fitting + 1)] == [True] * fitting + [False]
    while hook.pending:
        hook.take()
    assert hook.pending_bytes == 0


def test_the_queue_of_a_hook_is_bounded_in_bytes_too() -> None:
    hook = Hook(Webhook("id", "https://example.com", ["job.failed"], None, None, 0.0))
    event = Event(1, 1, "failed", 1, "q", "job")
    fitting = MAX_PENDING_BYTES // MAX_DATA_BYTES
    assert all(hook.offer(event, b"x" * MAX_DATA_BYTES) for _ in range(fitting))
    assert not hook.offer(event, b"x")
    assert hook.offer(event, None)
    hook.take()
    assert hook.offer(event, b"x")
    assert hook.pending_bytes <= MAX_PENDING_BYTES


# -- TLS and the settings ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for the name localhost and the address 127.0.0.1, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hooks"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*request, *names, "-keyout", key, "-out", chain], check=True, capture_output=True)
    return chain, key


def test_https_receivers_are_verified_against_the_name_in_the_url(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    names: list[str | None] = []
    tls.sni_callback = lambda _socket, name, _context: names.append(name)
    tls.load_cert_chain(*certificate)
    env = {"SSL_CERT_FILE": str(certificate[0])}
    flags = (*QUICK, "--webhook-allow", "::1/128", "--webhook-require-https")
    with (
        Receiver(tls=tls, host="0.0.0.0") as receiver,
        ServerProcess(tmp_path / "h.db", *flags, env=env) as server,
        server.client() as client,
    ):
        hooks = {
            host: client.ok("AddWebhook", url=f"https://{host}:{receiver.port}/x", events=["job.pushed"])
            for host in ("127.0.0.1", "localhost", "127.0.0.2")
        }
        push(client, "q")
        ids = {host: reply["data"]["webhookId"] for host, reply in hooks.items()}
        for host in ("127.0.0.1", "localhost"):
            view_when(client, ids[host], lambda shown: shown["successCount"] == 1)
        shown = view_when(client, ids["127.0.0.2"], lambda shown: shown["failureCount"] == 1)
        assert shown["lastError"].startswith("certificate not accepted")
        assert "localhost" in names
        assert len(receiver.calls) == 2


def test_a_certificate_nobody_vouches_for_is_refused(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    with (
        Receiver(tls=tls) as receiver,
        ServerProcess(tmp_path / "h.db", *QUICK) as server,
        server.client() as client,
    ):
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
        push(client, "q")
        shown = view_when(client, webhook, lambda shown: shown["failureCount"] == 1)
        assert shown["lastError"].startswith("certificate not accepted")
        assert receiver.calls == []


def test_a_hook_stored_under_looser_rules_is_not_called_under_stricter_ones(tmp_path: Path, receiver: Receiver) -> None:
    with ServerProcess(tmp_path / "h.db", *QUICK) as server, server.client() as client:
        webhook = client.ok("AddWebhook", url=receiver.url, events=["job.pushed"])["data"]["webhookId"]
    for flags, reason in [
        ((), "Webhook URL cannot point to localhost"),
        ((*ALLOW, "--webhook-require-https"), "Webhook URL must use https"),
    ]:
        with ServerProcess(tmp_path / "h.db", *flags) as server, server.client() as client:
            push(client, "q")
            shown = view_when(client, webhook, lambda shown, reason=reason: shown.get("lastError") == reason)
            assert shown["successCount"] == 0
    assert receiver.calls == []
