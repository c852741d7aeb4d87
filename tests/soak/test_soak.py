"""The long mixed run in short, with every promise kept. `make soak` is the long one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scale import IS_FULL, scaled

ROOT = Path(__file__).resolve().parents[2]
SECONDS = scaled(16, 300)
SIZE = scaled(1, 4)
"""Of faults, in seconds; leases outlast them."""


@pytest.mark.alone
@pytest.mark.timeout(scaled(180, 900))
def test_every_promise_is_kept_while_everything_fails_at_once(tmp_path: Path) -> None:
    size = ["--minutes", str(SECONDS / 60), "--longest", str(SIZE), "--lease", str(max(6, 4 * SIZE))]
    load = ["--rate", "20", "--ingests", "2"] if IS_FULL else ["--rate", "20", "--ingests", "0", "--small"]
    more = [*load, "--folder", str(tmp_path / "run"), "--seed", "11"]
    done = subprocess.run(
        [sys.executable, "-m", "soak", *size, *more], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert done.stdout.count("PASS") > 20
