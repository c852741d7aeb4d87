"""`make demo`, with a short shift: the tour that the README promises, from the first job to the report."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.examples import pages


@pytest.mark.timeout(450)
def test_the_tour_goes_from_the_first_job_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LIMIT_S", 400.0)
    told = pages.run([sys.executable, str(pages.ROOT / "tools/demo.py"), "--seconds", "6"], tmp_path)
    headings = [line for line in told.splitlines() if line.startswith("== ")]
    assert [heading.split(";")[0] for heading in headings] == [
        "== a server that keeps its history",
        "== a shift of 6 s",
        "== where it stands",
        "== the pipeline: events, jobs, facts",
        "== done",
    ]
    assert " jobs done, " in told
    report = (tmp_path / "demo/report.html").read_text(encoding="utf-8")
    for queue in ("mail", "image"):
        assert queue in report
    assert list((tmp_path / "demo/lake").rglob("*.parquet"))
