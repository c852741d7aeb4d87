"""Importing the client is cheap: a program that only might use a queue must not pay for an engine or a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BASE = "import asyncio, msgspec"
CLIENT = "import headrace; from headrace.client.queue import Queue; from headrace.connect import open_client"
APP = "from headrace import Headrace"
MAX_CPU_S = 0.030
ROUNDS = 7


def run(code: str, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPYCACHEPREFIX"] = str(cache)  # compiled once, as in an installation
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def cpu_s(code: str, cache: Path) -> float:
    """What `code` takes in a process that has imported the base already."""
    return float(run(f"{BASE}, time\nbegan = time.process_time()\n{code}\nprint(time.process_time() - began)", cache))


@pytest.mark.alone
@pytest.mark.parametrize("code", [CLIENT, APP], ids=["client", "app"])
def test_importing_costs_little_more_than_what_it_stands_on(code: str, tmp_path: Path) -> None:
    run(f"{BASE}\n{code}", tmp_path)
    costs = [cpu_s(code, tmp_path) for _ in range(ROUNDS)]
    assert min(costs) <= MAX_CPU_S, costs  # whatever else the machine does only adds


@pytest.mark.parametrize("code", [CLIENT, APP], ids=["client", "app"])
def test_what_only_a_server_or_a_worker_needs_is_not_loaded(code: str, tmp_path: Path) -> None:
    loaded = run(f"import sys\n{code}\nprint(*sys.modules)", tmp_path).split()
    heavy = ("apsw", "uvloop", "zoneinfo", "cronsim", "httptools", "wsproto", "zstandard", "tomllib", "multiprocessing")
    ours = ("headrace.engine", "headrace.server", "headrace.backends", "headrace.embedded", "headrace.wire")
    working = ("headrace.worker.worker", "headrace.worker.processes", "headrace.commands.jobs")
    assert [name for name in loaded if name.startswith((*heavy, *ours, *working))] == []
