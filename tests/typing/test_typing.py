"""Type checkers see the signature of a task in its `enqueue`, and what it returns in the result of its job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).with_name("tasks.py")
ROOT = PAGE.parents[2]


class Judgement(NamedTuple):
    types: dict[int, str]
    errors: set[int]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT).stdout


def mypy() -> Judgement:
    said = _run(sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(PAGE))
    types = re.findall(r':(\d+): note: Revealed type is "(.*)"', said)
    errors = re.findall(r":(\d+): error:", said)
    return Judgement({int(line): found for line, found in types}, set(map(int, errors)))


def pyright() -> Judgement:
    said = _run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", str(PAGE))
    found = json.loads(said)["generalDiagnostics"]
    lines = [(note["range"]["start"]["line"] + 1, note["severity"], note["message"]) for note in found]
    types = {line: text.split(" is ", 1)[1].strip('"') for line, kind, text in lines if kind == "information"}
    return Judgement(types, {line for line, kind, _ in lines if kind == "error"})


def _expected() -> Judgement:
    lines = list(enumerate(PAGE.read_text().splitlines(), 1))
    types = {number: line.split("# is: ")[1] for number, line in lines if "# is: " in line}
    return Judgement(types, {number for number, line in lines if line.endswith("# error")})


@pytest.mark.parametrize("check", [mypy, pyright])
def test_row_20_checkers_know_what_tasks_take_and_give(check: Callable[[], Judgement]) -> None:
    judged, expected = check(), _expected()
    shown = {line: re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", found) for line, found in judged.types.items()}
    assert shown == expected.types
    assert judged.errors == expected.errors
    assert len(expected.types) > 10
