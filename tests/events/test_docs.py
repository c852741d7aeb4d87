"""docs/events.md: its programs run as they are written and print what the page says behind them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples import pages

PAGE = "docs/events.md"
TEXT = (pages.ROOT / PAGE).read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=lambda text: text.strip().splitlines()[-1][:40])
def test_the_programs_of_the_page_run(program: str, printed: str, tmp_path: Path) -> None:
    folder = pages.prepare(tmp_path)
    said = pages.run([".venv/bin/python", "-c", program], folder).splitlines()
    assert set(printed.splitlines()) <= set(said)  # a schedule may fire once more before the program ends


def test_every_program_of_the_page_is_followed_by_what_it_prints() -> None:
    assert [program for program, _ in PROGRAMS] == pages.blocks(PAGE, "python")
