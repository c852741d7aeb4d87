"""An app inside a web application: a real uvicorn serves FastAPI with a worker and the dashboard in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from headrace import Headrace
from headrace.contrib.asgi import Dashboard, lifespan
from headrace.errors import ConfigError
from tests.examples import pages
from tests.ports import free_port
from tests.waiting import eventually

LIMIT_S = 30.0


class Site:
    """examples/web.py as its first lines tell to start it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "uvicorn", "web:api", "--app-dir", str(pages.ROOT / "examples")]
        command += ["--port", str(self.port), "--log-level", "warning", "--timeout-graceful-shutdown", "5"]
        self.process = subprocess.Popen(command, cwd=folder, env=pages.environment())

    def ask(self, path: str, method: str = "GET") -> tuple[int, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                body = answer.read()
                is_json = answer.headers["content-type"].startswith("application/json")
                return answer.status, json.loads(body) if is_json else body.decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            self.ask("/openapi.json")
            return True
        return False


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        eventually(lambda: site.is_up() or site.process.poll() is not None)
        yield site
    finally:
        site.process.kill()
        site.process.wait()


def test_the_example_takes_requests_runs_jobs_and_shows_the_dashboard(site: Site) -> None:
    status, started = site.ask("/welcome?to=ada@example.com", "POST")
    assert status == 202
    path = f"/welcome/{started['job']}"
    found = eventually(lambda: answer if (answer := site.ask(path)[1])["state"] == "completed" else None)
    assert found == {"state": "completed", "result": "sent to ada@example.com"}
    assert site.ask("/welcome/no-such-job")[0] == 404

    status, page = site.ask("/queue/")
    assert (status, "<html" in page) == (200, True)
    status, shown = site.ask(f"/queue/jobs/{started['job']}")
    assert (status, shown["job"]["queue"]) == (200, "emails")

    site.process.send_signal(signal.SIGTERM)
    assert site.process.wait(LIMIT_S) in (0, -signal.SIGTERM)


async def start(request: Request) -> JSONResponse:
    jobs: Headrace = request.app.state.jobs
    job = await jobs.queue("q").add("job", {"pid": os.getpid()})
    return JSONResponse({"job": job.id})


def make_site(jobs: Headrace, **options: Any) -> Starlette:
    routes = [Route("/start", start), Mount("/queue", Dashboard(jobs))]
    site = Starlette(routes=routes, lifespan=lifespan(jobs, **options))
    site.state.jobs = jobs
    return site


async def test_a_site_can_be_started_again_in_one_process_and_finds_its_jobs(tmp_path: Path) -> None:
    site = make_site(Headrace(f"sqlite:///{tmp_path}/jobs.db"))
    transport = httpx.ASGITransport(app=site)
    for count in (1, 2):
        async with (
            site.router.lifespan_context(site),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            assert (await http.get("/start")).status_code == 200
            assert (await http.get("/queue/queues/q/counts")).json()["counts"]["waiting"] == count


def test_the_dashboard_of_a_server_is_left_to_the_server() -> None:
    with pytest.raises(ConfigError, match="has a dashboard of its own"):
        Dashboard(Headrace("headrace://nowhere.invalid:1"))


async def test_a_site_whose_worker_cannot_begin_does_not_start() -> None:
    @contextlib.asynccontextmanager
    async def broken(app: Headrace) -> AsyncIterator[None]:
        raise OSError("no database")
        yield

    jobs = Headrace("memory://no-database", lifespan=broken)
    with pytest.raises(OSError, match="no database"):
        async with lifespan(jobs, worker=True)(None):
            pytest.fail("nobody would run its jobs")
    assert jobs.client.is_closed
