"""docs/client.md: its programs print what it says, and its tables leave nothing out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import errors
from headrace.client.job import JobVerbs
from headrace.client.options import Options
from headrace.client.policy import ConnectionOptions
from headrace.client.queue import DlqVerbs, QueueVerbs
from headrace.client.verbs import verb
from tests.examples import pages
from tests.serverprocess import ServerProcess

PAGE = "docs/client.md"
TEXT = (pages.ROOT / PAGE).read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_every_program_of_the_page_is_followed_by_what_it_prints() -> None:
    assert [program for program, _ in PROGRAMS] == pages.blocks(PAGE, "python")
    assert len(PROGRAMS) >= 8


@pytest.mark.parametrize(("program", "printed"), PROGRAMS, ids=lambda text: text.strip().splitlines()[-1][:40])
def test_a_program_prints_what_the_page_says(program: str, printed: str, tmp_path: Path, server: ServerProcess) -> None:
    environment = {**os.environ, "HEADRACE_URL": f"headrace://127.0.0.1:{server.port}"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (printed, "")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = TEXT.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def words(heading: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)", " ".join(row[0] for row in rows(heading))))


def verbs_of(kind: type[Any]) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, verb)}


def test_the_tables_name_every_verb() -> None:
    assert verbs_of(JobVerbs) == words("## Following a job")
    steering = words("## Managing a queue")
    assert {f"dlq.{name}" for name in verbs_of(DlqVerbs)} == {word for word in steering if word.startswith("dlq.")}
    described = {word for word in steering if not word.startswith("dlq.")} | {"add", "add_many"}
    assert verbs_of(QueueVerbs) <= described


def test_the_table_of_job_options_is_complete() -> None:
    assert words("## Adding jobs") == set(Options.__annotations__)


def test_the_table_of_connection_options_has_every_name_and_default() -> None:
    defaults = dict(zip(ConnectionOptions.__struct_fields__, ConnectionOptions.__struct_defaults__, strict=True))
    shown = {name.strip("`"): default.strip("`") for name, default, _ in rows("## The connection")}
    plain = {None: "none", True: "true"}
    expected = {
        name: plain.get(value, f"{value:g}" if isinstance(value, float) else str(value))
        for name, value in defaults.items()
    }
    assert shown == expected


def test_the_table_of_errors_names_real_ones() -> None:
    assert all(issubclass(getattr(errors, name), errors.HeadraceError) for name in words("## Errors"))
