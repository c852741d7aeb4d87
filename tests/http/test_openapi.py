"""The description at /openapi.json holds: requests made from it never break the server, and answers match it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import jsonschema_rs
import pytest

from headrace.commands import REGISTRY
from headrace.server.openapi import describe
from tests.http.webserver import Answer, Http, WebServer
from tests.scale import scaled

API = describe()
OPERATIONS = [
    (method.upper(), path, operation)
    for path, operations in API["paths"].items()
    for method, operation in operations.items()
    if path not in ("/events", "/events/queues/{queue}", "/ws", "/ws/queues/{queue}")
]
every_operation = pytest.mark.parametrize(
    ("method", "path", "operation"), OPERATIONS, ids=[f"{method} {path}" for method, path, _ in OPERATIONS]
)
TEXTS = ("", "a", "0", "job", "é\u2028☃", "x" * 300, "a/b?c#d%", "waiting", "\x00", "null", "-1")
NUMBERS = (0, 1, -1, 2, 7, 1.5, 1000, 2**31, 2**53, 1e300, -1e300)


class Maker:
    """Makes values of a schema; now and then one that breaks it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def value(self, schema: dict[str, Any], depth: int = 0) -> Any:
        if self.random.random() < 0.08:
            return self.random.choice([None, True, [], {}, "x", -1, 1e9, [[]], {"a": {}}])
        if "$ref" in schema:
            return self.value(API["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], depth)
        if "anyOf" in schema:
            return self.value(self.random.choice(schema["anyOf"]), depth)
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        return getattr(self, f"_{schema.get('type', 'any')}")(schema, depth)

    def _any(self, schema: dict[str, Any], depth: int) -> Any:
        return self.random.choice([None, 1, "text", [1, {"a": [2]}], {"k": "v", "t": 1794780368394}])

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        rarity = 0.3 if depth == 0 else 0.5
        made = {
            name: self.value(inner, depth + 1)
            for name, inner in schema.get("properties", {}).items()
            if (name in required and self.random.random() > 0.05) or (depth < 4 and self.random.random() < rarity)
        }
        if self.random.random() < 0.03:
            made["surprise"] = 1
        return made

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        return [self.value(schema["items"], depth + 1) for _ in range(self.random.choice((0, 1, 1, 2, 5)))]

    def _string(self, schema: dict[str, Any], depth: int) -> str:
        if "pattern" in schema and self.random.random() < 0.8:
            return self.random.choice(("fuzz", "fuzz.a", "fuzz-b:1"))
        return self.random.choice(TEXTS)

    def _integer(self, schema: dict[str, Any], depth: int) -> Any:
        return self.random.choice([schema.get("minimum", 0), schema.get("maximum", 9), 3, self.random.choice(NUMBERS)])

    def _number(self, schema: dict[str, Any], depth: int) -> Any:
        # A long poll or a wait of an hour would not end with the test.
        return self.random.choice([schema.get("minimum", 0), 1, 2.5, 20, self.random.choice(NUMBERS[:6])])

    def _boolean(self, schema: dict[str, Any], depth: int) -> bool:
        return self.random.random() < 0.5

    def _null(self, schema: dict[str, Any], depth: int) -> None:
        return None

    def path(self, path: str, operation: dict[str, Any], ids: list[str]) -> str:
        given = {p["name"]: p["schema"] for p in operation.get("parameters", ()) if p["in"] == "path"}

        def part(match: re.Match[str]) -> str:
            if match[1] == "id" and ids and self.random.random() < 0.7:
                return ids[self.random.randrange(len(ids))]
            return quote(str(self.value(given[match[1]])) or "x", safe="")

        return re.sub(r"{(\w+)}", part, path)

    def query(self, operation: dict[str, Any]) -> str:
        pairs = []
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "query" and self.random.random() < 0.4:
                value = self.value(parameter["schema"])
                text = value if isinstance(value, str) else json.dumps(value)
                pairs.append(f"{parameter['name']}={quote(text)}")
        return "?" + "&".join(pairs) if pairs else ""


def check_answer(answer: Answer, operation: dict[str, Any]) -> None:
    """No 5xx, a status that the description names, and a body of the shape that it gives."""
    assert answer.status < 500, answer
    described = operation["responses"].get(str(answer.status))
    assert described is not None, (answer.status, answer.body[:500], sorted(operation["responses"]))
    content_type = answer.headers["content-type"].partition(";")[0]
    content = described["content"].get(content_type)
    assert content is not None, (content_type, described)
    if content_type == "application/json":
        schema = {**content["schema"], "components": API["components"]}
        errors = [f"{list(e.instance_path)}: {e.message}" for e in jsonschema_rs.iter_errors(schema, answer.json)]
        assert not errors, (errors[:3], answer.body[:500])


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[WebServer]:
    with WebServer(":memory:", "--webhook-allow", "127.0.0.0/8") as running:
        yield running


@pytest.fixture(scope="module")
def ids(fuzzed: WebServer) -> list[str]:
    """Jobs in all states, to be done things to."""
    made = []
    with fuzzed.http() as http:
        for number in range(60):
            made.append(http.ok("POST", "/queues/fuzz/jobs", {"data": number, "delay": 60_000 * (number % 3)})["id"])
        for _ in range(10):
            job = http.ok("GET", "/queues/fuzz/jobs")["job"]["id"]
            http.ok("POST", f"/jobs/{job}/fail", {"error": "boom", "unrecoverable": True})
        for _ in range(5):
            http.ok("POST", f"/jobs/{http.ok('GET', '/queues/fuzz/jobs')['job']['id']}/ack", {"result": 1})
        http.ok("GET", "/queues/fuzz/jobs")
    return made


@every_operation
def test_requests_made_from_the_description_are_answered_as_described(
    fuzzed: WebServer, ids: list[str], method: str, path: str, operation: dict[str, Any]
) -> None:
    maker = Maker(sum(map(ord, method + path)))
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    with fuzzed.http(timeout=30) as http:
        for _ in range(scaled(15, 300)):
            body = None if schema is None else maker.value(schema)
            target = maker.path(path, operation, ids) + maker.query(operation)
            if path.endswith("/wait"):
                body = {"timeout": maker.random.choice((0, 1, "x", -1, 20))}  # without it the wait is half a minute
            if re.search(r"timeout=\d{3,}", target) or (isinstance(body, dict) and _is_long(body.get("timeout"))):
                continue
            check_answer(http.call(method, target, body), operation)


def _is_long(timeout: Any) -> bool:
    return isinstance(timeout, int | float) and timeout > 100


def test_the_server_is_well_after_all_that(fuzzed: WebServer) -> None:
    with fuzzed.http() as http, fuzzed.client() as client:
        assert http.ok("GET", "/health")["status"] == "healthy"
        assert client.ok("Ping")["data"]["pong"] is True


def test_the_description_is_served_and_every_route_of_the_registry_is_in_it(http: Http) -> None:
    served = http.ok("GET", "/openapi.json")
    assert served["openapi"] == "3.1.0"
    routes = {(route.method.lower(), route.path) for spec in REGISTRY.values() for route in spec.routes}
    assert routes <= {(method, path) for path, operations in served["paths"].items() for method in operations}


def test_a_request_with_too_long_a_path_is_answered_as_described(http: Http) -> None:
    answer = http.get(f"/queues/q/jobs/list?state={'x' * 17_000}")
    assert answer.status == 431
    check_answer(answer, API["paths"]["/queues/{queue}/jobs/list"]["get"])


def test_every_operation_has_an_id_of_its_own_and_a_summary() -> None:
    names = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(names)) == len(names)
    assert all(operation["summary"].endswith((".", "?")) for _, _, operation in OPERATIONS)


def test_the_description_is_valid_openapi() -> None:
    jsonschema_rs.meta.validate(API["components"]["schemas"]["Job"])
    for name, schema in API["components"]["schemas"].items():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}), name
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(API)))
    assert references <= set(API["components"]["schemas"])
