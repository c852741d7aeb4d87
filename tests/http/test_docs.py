"""docs/http.md: what it tells the reader to type works, and gives what it says it gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.server.projections import LIVE_NAMES, SNAPSHOTS
from tests.examples import pages
from tests.http.webserver import WebServer

PAGE = "docs/http.md"


def run(command: list[str], folder: Path, port: int) -> str:
    environment = {**os.environ, "HEADRACE_HTTP_PORT": str(port)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_examples_work_one_after_the_other(tmp_path: Path) -> None:
    with WebServer(tmp_path / "headrace.db") as web:
        outputs = []
        for block in pages.blocks(PAGE, "sh"):
            text = block.replace("localhost:6790", f"localhost:{web.http_port}")
            outputs.append(run(["bash", "-euo", "pipefail", "-c", text], tmp_path, web.http_port))
        told = "".join(outputs)
        assert '"ok":false' not in told
        assert '"state": "completed"' in told
        assert '1\n"mailbox full"' in told
        assert '"status": "healthy"' in told
        assert "event: job:pushed" in told
        (python,) = pages.blocks(PAGE, "python")
        printed = run([sys.executable, "-c", python], tmp_path, web.http_port)
        assert printed in (pages.ROOT / PAGE).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(LIVE_NAMES | set(SNAPSHOTS)))
def test_every_name_of_an_event_is_listed(name: str) -> None:
    assert f"`{name}`" in (pages.ROOT / PAGE).read_text(encoding="utf-8")
