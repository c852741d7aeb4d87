"""The pytest plugin, found by its entry point: `headrace_app` is the app under test on a test bench of its own.

Pytest's settings name the app (`headrace_app = "shop.jobs:app"`); a fixture of the same name in a
conftest.py, or a test, may also choose one with `headrace_use(app)`. See docs/testing.md.

Rule: import nothing of headrace here. Every pytest run on a machine that has the package loads this module.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.tasks.app import Headrace
    from headrace.testing.bench import AppBench


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("headrace_app", "the Headrace app that the fixture headrace_app tests, as module:name")


@pytest.fixture
def headrace_use() -> Iterator[Callable[[Headrace], AppBench]]:
    """Put an app on a bench until the end of the test."""
    from headrace.testing.bench import put_on_bench

    with contextlib.ExitStack() as benches:
        yield lambda app: benches.enter_context(put_on_bench(app))


@pytest.fixture
def headrace_app(request: pytest.FixtureRequest, headrace_use: Callable[[Headrace], AppBench]) -> AppBench:
    """The app of the settings, on a bench."""
    place = request.config.getini("headrace_app")
    if not place:
        raise pytest.UsageError(
            'which app? Say it in the settings of pytest (headrace_app = "shop.jobs:app"), or ask for the fixture '
            "headrace_use and call headrace_use(app)"
        )
    return headrace_use(pkgutil.resolve_name(place))
