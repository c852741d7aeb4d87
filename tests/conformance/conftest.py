"""Fixtures of the conformance suite: the same tests over every kind of backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.rig import KINDS, LOCAL_KINDS, Kind, Rig

PERSISTENT = [kind for kind in KINDS if kind.is_persistent]


def _names(kinds: list[Kind]) -> list[str]:
    return [kind.name for kind in kinds]


@pytest.fixture(params=KINDS, ids=_names(list(KINDS)))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """A fresh backend of every kind."""
    rig = Rig(request.param, tmp_path)
    yield rig
    rig.close()


@pytest.fixture(params=LOCAL_KINDS, ids=_names(list(LOCAL_KINDS)))
def local_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """A fresh backend of every kind in this process: for ticks, slices and monotonic time, which others do not have."""
    rig = Rig(request.param, tmp_path)
    yield rig
    rig.close()


@pytest.fixture(params=PERSISTENT, ids=_names(PERSISTENT))
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """A fresh backend of every kind that survives a restart."""
    rig = Rig(request.param, tmp_path)
    yield rig
    rig.close()
