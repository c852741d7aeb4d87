"""Disks that misbehave on demand: one that is small and can be filled, one that answers EIO while a file says so."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own of that size."""
    if os.geteuid() != 0:
        pytest.fail("this test mounts a small tmpfs and needs root: run the suite as root or with sudo")
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True, capture_output=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def fill(path: Path) -> None:
    """Take all the space that is left."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


@functools.cache
def _shim() -> Path:
    """The library that fails, compiled once: what differs from test to test is in the environment."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-shim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library, source = folder / "faultshim.so", Path(__file__).with_name("faultshim.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


class FaultyCalls:
    """The environment that preloads the shim, and the switch that makes it fail."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._trigger = folder / "fail-now"
        self.env = {"LD_PRELOAD": str(_shim()), "FAULT_PATH": pattern, "FAULT_TRIGGER": str(self._trigger)}

    def fail(self, *calls: str) -> None:
        staged = self._trigger.with_suffix(".new")
        staged.write_text(" ".join(calls))
        staged.rename(self._trigger)

    @property
    def counted(self) -> int:
        """How many syncs there were since `fail("count")`."""
        return len(self._trigger.with_suffix(".count").read_text())

    def heal(self) -> None:
        self._trigger.unlink(missing_ok=True)
