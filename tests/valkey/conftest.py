"""Fixtures of the Valkey tests: our backend with a clock that stands still, and a foreign program on the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.rig import VALKEY, Rig
from tests.valkey.foreign import Foreign
from tests.valkeyserver import shared_server


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(VALKEY, tmp_path)
    rig.is_checking = False
    yield rig
    rig.close()


@pytest.fixture
def foreign(rig: Rig) -> Foreign:
    return Foreign(shared_server().client(), rig.backend.url.prefix, rig.clock)
