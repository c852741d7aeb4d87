"""Type checkers see the signature of a task in its `enqueue`, what jobs and flows give in their results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
PAGES = [HERE / "tasks.py", HERE / "events.py", HERE / "workflows.py"]
Place = tuple[str, int]


class Judgement(NamedTuple):
    types: dict[Place, str]
    errors: set[Place]


def _run(*command: str) -> str:
    given = [*command, *map(str, PAGES)]
    return subprocess.run(given, capture_output=True, text=True, timeout=110, check=False, cwd=HERE.parents[1]).stdout


def mypy() -> Judgement:
    said = _run(sys.executable, "-m", "mypy", "--strict", "--no-error-summary")
    types = re.findall(r'(\w+\.py):(\d+): note: Revealed type is "(.*)"', said)
    errors = re.findall(r"(\w+\.py):(\d+): error:", said)
    found = {(page, int(line)): shown for page, line, shown in types}
    return Judgement(found, {(page, int(line)) for page, line in errors})


def pyright() -> Judgement:
    said = _run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson")
    notes = [
        ((Path(note["file"]).name, note["range"]["start"]["line"] + 1), note["severity"], note["message"])
        for note in json.loads(said)["generalDiagnostics"]
    ]
    types = {place: text.split(" is ", 1)[1].strip('"') for place, kind, text in notes if kind == "information"}
    return Judgement(types, {place for place, kind, _ in notes if kind == "error"})


def _expected() -> Judgement:
    lines = [
        ((page.name, number), line) for page in PAGES for number, line in enumerate(page.read_text().splitlines(), 1)
    ]
    types = {place: line.split("# is: ")[1] for place, line in lines if "# is: " in line}
    return Judgement(types, {place for place, line in lines if line.endswith("# error")})


@pytest.mark.parametrize("check", [mypy, pyright])
def test_row_20_checkers_know_what_tasks_and_flows_take_and_give(check: Callable[[], Judgement]) -> None:
    judged, expected = check(), _expected()
    shown = {place: re.sub(r"\b[a-z_.]+\.(?=[A-Z])", "", found) for place, found in judged.types.items()}
    assert shown == expected.types
    assert judged.errors == expected.errors
    assert len(expected.types) > 20
