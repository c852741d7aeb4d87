"""Importing the client is cheap: a program that only might use a queue must not pay for an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BASE = "import asyncio, msgspec"
CLIENT = "import headrace; from headrace.client.queue import Queue; from headrace.connect import open_client"
MAX_CPU_S = 0.030
ROUNDS = 5


def run(code: str, cache: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["PYTHONPYCACHEPREFIX"] = str(cache)  # compiled once, as in an installation
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def cpu_s(code: str, cache: Path) -> float:
    return float(run(f"{code}\nimport time\nprint(time.process_time())", cache))


@pytest.mark.alone
def test_the_client_costs_little_more_than_what_it_stands_on(tmp_path: Path) -> None:
    run(f"{BASE}\n{CLIENT}", tmp_path)
    pairs = [(cpu_s(BASE, tmp_path), cpu_s(f"{BASE}\n{CLIENT}", tmp_path)) for _ in range(ROUNDS)]
    # The cheapest run of each kind is the one that was disturbed least.
    assert min(client for _, client in pairs) - min(base for base, _ in pairs) <= MAX_CPU_S, pairs


def test_what_only_a_server_needs_is_not_loaded(tmp_path: Path) -> None:
    loaded = run(f"import sys\n{CLIENT}\nprint(*sys.modules)", tmp_path).split()
    heavy = ("apsw", "uvloop", "zoneinfo", "cronsim", "httptools", "wsproto", "zstandard", "tomllib", "random")
    ours = ("headrace.engine", "headrace.server", "headrace.backends", "headrace.embedded", "headrace.wire")
    assert [name for name in loaded if name.startswith((*heavy, *ours))] == []
