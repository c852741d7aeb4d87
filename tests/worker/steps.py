"""Waiting for things to become so, and reading what jobs wrote while they ran."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


async def eventually(is_so: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until a condition holds; it may be a coroutine function."""
    deadline = time.monotonic() + seconds
    while True:
        found = is_so()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"{inspect.getsource(is_so).strip()} did not come true in {seconds} s"
        await asyncio.sleep(0.01)


def lines(path: Path) -> list[str]:
    """What jobs appended to a file, each a whole line."""
    return path.read_text().splitlines() if path.exists() else []
