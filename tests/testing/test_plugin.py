"""The plugin as pytest finds it: by its entry point, in a project of somebody else."""

from __future__ import annotations

import pytest

pytest_plugins = "pytester"

JOBS = """
    from headrace import Headrace

    app = Headrace("headrace://nowhere.invalid:1")

    @app.task()
    async def double(n: int) -> int:
        return 2 * n
"""

TESTS = """
    import threading

    import pytest
    from jobs import app, double

    @pytest.mark.asyncio
    async def test_runs(headrace_app):
        job = await double.enqueue(21)
        await headrace_app.drain()
        assert await job.result() == 42

    def test_is_alone(headrace_app):
        assert headrace_app.enqueued() == []
        with app.sync() as queue:
            queue.enqueue(double, 1)
        headrace_app.sync.drain()

    def test_leaves_no_thread_but_the_one_that_all_share():
        names = sorted(thread.name for thread in threading.enumerate())
        assert names == ["MainThread", "headrace-line"]
"""


def run(pytester: pytest.Pytester) -> pytest.RunResult:
    """In a process of its own, without plugins that take long to load."""
    return pytester.runpytest_subprocess("-p", "no:schemathesis", "-p", "no:hypothesispytest", "-p", "no:playwright")


def test_a_project_names_its_app_in_the_settings(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(jobs=JOBS, test_jobs=TESTS)
    pytester.makeini("[pytest]\nheadrace_app = jobs:app\npythonpath = .\nasyncio_default_fixture_loop_scope = function")
    run(pytester).assert_outcomes(passed=3)


def test_without_a_name_the_fixture_says_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(headrace_app): ...")
    done = run(pytester)
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["*which app? Say it in the settings of pytest*"])


def test_the_plugin_loads_nothing_of_the_package_by_itself(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_it():
            loaded = {name for name in sys.modules if name.startswith("headrace")}
            assert loaded == {"headrace", "headrace.testing", "headrace.testing.plugin"}
        """
    )
    run(pytester).assert_outcomes(passed=1)
