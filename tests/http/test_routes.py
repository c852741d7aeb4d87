"""Every route of the registry: what it answers when all is well, and which status its failure has."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from headrace.commands import REGISTRY, Flag
from headrace.commands._base import Route, Spec
from tests.http.webserver import Http, WebServer

ROUTES = [(spec, route) for spec in REGISTRY.values() for route in spec.routes]
every_route = pytest.mark.parametrize(("spec", "route"), ROUTES, ids=lambda item: getattr(item, "path", ""))
WITH_BODY = [(spec, route) for spec, route in ROUTES if route.method in ("POST", "PUT")]
every_body = pytest.mark.parametrize(("spec", "route"), WITH_BODY, ids=lambda item: getattr(item, "path", ""))


class Stage:
    """Sets the scene for one route: jobs in the state it needs."""

    def __init__(self, http: Http, queue: str) -> None:
        self.http = http
        self.queue = queue

    def push(self, **options: Any) -> str:
        return str(self.http.ok("POST", f"/queues/{self.queue}/jobs", {"data": {"n": 1}, **options})["id"])

    def pull(self, **options: Any) -> tuple[str, str | None]:
        self.push(**options)
        found = self.http.ok("POST", f"/queues/{self.queue}/jobs/pull-batch", {"count": 1, "owner": "w"})
        return found["jobs"][0]["id"], found["tokens"][0]

    def bury(self) -> str:
        job, token = self.pull()
        self.http.ok("POST", f"/jobs/{job}/fail", {"token": token, "error": "boom", "unrecoverable": True})
        return job

    def complete(self) -> str:
        job, token = self.pull()
        self.http.ok("POST", f"/jobs/{job}/ack", {"token": token, "result": [1]})
        return job


Case = Callable[[Stage], tuple[dict[str, str], Any]]
"""Makes the scene; the path parameters and the body."""


def _queue(stage: Stage, body: Any = None) -> tuple[dict[str, str], Any]:
    return {"queue": stage.queue}, body


def _pulled(**body: Any) -> Case:
    def case(stage: Stage) -> tuple[dict[str, str], Any]:
        job, token = stage.pull()
        return {"id": job}, {"token": token, **body}

    return case


def _batch(**body: Any) -> Case:
    def case(stage: Stage) -> tuple[dict[str, str], Any]:
        job, token = stage.pull()
        return {}, {"ids": [job], "tokens": [token], **body}

    return case


def _cron(stage: Stage) -> tuple[dict[str, str], Any]:
    stage.http.ok("POST", "/crons", {"name": stage.queue, "queue": stage.queue, "data": 1, "repeatEvery": 1e9})
    return {"name": stage.queue}, None


def _webhook(stage: Stage) -> str:
    body = {"url": "http://127.0.0.1:9/x", "events": ["job.completed"]}
    return str(stage.http.ok("POST", "/webhooks", body)["data"]["webhookId"])


def _worker(stage: Stage) -> str:
    return str(stage.http.ok("POST", "/workers", {"name": "w", "queues": [stage.queue]})["data"]["workerId"])


def _consumer(stage: Stage) -> str:
    stage.http.ok("POST", f"/event-log/consumers/{stage.queue}", {"seq": 0})
    return stage.queue


def _flow(stage: Stage) -> tuple[dict[str, str], None]:
    stage.http.ok("POST", "/flows", {"id": stage.queue, "workflow": "w", "queue": stage.queue})
    return {"id": stage.queue}, None


def _of_job(make: Callable[[Stage], str], body: Any = None, name: str = "id") -> Case:
    return lambda stage: ({name: make(stage)}, body)


QUEUE: Case = _queue
NOTHING: Case = lambda s: ({}, None)  # noqa: E731

SUCCESS: dict[str, Case] = {
    "POST /queues/{queue}/jobs": lambda s: _queue(s, {"data": {"x": 1}, "attempts": 2}),
    "GET /queues/{queue}/jobs": lambda s: (s.push(), _queue(s))[1],
    "POST /queues/{queue}/jobs/bulk": lambda s: _queue(s, {"jobs": [{"data": 1}, {"data": 2, "attempts": 1}]}),
    "POST /queues/{queue}/jobs/pull-batch": lambda s: (s.push(), _queue(s, {"count": 5}))[1],
    "GET /queues/{queue}/jobs/list": QUEUE,
    "GET /queues/{queue}/jobs/search": QUEUE,
    "GET /jobs/{id}": _of_job(Stage.push),
    "GET /jobs/custom/{customId}": lambda s: ({"customId": s.push(jobId=f"{s.queue}/é 1")}, None),
    "DELETE /jobs/{id}": _of_job(Stage.push),
    "POST /jobs/{id}/ack": _pulled(result={"done": True}),
    "POST /jobs/{id}/fail": _pulled(error="boom", stack=["at x"]),
    "POST /jobs/ack-batch": _batch(results=[1]),
    "POST /jobs/heartbeat-batch": _batch(),
    "POST /jobs/extend-locks": _batch(durations=[60_000]),
    "GET /jobs/{id}/state": _of_job(Stage.push),
    "GET /jobs/{id}/result": _of_job(Stage.complete),
    "GET /jobs/{id}/progress": lambda s: ({"id": s.pull()[0]}, None),
    "GET /jobs/{id}/children": _of_job(Stage.push),
    "POST /jobs/{id}/progress": lambda s: ({"id": s.pull()[0]}, {"progress": 50, "message": "half"}),
    "PUT /jobs/{id}/data": _of_job(Stage.push, {"data": [1, 2]}),
    "PUT /jobs/{id}/priority": _of_job(Stage.push, {"priority": 9, "lifo": True}),
    "PUT /jobs/{id}/delay": _of_job(Stage.push, {"delay": 60_000}),
    "POST /jobs/{id}/promote": lambda s: ({"id": s.push(delay=60_000)}, None),
    "POST /jobs/{id}/discard": _of_job(Stage.push),
    "POST /jobs/{id}/move-to-delayed": _pulled(delay=1000),
    "POST /jobs/{id}/move-to-wait": _pulled(),
    "POST /jobs/{id}/heartbeat": _pulled(duration=60_000),
    "POST /jobs/{id}/extend-lock": _pulled(duration=60_000),
    "POST /jobs/{id}/wait": _of_job(Stage.complete, {"timeout": 10}),
    "GET /jobs/{id}/logs": _of_job(Stage.push),
    "POST /jobs/{id}/logs": _of_job(Stage.push, {"message": "hello", "level": "warn"}),
    "DELETE /jobs/{id}/logs": _of_job(Stage.push),
    "GET /queues": NOTHING,
    "GET /queues/summary": NOTHING,
    "GET /queues/{queue}/counts": QUEUE,
    "GET /queues/{queue}/count": QUEUE,
    "GET /queues/{queue}/priority-counts": QUEUE,
    "GET /queues/{queue}/paused": QUEUE,
    "GET /queues/{queue}/workers": QUEUE,
    "POST /queues/{queue}/pause": QUEUE,
    "POST /queues/{queue}/resume": QUEUE,
    "POST /queues/{queue}/drain": QUEUE,
    "POST /queues/{queue}/obliterate": QUEUE,
    "POST /queues/{queue}/clean": lambda s: _queue(s, {"grace": 0, "state": "completed", "limit": 10}),
    "POST /queues/{queue}/promote-jobs": lambda s: _queue(s, {"count": 3}),
    "POST /queues/{queue}/retry-completed": lambda s: _queue(s, {"id": s.complete()}),
    "GET /queues/{queue}/dlq": lambda s: (s.bury(), _queue(s))[1],
    "GET /queues/{queue}/dlq/stats": QUEUE,
    "POST /queues/{queue}/dlq/retry": lambda s: _queue(s, {"jobId": s.bury()}),
    "POST /queues/{queue}/dlq/purge": QUEUE,
    "DELETE /queues/{queue}/dlq/{jobId}": lambda s: ({"queue": s.queue, "jobId": s.bury()}, None),
    "GET /queues/{queue}/limits": QUEUE,
    "PUT /queues/{queue}/rate-limit": lambda s: _queue(s, {"limit": 5, "duration": 1000}),
    "DELETE /queues/{queue}/rate-limit": QUEUE,
    "PUT /queues/{queue}/concurrency": lambda s: _queue(s, {"concurrency": 3}),
    "DELETE /queues/{queue}/concurrency": QUEUE,
    "GET /queues/{queue}/stall-config": QUEUE,
    "PUT /queues/{queue}/stall-config": lambda s: _queue(s, {"maxStalls": 5}),
    "GET /queues/{queue}/dlq-config": QUEUE,
    "PUT /queues/{queue}/dlq-config": lambda s: _queue(s, {"config": {"maxEntries": 7}}),
    "GET /crons": NOTHING,
    "POST /crons": lambda s: ({}, {"name": s.queue, "queue": s.queue, "data": 1, "schedule": "0 0 1 1 *"}),
    "GET /crons/{name}": _cron,
    "DELETE /crons/{name}": _cron,
    "GET /webhooks": NOTHING,
    "POST /webhooks": lambda s: ({}, {"url": "http://127.0.0.1:9/hook", "events": ["job.failed"], "queue": s.queue}),
    "DELETE /webhooks/{webhookId}": _of_job(_webhook, name="webhookId"),
    "PUT /webhooks/{id}/enabled": _of_job(_webhook, {"enabled": False}),
    "GET /workers": NOTHING,
    "POST /workers": lambda s: ({}, {"name": "w", "queues": [s.queue], "concurrency": 4}),
    "DELETE /workers/{workerId}": _of_job(_worker, name="workerId"),
    "POST /workers/{id}/heartbeat": _of_job(_worker, {"activeJobs": 1}),
    "GET /health": NOTHING,
    "GET /ready": NOTHING,
    "GET /ping": NOTHING,
    "GET /stats": NOTHING,
    "GET /metrics": NOTHING,
    "GET /storage": NOTHING,
    "GET /prometheus": NOTHING,
    "GET /heapstats": NOTHING,
    "POST /gc": NOTHING,
    "GET /dashboard": NOTHING,
    "GET /dashboard/queues": NOTHING,
    "GET /dashboard/queues/{queue}": QUEUE,
    "GET /dashboard/crons": NOTHING,
    "GET /flows": NOTHING,
    "POST /flows": lambda s: ({}, {"id": s.queue, "workflow": "w", "queue": s.queue}),
    "GET /flows/{id}": _flow,
    "POST /flows/{id}/cancel": lambda s: (_flow(s)[0], {"reason": "enough"}),
    "POST /flows/{id}/signals/{name}": lambda s: (_flow(s)[0] | {"name": "paid"}, {"payload": {"by": "ada"}}),
    "GET /dashboard/history": NOTHING,
    "GET /dashboard/failures": NOTHING,
    "GET /event-log": NOTHING,
    "GET /event-log/segments": NOTHING,
    "POST /event-log/consumers/{consumer}": lambda s: ({"consumer": s.queue}, {"seq": 0}),
    "DELETE /event-log/consumers/{consumer}": lambda s: ({"consumer": _consumer(s)}, None),
    "GET /scan/jobs": NOTHING,
    "GET /scan/results": NOTHING,
    "GET /scan/dlq": NOTHING,
}

# What goes wrong, the status and a part of the error text. Routes that cannot fail by themselves are not here.
BAD_QUEUE: Case = lambda s: ({"queue": "a b"}, None)  # noqa: E731
NO_JOB: Case = lambda s: ({"id": "nobody"}, None)  # noqa: E731
INVALID = "Queue name contains invalid characters"
FAILURE: dict[str, tuple[Case, int, str]] = {
    "POST /queues/{queue}/jobs": (lambda s: _queue(s, {}), 400, "data is required"),
    "GET /queues/{queue}/jobs": (BAD_QUEUE, 200, INVALID),
    "POST /queues/{queue}/jobs/bulk": (lambda s: _queue(s, {"jobs": [{}]}), 400, "jobs[0]: data is required"),
    "POST /queues/{queue}/jobs/pull-batch": (lambda s: _queue(s, {"count": 0}), 200, "count must be at least 1"),
    "GET /queues/{queue}/jobs/list": (BAD_QUEUE, 400, INVALID),
    "GET /queues/{queue}/jobs/search": (BAD_QUEUE, 400, INVALID),
    "GET /jobs/{id}": (NO_JOB, 404, "Job not found"),
    "GET /jobs/custom/{customId}": (lambda s: ({"customId": "nobody"}, None), 404, "Job not found"),
    "DELETE /jobs/{id}": (NO_JOB, 200, "Job not found or cannot be cancelled"),
    "POST /jobs/{id}/ack": (NO_JOB, 400, "Job not found or not in processing state"),
    "POST /jobs/{id}/fail": (NO_JOB, 400, "Job not found or not in processing state"),
    "POST /jobs/ack-batch": (lambda s: ({}, {"ids": ["nobody"]}), 400, "Job not found"),
    "POST /jobs/heartbeat-batch": (lambda s: ({}, {"ids": ["a"], "tokens": []}), 400, "length must match"),
    "POST /jobs/extend-locks": (lambda s: ({}, {"ids": ["a"], "tokens": [], "durations": [1]}), 400, "length must"),
    "GET /jobs/{id}/state": (lambda s: ({"id": "x" * 1025}, None), 404, "id must be at most 1024 characters"),
    "GET /jobs/{id}/result": (lambda s: ({"id": "x" * 1025}, None), 404, "id must be at most 1024 characters"),
    "GET /jobs/{id}/progress": (NO_JOB, 404, "Job not found"),
    "GET /jobs/{id}/children": (lambda s: ({"id": "x" * 1025}, None), 404, "id must be at most 1024 characters"),
    "POST /jobs/{id}/progress": (lambda s: ({"id": "nobody"}, {"progress": 1}), 400, "Job not found"),
    "PUT /jobs/{id}/data": (lambda s: ({"id": "nobody"}, {"data": 1}), 400, "Job not found or cannot be updated"),
    "PUT /jobs/{id}/priority": (lambda s: ({"id": "nobody"}, {"priority": 1}), 400, "Job not found"),
    "PUT /jobs/{id}/delay": (lambda s: ({"id": "nobody"}, {"delay": 1}), 400, "Job not found"),
    "POST /jobs/{id}/promote": (NO_JOB, 400, "Job not found or not delayed"),
    "POST /jobs/{id}/discard": (NO_JOB, 400, "Job not found"),
    "POST /jobs/{id}/move-to-delayed": (lambda s: ({"id": "nobody"}, {"delay": 1}), 400, "Job not found"),
    "POST /jobs/{id}/move-to-wait": (NO_JOB, 400, "Job not found"),
    "POST /jobs/{id}/heartbeat": (NO_JOB, 400, "Job not found or not active"),
    "POST /jobs/{id}/extend-lock": (lambda s: ({"id": "nobody"}, {"duration": 1}), 400, "Lock not found"),
    "POST /jobs/{id}/wait": (lambda s: ({"id": "nobody"}, {"timeout": 1}), 200, "Job not found"),
    "POST /jobs/{id}/logs": (lambda s: ({"id": "nobody"}, {"message": "x"}), 400, "Job not found"),
    "PUT /queues/{queue}/rate-limit": (lambda s: _queue(s, {"limit": "x"}), 200, "limit must be a finite number"),
    "PUT /queues/{queue}/concurrency": (lambda s: _queue(s, {"limit": "x"}), 200, "limit must be a finite number"),
    "DELETE /queues/{queue}/rate-limit": (BAD_QUEUE, 200, INVALID),
    "DELETE /queues/{queue}/concurrency": (BAD_QUEUE, 200, INVALID),
    "POST /crons": (lambda s: ({}, {"name": "x", "queue": "q", "data": 1}), 400, "either schedule or repeatEvery"),
    "GET /crons/{name}": (lambda s: ({"name": "nobody"}, None), 404, "Cron job not found"),
    "DELETE /crons/{name}": (lambda s: ({"name": "nobody"}, None), 404, "Cron job not found"),
    "POST /webhooks": (lambda s: ({}, {"events": []}), 400, "Webhook URL is required"),
    "DELETE /webhooks/{webhookId}": (lambda s: ({"webhookId": "nobody"}, None), 404, "Webhook not found"),
    "PUT /webhooks/{id}/enabled": (lambda s: ({"id": "nobody"}, {"enabled": True}), 400, "Webhook not found"),
    "POST /workers": (lambda s: ({}, {"name": "w"}), 400, "queues is required"),
    "DELETE /workers/{workerId}": (lambda s: ({"workerId": "nobody"}, None), 404, "Worker not found"),
    "POST /workers/{id}/heartbeat": (NO_JOB, 200, "Worker not found"),
    "POST /event-log/consumers/{consumer}": (lambda s: ({"consumer": "x"}, {}), 400, "seq is required"),
    "DELETE /event-log/consumers/{consumer}": (lambda s: ({"consumer": "nobody"}, None), 404, "Consumer not found"),
    **{
        f"{method} /queues/{{queue}}/{word}": (BAD_QUEUE, 400, INVALID)
        for method, words in (
            ("GET", "counts count priority-counts paused workers dlq dlq/stats stall-config dlq-config"),
            ("POST", "pause resume drain obliterate promote-jobs retry-completed dlq/retry dlq/purge"),
        )
        for word in words.split()
    },
    "POST /queues/{queue}/clean": (lambda s: _queue(s, {}), 400, "grace is required"),
    "PUT /queues/{queue}/stall-config": (lambda s: _queue(s, {"maxStalls": 0}), 400, "config.maxStalls must be"),
    "PUT /queues/{queue}/dlq-config": (lambda s: _queue(s, {"maxEntries": 0}), 400, "config.maxEntries must be"),
    "GET /queues/{queue}/limits": (BAD_QUEUE, 400, INVALID),
    "DELETE /queues/{queue}/dlq/{jobId}": (lambda s: ({"queue": "a b", "jobId": "x"}, None), 400, INVALID),
    "GET /dashboard/queues/{queue}": (BAD_QUEUE, 400, INVALID),
    "POST /flows": (lambda s: ({}, {"workflow": "w", "queue": "q"}), 400, "id is required"),
    "GET /flows/{id}": (lambda s: ({"id": "nobody"}, None), 404, "Flow not found: nobody"),
    "POST /flows/{id}/cancel": (lambda s: ({"id": "nobody"}, {}), 404, "Flow not found: nobody"),
    "POST /flows/{id}/signals/{name}": (lambda s: ({"id": "nobody", "name": "x"}, {}), 404, "Flow not found: nobody"),
}
# Routes without a field in path or body that could be wrong.
CANNOT_FAIL = {
    *(f"GET {path}" for path in ("/queues", "/queues/summary", "/crons", "/flows", "/webhooks", "/workers")),
    *(
        f"GET {path}"
        for path in ("/health", "/ready", "/ping", "/stats", "/storage", "/heapstats", "/metrics", "/prometheus")
    ),
    *(f"GET /dashboard{path}" for path in ("", "/queues", "/crons", "/history", "/failures")),
    *(f"GET {path}" for path in ("/event-log", "/event-log/segments", "/scan/jobs", "/scan/results", "/scan/dlq")),
    *("POST /gc", "GET /jobs/{id}/logs", "DELETE /jobs/{id}/logs"),
}


def path_of(route: Route, parameters: dict[str, str]) -> str:
    return re.sub(r"{(\w+)}", lambda match: quote(parameters[match[1]], safe=""), route.path)


def some_path(route: Route) -> str:
    return re.sub(r"{\w+}", "x", route.path)


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


@every_route
def test_every_route_answers_200_when_all_is_well(http: Http, queue: str, spec: Spec, route: Route) -> None:
    parameters, body = SUCCESS[name_of(route)](Stage(http, queue[-120:]))
    answer = http.call(route.method, path_of(route, parameters), body)
    assert answer.status == 200, answer
    if route.path == "/prometheus":
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"bunqueue_jobs_waiting" in answer.body
    elif route.path == "/queues/summary":
        assert isinstance(answer.json, list)
    else:
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["ok"] is True


@every_route
def test_every_route_fails_with_its_own_status(http: Http, queue: str, spec: Spec, route: Route) -> None:
    name = name_of(route)
    if name in CANNOT_FAIL:
        assert name not in FAILURE
        return
    case, status, text = FAILURE[name]
    parameters, body = case(Stage(http, queue[-120:]))
    answer = http.call(route.method, path_of(route, parameters), body)
    assert (answer.status, text in answer.error) == (status, True), answer


@every_body
def test_broken_json_is_400_whatever_the_route_says_of_failures(http: Http, spec: Spec, route: Route) -> None:
    answer = http.call(route.method, some_path(route), b'{"a":')
    assert (answer.status, answer.error) == (400, "Invalid JSON body")


@every_body
def test_a_form_is_415(http: Http, spec: Spec, route: Route) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = http.call(route.method, some_path(route), b"a=1", form)
    assert (answer.status, answer.error) == (415, "Content-Type must be application/json")


@pytest.mark.parametrize("said", [{}, {"Content-Type": "application/json"}])
def test_a_packed_body_is_415(web: WebServer, said: dict[str, str]) -> None:
    body = gzip.compress(b"{}")
    with web.http() as http:
        http.connection.request("POST", "/gc", body, {"Content-Encoding": "gzip", **said})
        response = http.connection.getresponse()
        assert response.status == 415
        assert b"Content-Encoding is not supported" in response.read()


@every_body
def test_unknown_fields_are_named(http: Http, spec: Spec, route: Route) -> None:
    answer = http.call(route.method, some_path(route), {"bogus": 1})
    expected = "Unknown field: config.bogus" if route.whole else "Unknown field: bogus"
    assert (answer.status, answer.error) == (400, expected)


@every_route
def test_unknown_query_parameters_are_named(http: Http, spec: Spec, route: Route) -> None:
    answer = http.call(route.method, some_path(route) + "?bogus=1")
    assert (answer.status, answer.error) == (400, "Unknown query parameter: bogus")


@every_route
def test_other_methods_are_405_and_the_right_ones_named(http: Http, spec: Spec, route: Route) -> None:
    answer = http.call("PATCH", some_path(route))
    assert answer.status == 405
    assert route.method in answer.headers["allow"].split(", ")


@every_route
def test_without_a_token_every_route_but_health_and_metrics_is_401(
    guarded: WebServer, spec: Spec, route: Route
) -> None:
    with guarded.http() as http:
        answer = http.call(route.method, some_path(route))
    if route.path in ("/health", "/ready", "/prometheus"):
        assert answer.status == 200
    else:
        assert (answer.status, answer.error) == (401, "Unauthorized")


def test_every_get_that_changes_nothing_has_a_head_and_pulling_has_none(http: Http, queue: str) -> None:
    for spec, route in ROUTES:
        if route.method == "GET":
            answer = http.call("HEAD", some_path(route))
            assert answer.body == b""
            assert answer.status == 405 if spec.flags & Flag.WRITE else answer.status in (200, 404), route


# -- shapes that HTTP alone has ----------------------------------------------------------------------------------------


def test_summary_is_a_bare_list_with_counts(http: Http, queue: str) -> None:
    Stage(http, queue).push()
    row = next(row for row in http.ok("GET", "/queues/summary") if row["name"] == queue)
    assert row["paused"] is False
    assert row["counts"]["waiting"] == 1


def test_dead_letters_come_in_pages_with_their_total(http: Http, queue: str) -> None:
    stage = Stage(http, queue)
    buried = [stage.bury() for _ in range(3)]
    page = http.ok("GET", f"/queues/{queue}/dlq?limit=2&offset=1")
    assert [entry["job"]["id"] for entry in page["entries"]] == buried[1:]
    assert page["total"] == 3
    assert set(page) == {"ok", "entries", "total"}


def test_figures_of_one_queue_stand_beside_ok(http: Http, queue: str) -> None:
    stage = Stage(http, queue)
    stage.bury()
    shown = http.ok("GET", f"/queues/{queue}/dlq/stats")
    assert set(shown) == {"ok", "stats"}
    assert shown["stats"]["total"] == 1
    worker = _worker(stage)
    shown = http.ok("GET", f"/queues/{queue}/workers")
    assert [found["id"] for found in shown["workers"]] == [worker]


def test_the_dashboard_is_flat_and_has_100_queues_by_default(http: Http, queue: str) -> None:
    for number in range(101):
        http.ok("POST", f"/queues/{queue[:100]}.{number}/jobs", {"data": 0})
    shown = http.ok("GET", "/dashboard/queues")
    assert "data" not in shown
    assert len(shown["queues"]) == 100
    assert shown["total"] > 100
    assert "stats" in http.ok("GET", "/dashboard")
    detail = http.ok("GET", f"/dashboard/queues/{queue[:100]}.7?includeJobs=true&jobsLimit=1")
    assert len(detail["jobs"]["waiting"]) == 1


def test_health_tells_queues_connections_and_memory(http: Http) -> None:
    health = http.ok("GET", "/health")
    assert health["status"] == "healthy"
    assert set(health["queues"]) == {"waiting", "active", "delayed", "completed", "dlq"}
    assert set(health["connections"]) == {"tcp", "ws", "sse"}
    assert health["memory"]["rss"] > 1
    assert http.get("/healthz").body == http.get("/live").body == b"OK"
    assert http.get("/ready").json == {"ready": True, "ok": True}


@pytest.mark.parametrize(
    "query",
    [
        "state=waiting,delayed",
        "state=waiting,%20delayed&limit=&offset=",
        "state=waiting&state=delayed",
        "status=waiting,delayed",
        "states=waiting&states=delayed&state=",
    ],
)
def test_states_may_be_listed_in_every_way(http: Http, queue: str, query: str) -> None:
    stage = Stage(http, queue)
    stage.complete()
    pushed = [stage.push(), stage.push(delay=60_000)]
    found = http.ok("GET", f"/queues/{queue}/jobs/list?{query}")["jobs"]
    assert [job["id"] for job in found] == pushed


def test_what_a_query_leaves_empty_is_not_asked_for(http: Http, queue: str) -> None:
    job = Stage(http, queue).push()
    found = http.ok("GET", f"/queues/{queue}/jobs/list?state=&limit=&offset=&asc=")["jobs"]
    assert [each["id"] for each in found] == [job]
    assert http.get(f"/queues/{queue}/jobs/list?bogus=").error == "Unknown query parameter: bogus"


def test_numbers_and_flags_in_a_query_are_typed(http: Http, queue: str) -> None:
    stage = Stage(http, queue)
    jobs = [stage.push() for _ in range(3)]
    page = http.ok("GET", f"/queues/{queue}/jobs/list?limit=1&offset=1&asc=false")
    assert [job["id"] for job in page["jobs"]] == [jobs[1]]
    answer = http.get(f"/queues/{queue}/jobs/list?limit=many")
    assert (answer.status, answer.error) == (400, "limit must be a number")
    assert http.get(f"/queues/{queue}/jobs?timeout=nan").error == "timeout must be a number"


def test_jobs_are_searched_on_the_server(http: Http, queue: str) -> None:
    jobs = [http.ok("POST", f"/queues/{queue}/jobs", {"data": {"to": f"a/b {n}"}})["id"] for n in range(3)]
    found = http.ok("GET", f"/queues/{queue}/jobs/search?text=A%2Fb%202&state=waiting,active")
    assert [job["id"] for job in found["jobs"]] == [jobs[2]]
    assert (found["examined"], found["cursor"]) == (3, None)


def test_attempts_is_another_name_of_max_attempts(http: Http, queue: str) -> None:
    job = Stage(http, queue).push(attempts=7)
    assert http.ok("GET", f"/jobs/{job}")["job"]["maxAttempts"] == 7
    ids = http.ok("POST", f"/queues/{queue}/jobs/bulk", {"jobs": [{"data": 1, "attempts": 9}]})["ids"]
    assert http.ok("GET", f"/jobs/{ids[0]}")["job"]["maxAttempts"] == 9


def test_unknown_fields_are_found_inside_too(http: Http, queue: str) -> None:
    answer = http.post(f"/queues/{queue}/jobs", {"data": {"anything": 1}, "backoff": {"type": "fixed", "dely": 1}})
    assert answer.error == "Unknown field: backoff.dely"
    answer = http.post(f"/queues/{queue}/jobs/bulk", {"jobs": [{"data": 1}, {"data": 1, "prio": 1}]})
    assert answer.error == "Unknown field: jobs[1].prio"


def test_a_body_must_be_an_object_and_agree_with_the_path(http: Http, queue: str) -> None:
    assert http.post(f"/queues/{queue}/jobs", [1]).error == "Invalid JSON body: must be an object"
    assert (
        http.post(f"/queues/{queue}/jobs", {"data": 1, "queue": "other"}).error
        == "queue differs from the one in the path"
    )
    assert http.post(f"/queues/{queue}/jobs", {"data": 1, "queue": queue}).status == 200
    assert http.call("GET", "/stats", {"a": 1}).error == "GET takes no body"


def test_a_config_may_be_sent_bare_or_wrapped(http: Http, queue: str) -> None:
    http.ok("PUT", f"/queues/{queue}/dlq-config", {"maxEntries": 11})
    http.ok("PUT", f"/queues/{queue}/dlq-config", {"config": {"maxAge": None}})
    config = http.ok("GET", f"/queues/{queue}/dlq-config")["config"]
    assert (config["maxEntries"], config["maxAge"]) == (11, None)


def test_path_parameters_are_decoded_part_by_part(http: Http, queue: str) -> None:
    job = Stage(http, queue).push(jobId=f"{queue[:50]}/a%b ü")
    assert http.ok("GET", f"/jobs/{quote(job, safe='')}")["job"]["id"] == job
    assert http.get("/jobs/%ff").error == "The path is not valid UTF-8"


def test_a_pull_over_http_waits_for_a_job(web: WebServer, http: Http, queue: str) -> None:
    found: list[Any] = []
    with web.http() as waiting:
        thread = threading.Thread(target=lambda: found.append(waiting.ok("GET", f"/queues/{queue}/jobs?timeout=9000")))
        thread.start()
        job = Stage(http, queue).push()
        thread.join(8)
    assert found[0]["job"]["id"] == job


def test_jobs_pulled_over_http_stay_with_their_worker_when_the_connection_closes(web: WebServer, queue: str) -> None:
    with web.http() as http:
        job, _ = Stage(http, queue).pull()
    with web.http() as http:
        assert http.ok("GET", f"/jobs/{job}/state")["state"] == "active"


def test_a_durable_push_is_answered_after_its_sync(http: Http, queue: str) -> None:
    assert Stage(http, queue).push(durable=True)
