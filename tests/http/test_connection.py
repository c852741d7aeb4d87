"""HTTP as bytes: keep-alive, pipelining, limits, broken requests, slow clients, the end."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from tests.http.webserver import Http, WebServer
from tests.ports import free_port
from tests.waiting import eventually


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if body:
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def push(queue: str, value: object) -> bytes:
    return request("POST", f"/queues/{queue}/jobs", json.dumps({"data": value}).encode())


def test_a_connection_serves_request_after_request(http: Http, queue: str) -> None:
    for number in range(5):
        assert http.ok("POST", f"/queues/{queue}/jobs", {"data": number})
        assert http.connection.sock is not None
    assert http.ok("GET", f"/queues/{queue}/count")["count"] == 5


@pytest.mark.parametrize("behind", [push("behind", 1), b"nonsense"], ids=["request", "nonsense"])
def test_the_connection_ends_with_its_last_answer_whatever_comes_behind(web: WebServer, behind: bytes) -> None:
    with web.raw() as raw, web.http() as http:
        assert raw.ask(request("GET", "/ping", b"", "Connection: close") + behind).status == 200
        assert raw.is_ended()
        assert http.ok("GET", "/queues/behind/count")["count"] == 0


def test_a_stream_begins_whatever_comes_behind_its_request(web: WebServer, http: Http, queue: str) -> None:
    with web.raw() as raw:
        raw.send(request("GET", f"/events/queues/{queue}") + request("GET", "/ping"))
        raw.until(b'"connected":true')
        http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})
        raw.until(b"event: job:pushed")


def test_pipelined_requests_are_answered_in_order(web: WebServer, queue: str) -> None:
    with web.raw() as raw:
        raw.send(b"".join(push(queue, n) for n in range(200)) + request("GET", f"/queues/{queue}/count"))
        answers = [raw.answer() for _ in range(201)]
        assert all(answer.status == 200 for answer in answers)
        assert answers[-1].json["count"] == 200
        raw.send(request("GET", f"/queues/{queue}/jobs") * 3)
        assert [raw.answer().json["job"]["data"] for _ in range(3)] == [0, 1, 2]


def test_what_is_pipelined_behind_a_long_poll_waits_for_it(web: WebServer, queue: str) -> None:
    with web.raw() as raw, web.http() as other:
        raw.send(request("GET", f"/queues/{queue}/jobs?timeout=5000") + request("GET", "/ping"))
        other.ok("POST", f"/queues/{queue}/jobs", {"data": "late"})
        assert raw.answer().json["job"]["data"] == "late"
        assert raw.answer().json["data"]["pong"] is True


def test_a_request_may_come_byte_by_byte(web: WebServer, queue: str) -> None:
    with web.raw() as raw:
        for byte in push(queue, {"slow": True}):
            raw.send(bytes((byte,)))
        assert raw.answer().status == 200


def test_a_chunked_body_is_put_together(web: WebServer, queue: str) -> None:
    head = request("POST", f"/queues/{queue}/jobs", b"", "Transfer-Encoding: chunked", "Content-Type: application/json")
    with web.raw() as raw:
        assert raw.ask(head + b'5\r\n{"dat\r\n5\r\na":1}\r\n0\r\n\r\n').status == 200


def test_a_client_that_expects_to_be_told_is_told_to_go_on(web: WebServer, queue: str) -> None:
    body = b'{"data":1}'
    head = push(queue, 1).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n").removesuffix(b'{"data": 1}')
    with web.raw() as raw:
        assert raw.ask(head.replace(b"Content-Length: 11", b"Content-Length: 10")).status == 100
        assert raw.ask(body).status == 200


def test_a_client_that_will_be_refused_is_not_told_to_go_on(web: WebServer) -> None:
    with web.raw() as raw:
        assert raw.ask(request("POST", "/nowhere", b"", "Content-Length: 4", "Expect: 100-continue")).status == 404
        raw.send(b"null")
        assert raw.is_closed()


@pytest.mark.parametrize("wish", ["", "Connection: keep-alive\r\n"])
def test_http_1_0_is_answered_and_closed(web: WebServer, wish: str) -> None:
    # Such a client reads until the end, unless it is told that there will be none: `ab -k` would wait for it.
    with web.raw() as raw:
        answer = raw.ask(f"GET /ping HTTP/1.0\r\nHost: localhost\r\n{wish}\r\n".encode())
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert raw.is_closed()


def test_http_1_0_is_not_told_to_go_on(web: WebServer, queue: str) -> None:
    with web.raw() as raw:
        expecting = request("POST", f"/queues/{queue}/jobs", b'{"data": 1}', "Expect: 100-continue")
        assert raw.ask(expecting.replace(b"HTTP/1.1", b"HTTP/1.0")).status == 200


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
"""What the HTTP client of Java sends along with its first request to any server without TLS."""


def test_a_request_that_would_rather_speak_http_2_is_served_with_its_body(web: WebServer, queue: str) -> None:
    path = f"/queues/{queue}/jobs"
    with web.raw() as raw:
        assert raw.ask(request("POST", path, b'{"data": "whole"}', *H2C)).status == 200
        expecting = request("POST", path, b'{"data": "later"}', *H2C, "Expect: 100-continue")
        head, body = expecting[:-17], expecting[-17:]
        assert raw.ask(head).status == 100
        assert raw.ask(body).status == 200
        chunked = b'8\r\n{"data":\r\n6\r\n "bit"\r\n1\r\n}\r\n0\r\n\r\n'
        raw.send(request("POST", path, b"", *H2C, "Transfer-Encoding: chunked"))
        assert raw.ask(chunked).status == 200
        asked = request("POST", f"{path}/pull-batch", b'{"count": 10}', *H2C, "Upgrade: foo")
        raw.send(asked + request("GET", "/ping", b"", *H2C) * 100 + request("GET", "/ping"))
        jobs = raw.answer().json["jobs"]
        assert [job["data"] for job in jobs] == ["whole", "later", "bit"]
        assert [raw.answer().status for _ in range(101)] == [200] * 101


def test_wishing_for_http_2_opens_no_door(guarded: WebServer) -> None:
    for more in ((), ("Authorization: Bearer sesame", "Authorization: Bearer wrong"), ("Host: localhost",)):
        with guarded.raw() as raw:
            assert raw.ask(request("GET", "/queues", b"", *H2C, *more)).status in (400, 401)


def test_connection_close_is_obeyed(web: WebServer) -> None:
    with web.raw() as raw:
        answer = raw.ask(request("GET", "/ping", b"", "Connection: close"))
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert raw.is_closed()


def test_a_client_that_has_said_all_still_gets_its_answer(web: WebServer) -> None:
    with web.raw() as raw:
        raw.send(request("GET", "/ping"))
        raw.socket.shutdown(1)
        assert raw.answer().status == 200
        assert raw.is_closed()


def test_the_whole_url_may_be_named(web: WebServer) -> None:
    with web.raw() as raw:
        assert raw.ask(request("GET", f"http://localhost:{web.http_port}/ping")).status == 200


BROKEN = {
    "no http": b"hello\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "binary": bytes(range(128, 200)) + b"\r\n\r\n",
    "header without colon": b"GET /ping HTTP/1.1\r\nHost localhost\r\n\r\n",
    "two lengths": b"POST /gc HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": (
        b"POST /gc HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "two codings": (
        b"POST /gc HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n"
    ),
    "packed chunks": b"POST /gc HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "negative length": b"POST /gc HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "bad chunk": b"POST /gc HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    "tls hello": b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_what_is_no_http_is_answered_400_and_closed(web: WebServer, data: bytes) -> None:
    with web.raw() as raw:
        answer = raw.ask(data)
        assert (answer.status, answer.json["ok"]) == (400, False)
        assert answer.headers["connection"] == "close"
        assert raw.is_closed()


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (b"GET /ping HTTP/1.1\r\n\r\n", "The Host header is missing"),
        (b"GET /ping HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", "host is given twice"),
        (b"GET /p\xc3\xbcng HTTP/1.1\r\nHost: localhost\r\n\r\n", "The path is not ASCII: escape other characters"),
    ],
)
def test_a_request_that_is_wrong_in_itself_is_400(web: WebServer, head: bytes, error: str) -> None:
    with web.raw() as raw:
        answer = raw.ask(head)
        assert answer.status == 400
        assert answer.json["error"] in (error, "Bad request")


def test_what_came_before_a_broken_request_is_answered_first(web: WebServer, queue: str) -> None:
    with web.raw() as raw:
        raw.send(push(queue, 1) + b"rubbish\r\n\r\n")
        assert [raw.answer().status, raw.answer().status] == [200, 400]


def test_headers_beyond_16_kb_are_431(web: WebServer) -> None:
    with web.raw() as raw:
        assert raw.ask(request("GET", "/ping", b"", "X-Long: " + "a" * 17_000)).status == 431
        assert raw.is_closed()
    with web.raw() as raw:
        assert raw.ask(request("GET", "/ping?" + "a" * 17_000)).status == 431


def test_headers_without_an_end_are_cut_off(web: WebServer) -> None:
    with web.raw() as raw:
        raw.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n")
        lines = b"".join(f"X-{number}: {'a' * 1000}\r\n".encode() for number in range(100))
        assert raw.ask(lines[:20_000]).status == 431
        assert raw.is_closed()


CHUNKED = ("Transfer-Encoding: chunked", "Content-Type: application/json")
CHUNK = b'a\r\n{"data":1}\r\n0\r\n'


def test_trailers_behind_a_body_change_nothing(web: WebServer, queue: str) -> None:
    head = request("POST", f"/queues/{queue}/jobs", b"", *CHUNKED)
    with web.raw() as raw:
        trailers = b"Host: elsewhere\r\nContent-Type: text/plain\r\nX-Sum: 1\r\n\r\n"
        assert raw.ask(head + CHUNK + trailers).status == 200
        assert raw.ask(request("GET", f"/queues/{queue}/count")).json["count"] == 1


@pytest.mark.parametrize("piece", [b"X-More: " + b"a" * 1000 + b"\r\n", b"a" * 1000], ids=["many", "one"])
def test_trailers_without_an_end_are_cut_off(web: WebServer, queue: str, piece: bytes) -> None:
    with web.raw() as raw:
        raw.send(request("POST", f"/queues/{queue}/jobs", b"", *CHUNKED) + CHUNK + b"X-First: ")
        for _ in range(40):
            raw.send(piece)
        answer = raw.answer()
        assert (answer.status, answer.json["error"]) == (431, "Request headers exceed 16 KB")
        assert raw.is_closed()


def test_the_body_of_a_request_with_a_wrong_token_is_not_kept(guarded: WebServer) -> None:
    with guarded.http() as other, guarded.raw(timeout=30) as raw:
        before = other.get("/health").json["memory"]["rss"]
        token = "Authorization: Bearer guess"
        raw.send(request("POST", "/queues/q/jobs", b"", f"Content-Length: {60 << 20}", token))
        for _ in range(59):
            raw.send(b" " * (1 << 20))
        assert other.get("/health").json["memory"]["rss"] - before < 30
        raw.send(b" " * (1 << 20))
        assert raw.answer().status == 401


def test_a_body_beyond_64_mb_is_413_before_it_is_sent(web: WebServer) -> None:
    with web.raw() as raw:
        answer = raw.ask(request("POST", "/queues/q/jobs", b"", f"Content-Length: {64 * 1024 * 1024 + 1}"))
        assert (answer.status, answer.json["error"]) == (413, "Request body exceeds 64 MB")
        assert raw.is_closed()


def test_chunks_beyond_64_mb_are_413(web: WebServer) -> None:
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with web.raw(timeout=30) as raw:
        raw.send(request("POST", "/queues/q/jobs", b"", "Transfer-Encoding: chunked"))
        try:
            for _ in range(70):
                raw.send(chunk)
        except OSError:
            pass  # the answer came before we were done
        assert raw.answer().status == 413


def test_a_job_of_10_mb_passes_and_a_larger_one_is_refused(http: Http, queue: str) -> None:
    fitting = "x" * (10 * 1024 * 1024 - 10)
    job = http.ok("POST", f"/queues/{queue}/jobs", {"data": fitting})["id"]
    assert http.ok("GET", f"/jobs/{job}")["job"]["data"] == fitting
    answer = http.post(f"/queues/{queue}/jobs", {"data": fitting + "x" * 20})
    assert (answer.status, answer.error) == (400, "Job data too large (max 10MB)")


def test_a_batch_pull_takes_no_more_than_its_answer_can_hold(web: WebServer, queue: str) -> None:
    long_as_json = "\x01" * (5 * 1024 * 1024)  # six characters each
    with web.client(timeout=60) as client, web.http(timeout=60) as http:
        ids = [client.ok("PUSH", queue=queue, data=long_as_json)["id"] for _ in range(3)]
        path, asked = f"/queues/{queue}/jobs/pull-batch", {"count": 3, "owner": "w"}
        assert [job["id"] for job in http.ok("POST", path, asked)["jobs"]] == ids[:2]
        assert [(job["id"], job["attempts"]) for job in http.ok("POST", path, asked)["jobs"]] == [(ids[2], 0)]
        client.ok("Obliterate", queue=queue)


def test_a_request_that_does_not_end_times_out() -> None:
    with WebServer(":memory:", "--http-request-timeout-ms", "300") as web:
        for beginning in (b"GET /ping HTT", request("POST", "/gc", b"", "Content-Length: 10") + b"{"):
            with web.raw() as raw:
                assert raw.ask(beginning).status == 408
                assert raw.is_closed()


def test_dripping_headers_does_not_keep_a_connection() -> None:
    with WebServer(":memory:", "--http-request-timeout-ms", "500") as web, web.raw() as raw:
        began = time.monotonic()
        raw.send(b"GET /ping HTTP/1.1\r\n")
        raw.socket.settimeout(0.05)
        while not raw.is_closed() and time.monotonic() - began < 5:
            raw.send(b"X: y\r\n")
        assert time.monotonic() - began < 4


def test_an_idle_connection_is_closed_and_a_waiting_one_is_not(queue: str) -> None:
    with WebServer(":memory:", "--http-keep-alive-ms", "300") as web, web.raw() as idle, web.raw() as waiting:
        waiting.send(request("GET", f"/queues/{queue}/jobs?timeout=1200"))
        assert idle.ask(request("GET", "/ping")).status == 200
        assert idle.is_closed()
        assert waiting.answer().json == {"job": None, "ok": True}


def test_a_client_that_hangs_up_while_it_waits_is_given_no_job(web: WebServer, http: Http, queue: str) -> None:
    with web.raw() as raw:
        raw.send(request("GET", "/ping") + request("GET", f"/queues/{queue}/jobs?timeout=30000"))
        assert raw.answer().status == 200
    http.ok("GET", "/ping")  # by now the server has read that the other one has gone
    http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})
    assert http.ok("GET", f"/queues/{queue}/counts")["counts"]["waiting"] == 1


def test_a_client_that_reads_nothing_is_not_answered_without_end(web: WebServer, http: Http, queue: str) -> None:
    job = http.ok("POST", f"/queues/{queue}/jobs", {"data": "x" * 1_000_000})["id"]
    before = http.ok("GET", "/health")["memory"]["rss"]
    with web.raw(timeout=2) as raw:
        try:
            for _ in range(300):
                raw.send(request("GET", f"/jobs/{job}"))
        except TimeoutError:
            pass  # the server has stopped reading: that is one way of saying no
        assert http.ok("GET", "/health")["memory"]["rss"] - before < 100


def test_a_client_that_has_said_all_gets_an_answer_that_waits_for_the_disk(web: WebServer, queue: str) -> None:
    for _ in range(20):
        with web.raw() as raw:
            raw.send(request("POST", f"/queues/{queue}/jobs", b'{"data": 1, "durable": true}'))
            raw.socket.shutdown(socket.SHUT_WR)
            assert raw.answer().status == 200
            assert raw.is_closed()


def test_a_client_that_never_reads_its_answer_is_cut_off_and_a_slow_one_is_not(queue: str) -> None:
    with WebServer(":memory:", "--http-keep-alive-ms", "1500") as web, web.client() as client:
        job = client.ok("PUSH", queue=queue, data="x" * 10_000_000)["id"]
        unconnected = len(os.listdir(f"/proc/{web.pid}/fd"))
        with web.raw() as deaf, web.raw() as slow:
            for raw in (deaf, slow):
                raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
                raw.send(request("GET", f"/jobs/{job}"))
            head = slow.head().decode().lower()
            left = int(head.partition("content-length: ")[2].split()[0])
            while left > 0:
                left -= len(slow.take(min(left, 500_000)))
                client.ok("PULL", queue="none", timeout=100)
            eventually(lambda: len(os.listdir(f"/proc/{web.pid}/fd")) == unconnected)


def test_too_many_connections_are_503() -> None:
    with WebServer(":memory:", "--max-connections", "2") as web, web.raw() as one, web.raw() as two:
        assert one.ask(request("GET", "/ping")).status == 200
        assert two.ask(request("GET", "/ping")).status == 200
        with web.raw() as three:
            assert three.answer().status == 503
            assert three.is_closed()


def test_too_many_requests_are_429() -> None:
    flags = ("--rate-limit-max-requests", "3", "--rate-limit-window-ms", "60000")
    with WebServer(":memory:", *flags) as web, web.http() as http:
        statuses = [http.get("/ping").status for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        assert http.get("/ping").error == "Rate limit exceeded"


def test_a_stop_answers_who_waits_and_closes(queue: str) -> None:
    web = WebServer(":memory:").start()
    with web.raw() as waiting, web.raw() as idle:
        assert idle.ask(request("GET", "/ping")).status == 200
        waiting.send(request("GET", f"/queues/{queue}/jobs?timeout=60000"))
        assert idle.ask(request("GET", "/ping")).status == 200
        web.stop()
        assert waiting.answer().json == {"job": None, "ok": True}
        assert waiting.is_closed()
        assert idle.is_closed()


def test_the_port_0_turns_http_off_and_a_taken_one_is_told() -> None:
    with WebServer(":memory:") as web:
        assert f"and http://127.0.0.1:{web.http_port}" in web.first_line
        second = WebServer(":memory:", "--http-port", str(web.http_port))
        with pytest.raises(RuntimeError, match=r"(?s)cannot listen on 127\.0\.0\.1:\d+: .*port with --http-port"):
            second.start()
    with WebServer(":memory:", "--http-port", "0") as off:
        assert "http" not in off.first_line


def tls_server(tmp_path: Path) -> tuple[WebServer, ssl.SSLContext]:
    """A server with a certificate of its own, and what its clients need."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    web = WebServer(":memory:", "--tls-cert", str(cert), "--tls-key", str(key)).start()
    return web, ssl.create_default_context(cafile=str(cert))


def test_tls_serves_http_with_the_same_certificate(tmp_path: Path) -> None:
    web, context = tls_server(tmp_path)
    with web.raw() as raw:
        assert f"https://127.0.0.1:{web.http_port}" in web.first_line
        raw.socket = context.wrap_socket(raw.socket, server_hostname="localhost")
        assert raw.ask(request("GET", "/ping")).status == 200
    web.stop()


def test_a_stop_with_tls_waits_for_who_still_reads_and_not_for_who_is_idle(tmp_path: Path) -> None:
    """An idle client, such as a connection in a pool, does not read that the server says goodbye."""
    web, context = tls_server(tmp_path)
    with web.client() as idle, web.raw() as slow:
        for client in (idle, slow):
            client.socket = context.wrap_socket(client.socket, server_hostname="localhost")
        job_id = idle.ok("PUSH", queue="q", data="x" * 10_000_000)["id"]
        slow.send(request("GET", f"/jobs/{job_id}"))
        head = slow.head().lower()
        assert web.process is not None
        web.process.terminate()
        time.sleep(2.5)
        size = int(head.partition(b"content-length: ")[2].split()[0])
        assert size > 10_000_000
        assert len(slow.take(size)) == size
        web.process.communicate(timeout=5)
        assert web.process.returncode == 0


def test_the_http_stack_is_imported_after_the_tcp_port_answers(tmp_path: Path) -> None:
    """A server that cannot import its HTTP stack has answered over TCP before it says so."""
    stand_in = tmp_path / "httptools.py"
    stand_in.write_text(
        "import os, socket, struct\n"
        "with socket.create_connection(('127.0.0.1', int(os.environ['ASK_PORT'])), timeout=5) as asking:\n"
        "    asking.sendall(struct.pack('>I', 10) + b'\\x81\\xa3cmd\\xa4Ping')\n"
        "    print('answered over tcp://:%d' % asking.getpeername()[1], asking.recv(100)[4:6].hex(), flush=True)\n"
        "raise ImportError('no HTTP today')\n"
    )
    port = free_port()
    server = WebServer(":memory:", "--tcp-port", str(port), env={"PYTHONPATH": str(tmp_path), "ASK_PORT": str(port)})
    server.start()
    assert server.first_line == f"answered over tcp://:{port} 82a4\n"
    assert server.process is not None
    assert "no HTTP today" in server.process.communicate(timeout=20)[1]
