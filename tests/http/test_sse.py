"""Server-sent events: what streams tell, what they replay, who is cut off, and what many of them cost."""

from __future__ import annotations

import resource
import selectors
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.http.webserver import Http, SseClient, WebServer
from tests.scale import scaled


def push(http: Http, queue: str, count: int = 1) -> list[str]:
    jobs = [{"data": n} for n in range(count)]
    return list(http.ok("POST", f"/queues/{queue}/jobs/bulk", {"jobs": jobs})["ids"])


def test_a_stream_greets_and_tells_the_life_of_a_job(web: WebServer, http: Http, queue: str) -> None:
    with SseClient(web.http_port, f"/events/queues/{queue}?events=job:*") as stream:
        assert "text/event-stream" in stream.head
        assert stream.greeting.startswith('retry: 3000\ndata: {"connected":true,"clientId":')
        (job,) = push(http, queue)
        http.ok("GET", f"/queues/{queue}/jobs")
        http.ok("POST", f"/jobs/{job}/progress", {"progress": 40})
        http.ok("POST", f"/jobs/{job}/fail", {"error": "boom", "unrecoverable": True})
        events = stream.take(4)
        assert [event.name for event in events] == ["job:pushed", "job:active", "job:progress", "job:failed"]
        assert {event.data["jobId"] for event in events} == {job}
        assert events[2].data["progress"] == 40
        assert (events[3].data["error"], events[3].data["terminal"]) == ("boom", True)
        numbers = [int(event.id.split(".")[2]) for event in events]
        assert numbers == sorted(numbers)


def test_a_queue_filter_holds_for_snapshots_too(web: WebServer, http: Http, queue: str) -> None:
    with SseClient(web.http_port, f"/events/queues/{queue}") as stream:
        push(http, f"{queue}.other")
        http.ok("POST", f"/queues/{queue}.other/pause")
        http.ok("POST", f"/queues/{queue}/pause")
        push(http, queue)
        events = [stream.next() for _ in range(3)]
        assert [event.name for event in events] == ["queue:paused", "job:pushed", "queue:counts"]
        assert {event.data["queue"] for event in events} == {queue}
        assert events[2].data["waiting"] == 1
        assert events[2].id == ""


def test_names_can_be_chosen_and_wrong_ones_are_named(web: WebServer, http: Http, queue: str) -> None:
    with SseClient(web.http_port, f"/events/queues/{queue}?events=queue:counts,dlq:*") as stream:
        push(http, queue)
        assert stream.next().name == "queue:counts"
    assert http.get("/events?events=job:*,nonsense").error == "Invalid: nonsense"
    assert http.get("/events?bogus=1").error == "Unknown query parameter: bogus"
    assert http.get("/events/queues/a%20b").status == 400
    for wrong in ("abc", "0.1", "0.1.-1", "0.1.\xb2", "0.1." + "9" * 30):
        assert http.get("/events", Last_Event_ID=wrong).status == 400, wrong


def test_snapshots_come_by_themselves(web: WebServer) -> None:
    with SseClient(web.http_port, "/events?events=stats:snapshot,health:*", timeout=15) as stream:
        events = [stream.next() for _ in range(3)]
        assert {event.name for event in events} == {"stats:snapshot", "health:status"}
        stats = next(event.data for event in events if event.name == "stats:snapshot")
        assert {"waiting", "active", "pushPerSec", "timestamp"} <= set(stats)
        assert "ok" not in stats
        health = next(event.data for event in events if event.name == "health:status")
        assert (health["ok"], health["status"]) == (True, "healthy")


def test_heartbeats_begin_again_after_nobody_listened() -> None:
    with WebServer(":memory:", "--live-heartbeat-ms", "100") as web:
        SseClient(web.http_port).close()
        time.sleep(0.5)  # longer than a heartbeat, shorter than until the next snapshot is due
        with SseClient(web.http_port, "/events?events=job:*") as stream:
            assert stream.raw.until(b":heartbeat\n\n")


def test_heartbeats_keep_a_quiet_stream_open() -> None:
    with WebServer(":memory:", "--live-heartbeat-ms", "200") as web, SseClient(web.http_port) as stream:
        assert stream.raw.until(b":heartbeat\n\n").endswith(b":heartbeat\n\n")
        assert stream.raw.until(b":heartbeat\n\n").endswith(b":heartbeat\n\n")


class TestReplay:
    def test_what_was_missed_is_told_in_order_before_what_is_new(self, web: WebServer, http: Http, queue: str) -> None:
        path = f"/events/queues/{queue}?events=job:*"
        with SseClient(web.http_port, path) as stream:
            push(http, queue, 3)
            seen = stream.take(3)
        missed = push(http, queue, 50)
        with SseClient(web.http_port, path, Last_Event_ID=seen[-1].id) as stream:
            fresh = push(http, queue, 5)
            assert [event.data["jobId"] for event in stream.take(55)] == missed + fresh

    def test_a_long_absence_is_caught_up_with_and_nobody_is_cut_off_for_it(
        self, web: WebServer, http: Http, queue: str
    ) -> None:
        path = f"/events/queues/{queue}?events=job:*"
        with SseClient(web.http_port, path) as stream:
            push(http, queue)
            last = stream.take(1)[0]
        missed: list[str] = []
        for _ in range(12):  # more than the hub remembers, and more than may be left unread
            jobs = [{"data": 0, "name": "n" * 250} for _ in range(1000)]
            missed += http.ok("POST", f"/queues/{queue}/jobs/bulk", {"jobs": jobs})["ids"]
        with SseClient(web.http_port, path, Last_Event_ID=last.id) as stream:
            fresh = push(http, queue, 5)
            assert [event.data["jobId"] for event in stream.take(12_005)] == missed + fresh

    def test_long_errors_are_shortened_and_do_not_swell_the_server(self, tmp_path: Path) -> None:
        with WebServer(tmp_path / "headrace.db") as web, web.http() as http:
            memory = psutil.Process(web.pid).memory_info().rss
            for _ in range(scaled(60, 300)):
                push(http, "q")
                job = http.ok("GET", "/queues/q/jobs")["job"]["id"]
                http.ok("POST", f"/jobs/{job}/fail", {"error": "e" * 1_000_000, "unrecoverable": True})
                http.ok("POST", "/queues/q/dlq/purge")
            with SseClient(web.http_port, "/events?events=job:failed", Last_Event_ID="0.1.0") as stream:
                told = stream.take(scaled(60, 300), "job:failed")
            assert {len(event.data["error"]) for event in told} == {4096}
            assert psutil.Process(web.pid).memory_info().rss - memory < 60 * 1024 * 1024

    def test_it_may_be_asked_for_in_the_query(self, web: WebServer, http: Http, queue: str) -> None:
        with SseClient(web.http_port, f"/events/queues/{queue}?events=job:*") as stream:
            push(http, queue)
            first = stream.take(1)[0]
        later = push(http, queue, 2)
        with SseClient(web.http_port, f"/events/queues/{queue}?events=job:*&lastEventId={first.id}") as stream:
            assert [event.data["jobId"] for event in stream.take(2)] == later

    def test_ids_of_a_log_that_was_replaced_mean_nothing_in_the_new_one(self, tmp_path: Path) -> None:
        last = "0.1.0"
        for folder, count in (("old", 3), ("new", 5)):
            (tmp_path / folder).mkdir()
            with WebServer(tmp_path / folder / "headrace.db") as web, web.http() as http:
                pushed = push(http, "q", count)
                with SseClient(web.http_port, "/events", Last_Event_ID=last) as stream:
                    gap, *seen = [stream.next() for _ in range(1 + count)]
                    last = seen[-1].id
            assert gap.name == "gap"
            assert [event.data["jobId"] for event in seen] == pushed

    @pytest.mark.parametrize("ending", ["stop", "kill"])
    def test_a_restart_loses_nothing(self, tmp_path: Path, ending: str) -> None:
        web = WebServer(tmp_path / "headrace.db").start()
        with web.http() as http, SseClient(web.http_port, "/events?events=job:*") as stream:
            push(http, "q", 10)
            seen = stream.take(10)
            unseen = push(http, "q", scaled(3000, 30_000))
        getattr(web, ending)()
        web.start()
        try:
            with (
                web.http() as http,
                SseClient(web.http_port, "/events?events=job:*", Last_Event_ID=seen[3].id) as again,
            ):
                fresh = push(http, "q", 3)
                expected = [event.data["jobId"] for event in seen[4:]] + unseen + fresh
                told = again.take(len(expected))
                assert [event.data["jobId"] for event in told] == expected
                assert told[:6] == seen[4:]
        finally:
            web.stop()

    def test_an_id_of_another_life_is_answered_with_a_gap_and_everything_there_is(self) -> None:
        web = WebServer(":memory:").start()
        with web.http() as http, SseClient(web.http_port, "/events?events=job:*") as stream:
            push(http, "q", 5)
            last = stream.take(5)[-1]
        web.stop()
        web.start()
        try:
            with web.http() as http:
                jobs = push(http, "q", 7)
                with SseClient(web.http_port, "/events?events=job:*", Last_Event_ID=last.id) as again:
                    gap = again.next()
                    assert gap.name == "gap"
                    assert gap.data["from"] == last.id.removeprefix("0.")
                    assert [event.data["jobId"] for event in again.take(7)] == jobs
        finally:
            web.stop()

    def test_what_the_log_keeps_no_longer_is_named_as_a_gap(self, tmp_path: Path) -> None:
        web = WebServer(tmp_path / "headrace.db").start()
        with web.http() as http, SseClient(web.http_port, "/events?events=job:*") as stream:
            push(http, "q", 20)
            first = stream.take(20)[0]
        web.stop()
        for segment in (tmp_path / "headrace.db-events" / "shard=0").iterdir():
            if not segment.name.startswith("."):
                segment.unlink()
        web.start()
        try:
            with web.http() as http, SseClient(web.http_port, "/events", Last_Event_ID=first.id) as again:
                gap = again.next()
                assert (gap.name, gap.data["from"], gap.data["to"]) == ("gap", "2", "20")
                jobs = push(http, "q", 2)
                assert [event.data["jobId"] for event in again.take(2)] == jobs
        finally:
            web.stop()


class TestBounds:
    def test_beyond_the_cap_streams_are_503_and_a_place_is_free_again(self) -> None:
        with WebServer(":memory:", "--max-sse-clients", "2") as web, web.http() as http:
            with SseClient(web.http_port) as one, SseClient(web.http_port) as two:
                assert (one.status, two.status) == (200, 200)
                answer = http.get("/events")
                assert (answer.status, answer.error) == (503, "Too many SSE connections")
                assert http.ok("GET", "/health")["connections"]["sse"] == 2
            deadline = time.monotonic() + 5
            while http.ok("GET", "/health")["connections"]["sse"] and time.monotonic() < deadline:
                pass
            with SseClient(web.http_port) as three:
                assert three.status == 200

    def test_a_stop_ends_the_streams(self) -> None:
        web = WebServer(":memory:").start()
        with SseClient(web.http_port) as stream:
            web.stop()
            assert stream.raw.is_closed()

    @pytest.mark.timeout(180)
    @pytest.mark.alone
    def test_many_streams_one_of_which_never_reads(self) -> None:
        """Events at 200/s to all: coalesced frames, half a core, bounded memory; who never reads is cut off."""
        count, seconds, rate = scaled(200, 1000), scaled(4, 30), 200
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        with WebServer(":memory:", "--max-sse-clients", str(count + 1)) as web, web.client() as client:
            crowd = Crowd(web.http_port, count)
            deaf = never_reading(web.http_port)
            server = psutil.Process(web.pid)
            before, memory = server.cpu_times(), server.memory_info().rss
            began = time.monotonic()
            pushed = 0
            text = "x" * 900
            while time.monotonic() - began < seconds:
                client.ok("PUSH", queue="q", data=0, jobId=f"{pushed}-{text}")
                pushed += 1
                crowd.read(max(0.0, began + pushed / rate - time.monotonic()))
            crowd.read_until(pushed, 20)
            spent = sum(server.cpu_times()[:2]) - sum(before[:2])
            print(f"{count} streams: {spent / seconds:.2f} core, {pushed} events, {max(crowd.chunks)} chunks at most")
            assert crowd.counts == [pushed] * count
            assert crowd.largest_gap_ms < 2000
            # A frame every 100 ms at most, however many events there are.
            assert max(crowd.chunks) <= (seconds + 20) * 11
            assert spent / seconds <= 0.5, f"{spent:.1f} s of CPU in {seconds} s"
            assert server.memory_info().rss - memory < 150 * 1024 * 1024
            if pushed * 1000 > 4 * 1024 * 1024:
                assert is_cut_off(deaf)
            deaf.close()
            crowd.close()

    def test_a_stream_that_never_reads_is_cut_off_at_its_bound(self, web: WebServer, http: Http, queue: str) -> None:
        deaf = never_reading(web.http_port)
        with SseClient(web.http_port, f"/events/queues/{queue}?events=job:*") as reading:
            memory = psutil.Process(web.pid).memory_info().rss
            name = "n" * 250
            for _ in range(40):
                jobs = [{"data": 0, "name": name} for _ in range(500)]
                http.ok("POST", f"/queues/{queue}/jobs/bulk", {"jobs": jobs})
                reading.take(500)
            assert is_cut_off(deaf)
            assert psutil.Process(web.pid).memory_info().rss - memory < 100 * 1024 * 1024


def never_reading(port: int, path: str = "/events") -> socket.socket:
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", port))
    deaf.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return deaf


def is_cut_off(deaf: socket.socket) -> bool:
    """Whether the server has ended the connection: it ends after what had been sent before."""
    deaf.settimeout(5)
    try:
        while deaf.recv(1 << 20):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


class Crowd:
    """Many streams, read together."""

    def __init__(self, port: int, count: int) -> None:
        self.counts = [0] * count
        self.chunks = [0] * count
        self.largest_gap_ms = 0.0
        self._selector = selectors.DefaultSelector()
        self._tails = [b""] * count
        self._sockets = []
        for index in range(count):
            one = socket.create_connection(("127.0.0.1", port), timeout=10)
            one.sendall(b"GET /events?events=job:* HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self._selector.register(one, selectors.EVENT_READ, index)
            self._sockets.append(one)
        for index, one in enumerate(self._sockets):
            text = b""
            while b"clientId" not in text:
                text += one.recv(4096)
            self._tails[index] = b""

    def read(self, seconds: float) -> None:
        """Read whatever comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            began = time.monotonic()
            for key, _ in self._selector.select(left):
                self._take(key.data, key.fileobj.recv(1 << 18))  # type: ignore[union-attr]
            self.largest_gap_ms = max(self.largest_gap_ms, (time.monotonic() - began) * 1000 - left * 1000)

    def _take(self, index: int, data: bytes) -> None:
        assert data, "a stream was closed that reads"
        mark = b"event: job:pushed"
        text = self._tails[index] + data
        self.counts[index] += text.count(mark)
        self.chunks[index] += 1
        at = text.rfind(b"event: job:pushe")
        self._tails[index] = text[-len(mark) + 1 :] if at < len(text) - len(mark) + 1 else text[at:]

    def read_until(self, count: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while min(self.counts) < count and time.monotonic() < deadline:
            self.read(0.2)

    def close(self) -> None:
        for one in self._sockets:
            one.close()
