"""docs/testing.md: its project, run as the page has it."""

from __future__ import annotations

import pytest

from tests.examples import pages
from tests.testing.test_plugin import run

pytest_plugins = "pytester"


def test_the_project_of_the_page_passes_its_tests(pytester: pytest.Pytester) -> None:
    shop, tests, conftest = pages.blocks("docs/testing.md", "python")
    (settings,) = pages.blocks("docs/testing.md", "toml")
    more = 'pythonpath = ["."]\nasyncio_mode = "auto"\nasyncio_default_fixture_loop_scope = "function"\n'
    pytester.makepyfile(shop=shop, test_shop=tests)
    pytester.makepyprojecttoml(settings + more)
    run(pytester).assert_outcomes(passed=4)
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\n" + more)
    pytester.makeconftest(conftest)
    run(pytester).assert_outcomes(passed=4)
