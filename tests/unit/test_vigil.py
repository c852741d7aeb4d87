"""The vigil: held as long as it pays, and never for long."""

from __future__ import annotations

import asyncio

from headrace.server.vigil import LENGTH_S, Vigil


async def _vigils(ticks: int, somebody_comes: bool) -> int:
    """How many vigils are held over so many ticks."""
    vigil = Vigil(asyncio.get_running_loop())
    held = 0
    for _ in range(ticks):
        vigil.begin()
        held += vigil.is_kept
        if somebody_comes:
            vigil.end()
        else:
            await asyncio.sleep(2 * LENGTH_S)
        assert not vigil.is_kept
    return held


async def test_a_client_that_comes_back_at_once_is_awaited_every_time() -> None:
    assert await _vigils(200, somebody_comes=True) == 200


async def test_vigils_become_rare_while_nobody_comes() -> None:
    assert await _vigils(200, somebody_comes=False) == 8


async def test_vigils_come_back_with_the_clients() -> None:
    vigil = Vigil(asyncio.get_running_loop())
    for _ in range(200):
        vigil.begin()
        await asyncio.sleep(2 * LENGTH_S)
    held = 0
    for _ in range(200):
        vigil.begin()
        held += vigil.is_kept
        vigil.end()
    assert held > 50
