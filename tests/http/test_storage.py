"""HTTP while the disk refuses: nothing is acknowledged that is not kept, and probes see it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.http.webserver import WebServer
from tests.integration.faultydisk import FaultyCalls, fill, small_disk


def test_a_full_disk_is_503_for_writes_and_probes_and_heals_by_itself(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", 8) as disk,
        WebServer(disk / "headrace.db") as web,
        web.http() as http,
        web.raw() as pipelined,
    ):
        kept = http.ok("POST", "/queues/q/jobs", {"data": 1})["id"]
        fill(disk / "ballast")
        refused = [http.post("/queues/q/jobs", {"data": "x" * 200_000}) for _ in range(3)]
        assert {answer.status for answer in refused} == {503}
        assert "disk" in refused[0].error.lower()
        health = http.get("/health")
        assert (health.status, health.json["ok"], health.json["status"]) == (503, False, "degraded")
        assert http.get("/ready").json == {"ready": False, "ok": False}
        assert http.get("/healthz").status == 200
        assert http.ok("GET", f"/jobs/{kept}")["job"]["data"] == 1
        for line in (b"POST /queues/q/pause", b"GET /ping"):
            pipelined.send(line + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [pipelined.answer().status, pipelined.answer().status] == [503, 200]
        (disk / "ballast").unlink()
        deadline = time.monotonic() + 10
        while http.get("/ready").status != 200 and time.monotonic() < deadline:
            pass
        assert http.post("/queues/q/jobs", {"data": 2}).status == 200
        assert http.ok("GET", "/queues/q/count")["count"] == 2


def test_a_job_that_cannot_be_read_is_503_and_not_an_error_of_the_server(tmp_path: Path) -> None:
    faults = FaultyCalls(tmp_path, "unread.db")
    with WebServer(tmp_path / "unread.db", env=faults.env) as web, web.http() as http:
        large = {"data": "x" * 9_000_000}
        first, *_ = [http.ok("POST", "/queues/q/jobs", large)["id"] for _ in range(3)]
        faults.fail("read")
        answer = http.get(f"/jobs/{first}")
        assert (answer.status, answer.error.startswith("Storage error: the database cannot be read")) == (503, True)
        faults.heal()
        assert http.ok("GET", f"/jobs/{first}")["job"]["id"] == first
