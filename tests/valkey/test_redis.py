"""The core of the conformance suite on Redis 7, the other server that we promise to work on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import test_claim, test_finish, test_insert, test_leases, test_retry
from tests.conformance.rig import REDIS, Rig
from tests.valkey.core import core_of
from tests.valkey.foreign import Foreign
from tests.valkeyserver import redis_binary, shared_server

LEFT_OUT = (
    "test_five_thousand_keys_are_all_exact",  # this one and the next take long and are shown on Valkey
    "test_order_survives_thousands_of_cancelled_jobs",
)

globals().update(core_of((test_claim, test_finish, test_insert, test_leases, test_retry), LEFT_OUT))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(REDIS, tmp_path)
    yield rig
    rig.close()


def test_the_server_is_redis_7(rig: Rig) -> None:
    assert shared_server(redis_binary()).client().info("server")["redis_version"].startswith("7.")


def test_jobs_of_other_producers_flow_and_their_ends_are_told(rig: Rig) -> None:
    foreign = Foreign(shared_server(redis_binary()).client(), rig.backend.url.prefix, rig.clock)
    first, urgent, key = foreign.add({"n": 1}), foreign.add({"n": 2}, priority=3), foreign.add(ordering="k")
    assert [rig.run().id for _ in range(3)] == [f"q:{job_id}" for job_id in (urgent, first, key)]
    assert foreign.counts() == {"waiting": 0, "active": 0, "delayed": 0, "completed": 3, "failed": 0}
    assert [event["event"] for event in foreign.events()].count("completed") == 3
