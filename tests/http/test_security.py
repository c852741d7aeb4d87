"""Who is kept out: without tokens foreign web pages, with tokens everybody who has none."""

from __future__ import annotations

import json
import time

import pytest

from tests.http.webserver import SseClient, WebServer

UPGRADE = {
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class TestTokens:
    @pytest.mark.parametrize("value", ["Bearer sesame", "bearer open-up", "sesame", "Bearer   sesame"])
    def test_a_known_token_is_let_in(self, guarded: WebServer, value: str) -> None:
        with guarded.http() as http:
            assert http.get("/stats", Authorization=value).status == 200

    @pytest.mark.parametrize("value", ["Bearer wrong", "Basic c2VzYW1l", "Bearer", "Bearer sesame2", "sesam"])
    def test_any_other_is_not(self, guarded: WebServer, value: str) -> None:
        with guarded.http() as http:
            answer = http.get("/stats", Authorization=value)
            assert (answer.status, answer.error) == (401, "Unauthorized")
            assert answer.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("charset", ["utf-8", "latin-1"])
    def test_a_token_may_have_letters_beyond_ascii(self, charset: str) -> None:
        with WebServer(":memory:", "--auth-tokens", "öffne-dich") as web, web.raw() as raw:
            token = "öffne-dich".encode(charset)
            head = b"GET /stats HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
            assert raw.ask(head).status == 200

    def test_one_request_does_not_let_the_next_one_in(self, guarded: WebServer) -> None:
        with guarded.http() as http:
            assert http.get("/stats", Authorization="Bearer sesame").status == 200
            assert http.get("/stats").status == 401

    def test_streams_need_a_token(self, guarded: WebServer) -> None:
        with guarded.http() as http:
            assert http.get("/events").status == 401
            assert http.call("GET", "/ws", headers=UPGRADE).status == 401
        with SseClient(guarded.http_port, Authorization="Bearer sesame") as stream:
            assert stream.status == 200

    def test_the_shell_of_the_dashboard_is_open_and_what_it_shows_is_not(self, guarded: WebServer) -> None:
        with guarded.http() as http:
            assert http.get("/").status == 200
            assert http.get("/docs").status == 200
            for path in ("/dashboard", "/dashboard/queues", "/queues", "/workers", "/crons"):
                assert http.get(path).status == 401

    def test_unknown_paths_tell_nothing_of_tokens(self, guarded: WebServer) -> None:
        with guarded.http() as http:
            assert http.get("/nowhere").status == 404

    @pytest.mark.alone
    def test_guessing_is_slowed_down_and_then_cut_off(self) -> None:
        with WebServer(":memory:", "--auth-tokens", "sesame") as web, web.http() as http:
            spent = []
            for number in range(5):
                began = time.monotonic()
                answer = http.get("/stats", Authorization=f"Bearer guess{number}")
                spent.append(time.monotonic() - began)
                assert answer.status == 401
            assert answer.headers["connection"] == "close"
            assert spent[4] > 0.3
            assert spent[4] > 4 * spent[0]
            with web.http("sesame") as other:
                began = time.monotonic()
                assert other.get("/stats").status == 200
                assert time.monotonic() - began < 0.2

    def test_wrong_tokens_are_logged_and_counted_on_every_wire(self) -> None:
        wrong = {"Authorization": "Bearer psst-wrong"}
        with WebServer(":memory:", "--auth-tokens", "sesame", "--log-format", "json") as web:
            with web.http() as http, web.client() as client:
                assert http.get("/stats", **wrong).status == 401
                assert http.get("/events", **wrong).status == 401
                assert http.call("GET", "/ws", headers={**UPGRADE, **wrong}).status == 401
                assert client.error("Auth", token="psst-wrong") == "Invalid token"
                assert client.error("Auth", token="psst-wrong" * 10_000) == "Invalid token"
                assert http.get("/stats").status == 401  # without any token: nobody guessed
            with web.http("sesame") as http:
                assert b"\nbunqueue_auth_failures_total 5\n" in http.get("/prometheus").body
            log = web.stop()
        assert "psst" not in log
        assert "sesame" not in log
        told = [line for line in map(json.loads, log.splitlines()) if "refused" in line]
        assert sum(line["refused"] for line in told) == 5
        assert len(told) <= 4
        assert {(line["level"], line["address"]) for line in told} == {("warning", "127.0.0.1")}

    def test_metrics_may_be_closed_too(self) -> None:
        with WebServer(":memory:", "--auth-tokens", "sesame", env={"METRICS_AUTH": "true"}) as web, web.http() as http:
            assert http.get("/prometheus").status == 401
            assert http.get("/prometheus", Authorization="Bearer sesame").status == 200

    def test_metrics_that_need_a_token_when_there_is_none_are_503(self) -> None:
        with WebServer(":memory:", "--metrics-auth") as web, web.http() as http:
            assert http.get("/prometheus").status == 503
            assert http.get("/stats").status == 200


class TestWithoutTokens:
    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LocalHost:99", "127.0.0.1:6790"])
    def test_names_of_this_machine_are_served(self, web: WebServer, host: str) -> None:
        with web.http() as http:
            assert http.get("/stats", Host=host).status == 200

    @pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "127.0.0.1.nip.io"])
    def test_a_name_that_was_bound_to_us_by_others_is_403(self, web: WebServer, host: str) -> None:
        with web.http() as http:
            answer = http.get("/stats", Host=host)
            assert answer.status == 403
            assert "is not a name of this server" in answer.error
            assert http.get("/", Host=host).status == 403
            assert http.get("/healthz", Host=host).status == 200

    def test_further_names_can_be_given(self) -> None:
        with WebServer(":memory:", "--allowed-hosts", "queue.lan") as web, web.http() as http:
            assert http.get("/stats", Host="queue.lan:80").status == 200
            assert http.get("/stats", Host="other.lan").status == 403

    def test_on_all_interfaces_addresses_are_ours_but_names_are_not(self) -> None:
        with WebServer(":memory:", "--host", "0.0.0.0") as web, web.http() as http:
            assert http.get("/stats", Host="192.0.2.7:6790").status == 200
            assert http.get("/stats", Host="evil.example").status == 403

    @pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "file://"])
    def test_a_page_of_another_origin_cannot_drive_the_server(self, web: WebServer, origin: str, queue: str) -> None:
        with web.http() as http:
            sent = {"Origin": origin, "Content-Type": "text/plain"}
            answer = http.call("POST", f"/queues/{queue}/jobs", b'{"data":1}', sent)
            assert (answer.status, "is not allowed" in answer.error) == (403, True)
            assert "access-control-allow-origin" not in answer.headers
            assert http.get("/stats", Origin=origin).status == 403
            assert http.get("/events", Origin=origin).status == 403
            assert http.call("GET", "/ws", headers={**UPGRADE, "Origin": origin}).status == 403
            assert http.ok("GET", f"/queues/{queue}/count")["count"] == 0

    def test_an_image_tag_of_another_site_cannot_pull_a_job(self, web: WebServer, queue: str) -> None:
        with web.http() as http:
            http.ok("POST", f"/queues/{queue}/jobs", {"data": 1})
            for site in ("cross-site", "same-site"):
                assert http.get(f"/queues/{queue}/jobs", Sec_Fetch_Site=site).status == 403
            assert http.get("/", Sec_Fetch_Site="cross-site").status == 200  # a link to the dashboard
            assert http.get(f"/queues/{queue}/jobs", Sec_Fetch_Site="same-origin").json["job"] is not None

    def test_our_own_pages_are_served(self, web: WebServer) -> None:
        with web.http() as http:
            own = f"127.0.0.1:{web.http_port}"
            assert http.get("/stats", Host=own, Origin=f"http://{own}").status == 200
            assert http.get("/stats", Host=own, Origin=f"https://{own}").status == 403


class TestCors:
    def test_one_matching_origin_is_echoed(self) -> None:
        origins = "https://a.example,https://b.example"
        flags = ("--auth-tokens", "sesame", "--cors-allow-origin", origins)
        with WebServer(":memory:", *flags) as web, web.http("sesame") as http:
            answer = http.get("/stats", Origin="https://b.example")
            assert answer.headers["access-control-allow-origin"] == "https://b.example"
            assert answer.headers["vary"] == "Origin"
            assert "access-control-allow-origin" not in http.get("/stats", Origin="https://c.example").headers
            assert "access-control-allow-origin" not in http.get("/stats").headers
            refused = http.get("/jobs/none", Origin="https://a.example")
            assert (refused.status, refused.headers["access-control-allow-origin"]) == (404, "https://a.example")

    def test_an_allowed_origin_may_use_a_server_without_tokens(self, queue: str) -> None:
        with WebServer(":memory:", env={"CORS_ALLOW_ORIGIN": "https://a.example"}) as web, web.http() as http:
            assert http.get("/stats", Origin="https://a.example").status == 200
            assert http.get("/stats", Origin="https://b.example").status == 403

    def test_options_is_204_everywhere_with_what_is_allowed(self, guarded: WebServer) -> None:
        with guarded.http() as http:
            for path in ("/stats", "/nowhere", "/queues/q/jobs"):
                answer = http.call("OPTIONS", path, headers={"Origin": "https://a.example"})
                assert (answer.status, answer.body) == (204, b"")
                assert answer.headers["access-control-allow-methods"] == "GET, POST, PUT, DELETE, OPTIONS"
                assert "authorization" in answer.headers["access-control-allow-headers"].lower()
                assert answer.headers["access-control-max-age"] == "86400"
                assert "access-control-allow-origin" not in answer.headers


class TestPages:
    @pytest.mark.parametrize("path", ["/", "/docs"])
    def test_pages_may_load_nothing_from_elsewhere(self, web: WebServer, path: str) -> None:
        with web.http() as http:
            answer = http.get(path)
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert b"<script>" not in answer.body
            assert b"//" not in answer.body.replace(b"http://www.w3.org", b"")

    def test_files_have_their_type_and_are_not_sent_twice(self, web: WebServer) -> None:
        with web.http() as http:
            first = http.get("/docs/page.js")
            assert first.headers["content-type"] == "text/javascript; charset=utf-8"
            again = http.get("/docs/page.js", If_None_Match=first.headers["etag"])
            assert (again.status, again.body) == (304, b"")
            assert http.get("/docs/page.css").headers["content-type"] == "text/css; charset=utf-8"
            assert http.get("/assets/main.js").status == 200

    @pytest.mark.parametrize(
        "path", ["/assets/../app.py", "/assets/%2e%2e%2fapp.py", "/docs/..%2f..%2fconfig.py", "/assets/", "/docs/x"]
    )
    def test_nothing_outside_the_folders_is_served(self, web: WebServer, path: str) -> None:
        with web.http() as http:
            assert http.get(path).status == 404


def test_the_number_of_queues_at_prometheus_is_a_setting() -> None:
    with WebServer(":memory:", env={"METRICS_MAX_QUEUES": "2"}) as web, web.http() as http:
        for number in range(4):
            http.ok("POST", f"/queues/q{number}/jobs", {"data": 1})
        text = http.get("/prometheus").body.decode()
        assert text.count("bunqueue_queue_jobs_waiting{") == 2
        assert "bunqueue_queue_metrics_omitted 2" in text


@pytest.mark.alone
def test_a_scrape_of_a_thousand_queues_holds_the_loop_for_less_than_50_ms() -> None:
    with WebServer(":memory:", env={"METRICS_MAX_QUEUES": "1000"}) as web, web.http() as http:
        for number in range(1000):
            http.ok("POST", f"/queues/q{number}/jobs", {"data": 1})
        for number in range(0, 1000, 2):
            http.ok("POST", f"/jobs/{http.ok('GET', f'/queues/q{number}/jobs')['job']['id']}/ack")
        scrapes = []
        for _ in range(15):
            before = web.cpu_s
            text = http.get("/prometheus").body
            scrapes.append(web.cpu_s - before)
        assert text.count(b"bunqueue_queue_jobs_waiting{") == 1000
        assert sum(scrapes) / len(scrapes) < 0.05  # one thread does all: what it spends is what the loop was held
