"""docs/events.md: its programs run as they are written and print what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples import pages

PRINTED = {
    "fraud_check": {"Verdict(ok=True)", "['billed o1', 'indexed o1']"},
    "nightly": {"often {'kind': 'short'}", "['nightly', 'often']"},
    "handle_second": {"req-9 u1 True True"},
    "events.sync()": {"42"},
}


@pytest.mark.parametrize("words", PRINTED)
def test_the_programs_of_the_page_run(words: str, tmp_path: Path) -> None:
    folder = pages.prepare(tmp_path)
    program = pages.block_with("docs/events.md", "python", words)
    assert PRINTED[words] <= set(pages.run([".venv/bin/python", "-c", program], folder).splitlines())


def test_every_program_of_the_page_is_run() -> None:
    assert len(pages.blocks("docs/events.md", "python")) == len(PRINTED)
