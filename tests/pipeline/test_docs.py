"""docs/pipeline.md: its blocks run as they are written, one after the other, against a real server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.pipeline.session import QUICK_JAVA
from tests.examples import pages
from tests.protocol.steps import bury, complete, push
from tests.scale import scaled
from tests.serverprocess import ServerProcess

PAGE = "docs/pipeline.md"


@pytest.mark.timeout(scaled(400, 1800))
def test_the_page_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LIMIT_S", float(scaled(200, 600)))
    with ServerProcess(tmp_path / "jobs.db", "--capture", str(tmp_path / "log")) as server:
        with server.client() as client:
            for _ in range(5):
                push(client, "mail")
                complete(client, "mail")
            bury(client, "mail")
        monkeypatch.setattr(pages, "environment", lambda port=0: environment(server))
        (first_steps,) = pages.blocks(PAGE, "sh")
        told = pages.run_shell(f"{{\n{first_steps}\n}} 2>&1", tmp_path)
        assert "silver     run 1" in told
        assert not [line for line in told.splitlines() if " WARN " in line or "log4j" in line]
        assert (tmp_path / "report.html").stat().st_size > 5_000
        with_duckdb, with_spark = pages.blocks(PAGE, "python")
        assert "completed" in pages.run(["python", "-c", with_duckdb], tmp_path)
        assert "1000 jobs wait" in pages.run(["python", "-c", with_spark], tmp_path)


def environment(server: ServerProcess) -> dict[str, str]:
    path = f"{pages.ENVIRONMENT}{os.pathsep}{os.environ['PATH']}"
    url = f"headrace://127.0.0.1:{server.port}"
    return {**os.environ, "PATH": path, "HEADRACE_URL": url, "JDK_JAVA_OPTIONS": QUICK_JAVA}
