"""schemathesis, which knows nothing of this server but its description: what it makes up is answered as described.

`test_openapi` sends requests that are aimed at jobs in all states. This one is somebody else's idea of what may follow
from a description: the bounds of every field and just beyond, missing and surplus parts, wrong methods and types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.config import GenerationConfig, SchemathesisConfig

from headrace.server.openapi import describe
from tests.http.webserver import WebServer
from tests.scale import scaled

pytestmark = pytest.mark.alone  # schemathesis makes up its requests during collection: not in each of several workers
LONG_MS = 50
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]

config = SchemathesisConfig()
config.projects.default.generation = GenerationConfig(deterministic=True, no_shrink=True)
schema = schemathesis.openapi.from_dict(describe(), config=config).exclude(path_regex="^/(events|ws)")


@pytest.fixture(scope="module")
def session() -> Iterator[tuple[str, requests.Session]]:
    with WebServer(":memory:") as running, requests.Session() as kept:
        yield f"http://127.0.0.1:{running.http_port}", kept


@schema.parametrize()
@pytest.mark.parametrize("checks", [CHECKS], ids=["checks"])  # without a parameter all operations have one test id
@settings(max_examples=scaled(2, 40), suppress_health_check=list(HealthCheck))
def test_what_follows_from_the_description_is_answered_as_described(
    session: tuple[str, requests.Session], case: schemathesis.Case, checks: list[Any]
) -> None:
    base_url, kept = session
    if not _waits_long(case):
        case.call_and_validate(base_url=base_url, session=kept, checks=checks, timeout=10)


def _waits_long(case: schemathesis.Case) -> bool:
    """A long poll of an hour is as described, and would not end with the test."""
    given: list[Any] = [part.get("timeout") for part in (case.query, case.body) if isinstance(part, dict)]
    return any(_is_long(value) for value in given)


def _is_long(timeout: Any) -> bool:
    try:
        return float(timeout) > LONG_MS
    except (TypeError, ValueError):
        return False
