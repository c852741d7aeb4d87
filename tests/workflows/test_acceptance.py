"""Every acceptance case of events and workflows, EW-001 to EW-208, and every experiment, X1 to X20, names a test."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
CONTRACT = TESTS.parent / "src/headrace/workflows/testing/contract.py"
# What a name holds: `test_ew_092_094_100_...`, `test_ew_154_ew_198_...`, `test_ew_053_085_110_x8_...`
_CASES = re.compile(r"def (test_(?:ew_\d{3}_(?:\d{3}_)*|x\d+_)+)")


def _numbers(mark: str) -> set[int]:
    pages = [CONTRACT, *(TESTS / "events").glob("*.py"), *(TESTS / "workflows").glob("*.py")]
    names = [name for page in pages for name in _CASES.findall(page.read_text())]
    return {int(number) for name in names for number in re.findall(mark, name)}


def test_every_acceptance_case_has_a_test() -> None:
    assert set(range(1, 209)) - _numbers(r"(?<![x\d])\d{3}") == set()


def test_every_experiment_has_a_test() -> None:
    assert set(range(1, 21)) - _numbers(r"x(\d+)_") == set()
