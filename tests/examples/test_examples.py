"""The programs in examples/: each runs as written against a real server and prints what its story says."""

from __future__ import annotations

import sys

import pytest

from tests.examples import pages
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

STORIES = {
    "produce_and_consume.py": [
        "result {'sent': 'ada@example.com'}",
        "result {'sent': 'grace@example.com'}",
        "result {'sent': 'edsger@example.com'}",
        "completed 3",
    ],
    "retries_and_dead_letters.py": [
        "attempt 1 of 12: the bank does not answer",
        "attempt 2 of 12: the bank does not answer",
        "attempt 3 of 12: the bank does not answer",
        "attempt 1 of -5: amount must not be negative",
        "dead letter 12: the bank does not answer (attempts: 3)",
        "dead letter -5: amount must not be negative (attempts: 1)",
        "after the retry: charged 12",
        "left in the dead-letter queue: 1",
    ],
    "flow.py": ["before: waiting-children", "report: 2 pages, 45 characters", "after: completed"],
}


def test_every_example_has_a_test_and_a_line_in_the_list() -> None:
    folder = pages.ROOT / "examples"
    assert {path.name for path in folder.glob("*.py")} == set(STORIES)
    listed = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name})" in listed for name in STORIES)


@pytest.mark.parametrize("name", STORIES)
def test_an_example_tells_its_story_and_tidies_up(name: str, server: ServerProcess, client: Client) -> None:
    printed = pages.run([sys.executable, f"examples/{name}"], pages.ROOT, server.port)
    assert printed.splitlines() == STORIES[name]
    left = [queue for queue in client.call("ListQueues")["queues"] if "examples-" in str(queue)]
    assert left == []


def test_an_example_can_be_run_twice(server: ServerProcess) -> None:
    for _ in range(2):
        printed = pages.run([sys.executable, "examples/flow.py"], pages.ROOT, server.port)
        assert printed.splitlines() == STORIES["flow.py"]
