"""The HTTP side mounted in an application: a real uvicorn serves a Starlette that has it at /queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Subprotocol

from headrace.embedded import EmbeddedEngine
from headrace.server.asgi import AsgiApp
from tests.http.test_sse import is_cut_off, never_reading
from tests.http.webserver import Http, SseClient
from tests.ports import free_port
from tests.waiting import eventually


async def hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("the application itself")


class Site:
    """An application with the queue in it, served by uvicorn in a thread."""

    def __init__(self, path: Path | None, *, is_apart: bool) -> None:
        self.home = EmbeddedEngine(path)
        self.http_port = free_port()
        self._is_apart = is_apart
        self._elsewhere = asyncio.new_event_loop()
        self.asgi = AsgiApp(self.home)
        routes = [Route("/hello", hello), Mount("/queue", self.asgi)]
        app = Starlette(routes=routes, lifespan=self._lifespan)
        config = uvicorn.Config(app, port=self.http_port, log_level="warning", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        if self._is_apart:
            yield
            return
        await self.home.start()
        yield
        await self.asgi.close()
        await self.home.stop()

    def __enter__(self) -> Site:
        if self._is_apart:
            threading.Thread(target=self._elsewhere.run_forever, daemon=True).start()
            self._there(self.home.start())
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive()
        if self._is_apart:
            self._there(self.asgi.close())
            self._there(self.home.stop())
            self._elsewhere.call_soon_threadsafe(self._elsewhere.stop)

    def _there(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._elsewhere).result(10)

    def http(self) -> Http:
        return Http(self.http_port)


@pytest.fixture(scope="module", params=[False, True], ids=["same-loop", "loop-apart"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("asgi") / "jobs.db", is_apart=request.param) as running:
        yield running


@pytest.fixture
def http(site: Site) -> Iterator[Http]:
    with site.http() as connected:
        yield connected


def test_the_application_and_the_queue_live_side_by_side(http: Http, queue: str) -> None:
    assert http.get("/hello").body == b"the application itself"
    job = http.ok("POST", f"/queue/queues/{queue}/jobs", {"data": {"a": 1}})["id"]
    pulled = http.ok("GET", f"/queue/queues/{queue}/jobs?timeout=1000")["job"]
    assert (pulled["id"], pulled["data"]) == (job, {"a": 1})
    assert http.ok("POST", f"/queue/jobs/{job}/ack", {"result": 2})["ok"] is True
    assert http.ok("GET", f"/queue/jobs/{job}")["job"]["returnvalue"] == 2


def test_a_durable_push_is_answered(http: Http, queue: str) -> None:
    assert http.ok("POST", f"/queue/queues/{queue}/jobs", {"data": 1, "durable": True})["ok"] is True


def test_failures_have_the_statuses_of_the_server(http: Http, queue: str) -> None:
    assert http.get("/queue/nowhere").status == 404
    assert http.get("/queue/jobs/nobody").status == 404
    assert http.call("DELETE", "/queue/stats").status == 405
    assert http.post(f"/queue/queues/{queue}/jobs", b"{").status == 400
    assert http.call("POST", f"/queue/queues/{queue}/jobs", b"x", {"Content-Type": "text/plain"}).status == 415
    assert http.get("/queue/stats", Host="evil.example").status == 403
    assert http.get("/queue/stats", Origin="http://evil.example").status == 403
    head = http.call("HEAD", "/queue/stats")
    assert (head.status, head.body) == (200, b"")
    assert http.call("OPTIONS", "/queue/stats").status == 204


def test_pages_are_served_below_the_mount(http: Http) -> None:
    page = http.get("/queue/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b'src="assets/main.js"' in page.body
    assert http.get("/queue/assets/main.js").status == 200
    assert http.get("/queue/docs").status == 200
    assert http.ok("GET", "/queue/openapi.json")["openapi"] == "3.1.0"
    assert b"bunqueue_queue_jobs_waiting" in http.get("/queue/prometheus").body


def test_escaped_slashes_stay_in_their_part(http: Http) -> None:
    assert http.get("/queue/jobs/custom/a%2Fb").error == "Job not found"


def test_a_long_poll_that_is_given_up_takes_no_job(site: Site, http: Http, queue: str) -> None:
    def is_parked() -> bool:
        return any(not waiter.is_over for waiter in list(site.home.engine.waiters._pulls.get(queue, ())))

    with site.http() as impatient:
        impatient.connection.request("GET", f"/queue/queues/{queue}/jobs?timeout=20000")
        eventually(is_parked)
    eventually(lambda: not is_parked())
    job = http.ok("POST", f"/queue/queues/{queue}/jobs", {"data": 1})["id"]
    assert http.ok("GET", f"/queue/queues/{queue}/jobs?timeout=5000")["job"]["id"] == job


def test_events_stream_and_replay(site: Site, http: Http, queue: str) -> None:
    with SseClient(site.http_port, f"/queue/events/queues/{queue}?events=job:*") as stream:
        assert stream.status == 200
        first = http.ok("POST", f"/queue/queues/{queue}/jobs", {"data": 1})["id"]
        (told,) = stream.take(1)
        assert (told.name, told.data["jobId"]) == ("job:pushed", first)
    later = http.ok("POST", f"/queue/queues/{queue}/jobs", {"data": 2})["id"]
    with SseClient(site.http_port, f"/queue/events/queues/{queue}", Last_Event_ID=told.id) as stream:
        assert [event.data["jobId"] for event in stream.take(1)] == [later]
    eventually(lambda: site.home.engine.figures.transports["sse"]() == 0)


def test_a_stream_that_never_reads_is_cut_off(site: Site, http: Http, queue: str) -> None:
    deaf = never_reading(site.http_port, "/queue/events")
    with SseClient(site.http_port, f"/queue/events/queues/{queue}?events=job:*") as reading:
        streams = site.home.engine.figures.transports["sse"]
        eventually(lambda: streams() == 2)
        jobs = [{"data": 0, "name": "n" * 250} for _ in range(500)]
        for _ in range(60):
            http.ok("POST", f"/queue/queues/{queue}/jobs/bulk", {"jobs": jobs})
            reading.take(500)
            if streams() == 1:
                break
        assert is_cut_off(deaf)


async def test_a_websocket_takes_commands_and_tells_events(site: Site, queue: str) -> None:
    url = f"ws://127.0.0.1:{site.http_port}/queue/ws/queues/{queue}"
    async with connect(url, subprotocols=[Subprotocol("headrace")]) as socket:
        assert socket.subprotocol == "headrace"
        await socket.send(json.dumps({"cmd": "Subscribe", "events": ["job:*"], "reqId": 1}))
        assert json.loads(await socket.recv())["ok"] is True
        await socket.send(json.dumps({"cmd": "PUSH", "queue": queue, "data": "x" * 100_000, "reqId": 2}).encode())
        messages = [json.loads(await asyncio.wait_for(socket.recv(), 5)) for _ in range(2)]
        assert {m.get("reqId") or m["event"] for m in messages} == {2, "job:pushed"}
        await socket.send(json.dumps({"cmd": "PULL", "queue": queue}))
        while "job" not in (pulled := json.loads(await asyncio.wait_for(socket.recv(), 5))):
            pass
        assert pulled["job"]["data"] == "x" * 100_000

    def is_back() -> bool:
        with site.http() as http:
            return bool(http.ok("GET", f"/queue/jobs/{pulled['job']['id']}/state")["state"] == "waiting")

    await asyncio.get_running_loop().run_in_executor(None, eventually, is_back)


async def test_a_websocket_of_a_foreign_page_or_path_is_refused(site: Site) -> None:
    url = f"ws://127.0.0.1:{site.http_port}/queue/ws"
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, origin="http://evil.example")  # type: ignore[arg-type]
    assert refused.value.response.status_code == 403
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"{url}/queues/a%20b")
    assert refused.value.response.status_code in (400, 403)


async def test_streams_end_with_the_application() -> None:
    with Site(None, is_apart=False) as site:
        socket = await connect(f"ws://127.0.0.1:{site.http_port}/queue/ws")
        stream = SseClient(site.http_port, "/queue/events")
    with pytest.raises(ConnectionClosed):
        await asyncio.wait_for(socket.recv(), 5)
    assert stream.raw.is_closed()
    stream.close()


async def test_the_body_of_a_request_with_a_wrong_token_is_not_kept() -> None:
    home = EmbeddedEngine(None)
    await home.start()
    home.engine.tokens = [b"right"]
    asgi, sent, left = AsgiApp(home), [], 60  # type: ignore[var-annotated]
    megabyte = b" " * 2**20

    async def receive() -> dict[str, Any]:
        nonlocal left
        left -= 1
        if left < 0:
            await asyncio.Event().wait()  # as long as the client stays
        return {"type": "http.request", "body": megabyte, "more_body": left > 0}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer wrong"), (b"content-length", b"%d" % (60 << 20))]
    tracemalloc.start()
    await asgi({"type": "http", "method": "POST", "path": "/queues/q/jobs", "headers": headers}, receive, send)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (sent[0]["status"], left) == (401, -1)
    assert peak < 10 * 2**20
    await asgi.close()
    await home.stop()
