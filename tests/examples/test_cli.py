"""docs/cli.md: every line that the reader is told to type works, in the order of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.examples import pages

PAGE = "docs/cli.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pages.prepare(tmp_path)


def test_the_page_can_be_followed_from_top_to_bottom(folder: Path) -> None:
    serve, *rest = pages.blocks(PAGE, "sh")
    printed: dict[str, str] = {}
    with pages.serving(serve, folder) as line:
        port = pages.port_of(line)
        for block in rest:
            printed[block] = pages.run_shell(block, folder, port)

    def of(words: str) -> str:
        (found,) = [text for block, text in printed.items() if words in block]
        return found

    assert [line.split(" in ")[0] for line in of("orders.csv").splitlines()] == [
        "added 2 jobs to orders",
        "added 0 jobs to orders",
    ]
    assert of("orders.csv").splitlines()[1].endswith("; 2 were there already")
    assert of("job A-1 fail").splitlines()[-2:] == ["failed A-1", "exit code 1"]
    assert "order-77" in of("headrace job order-77\n")
    assert of("headrace dlq mail retry").count("1 dead letter of mail") == 1
    assert all(json.loads(line) for line in of("headrace queues --json").splitlines())
    assert of("cron next").count("Europe/Berlin") == 1
    assert of("headrace call Ping").splitlines()[-1] == "exit code 2"
    assert of("headrace health").splitlines()[0] == "healthy"
    moved = pages.run_shell("headrace queues --json --url sqlite:///copy.db", folder)
    assert json.loads(moved)["name"] == "mail-copy"
