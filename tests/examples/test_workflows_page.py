"""docs/workflows.md: its programs print what the page says they print."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.examples.pages import ROOT, block_with, run

PAGE = "docs/workflows.md"


def printed(words: str) -> list[str]:
    """The block behind the program: what it prints."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    behind = text.split(block_with(PAGE, "python", words), 1)[1]
    return behind.split("```\n", 2)[2].split("```", 1)[0].splitlines()


def test_the_order_saga_completes_and_takes_itself_back(tmp_path: Path) -> None:
    (tmp_path / "order.py").write_text(block_with(PAGE, "python", "process_order"), encoding="utf-8")
    out = run([sys.executable, "order.py"], tmp_path).splitlines()
    expected = printed("process_order")
    assert [*out[:1], *sorted(out[1:3]), *out[3:]] == expected


def test_the_test_kit_reports_what_would_happen(tmp_path: Path) -> None:
    (tmp_path / "kit.py").write_text(block_with(PAGE, "python", "run_workflow("), encoding="utf-8")
    assert run([sys.executable, "kit.py"], tmp_path).splitlines() == printed("run_workflow(")


def test_threads_wait_for_a_flow_without_a_loop(tmp_path: Path) -> None:
    (tmp_path / "bill.py").write_text(block_with(PAGE, "python", "flows.sync()"), encoding="utf-8")
    assert run([sys.executable, "bill.py"], tmp_path).splitlines() == printed("flows.sync()")
