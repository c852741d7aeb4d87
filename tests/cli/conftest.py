"""The command line against a real server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Cli, warmed_up
from tests.serverprocess import ServerProcess


@pytest.fixture(scope="package")
def warm() -> Iterator[subprocess.Popen[str]]:
    with warmed_up() as process:
        yield process


@pytest.fixture
def cli(server: ServerProcess, tmp_path: Path, warm: subprocess.Popen[str]) -> Cli:
    return Cli(f"headrace://127.0.0.1:{server.port}", tmp_path, warm)


@pytest.fixture
def offline(tmp_path: Path, warm: subprocess.Popen[str]) -> Cli:
    """No server is named: for what needs none."""
    return Cli(None, tmp_path, warm)
