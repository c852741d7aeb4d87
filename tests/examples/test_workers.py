"""docs/workers.md: its programs run and print what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import pages

PAGE = "docs/workers.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pages.prepare(tmp_path)


def test_the_shop_runs_its_tasks_and_shows_them(folder: Path) -> None:
    (folder / "shop.py").write_text(pages.block_with(PAGE, "python", "def resize"))
    assert pages.run([".venv/bin/python", "shop.py"], folder) == "22\ncat.png@8\n"
    shown = pages.run_shell(pages.block_with(PAGE, "sh", "--check"), folder)
    tasks = [line.split()[:3] for line in shown.splitlines()[1:]]
    assert tasks == [
        ["crm", "tell_crm", "loop"],
        ["default", "nightly", "loop"],
        ["emails", "send", "loop"],
        ["images", "resize", "thread"],
    ]


def test_a_handler_of_your_own_takes_batches(folder: Path) -> None:
    assert pages.run([".venv/bin/python", "-c", pages.block_with(PAGE, "python", "batch=50")], folder) == "198\n"
