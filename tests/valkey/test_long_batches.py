"""Batches that are too long for one call: stored in parts, but checked as a whole before the first part is stored."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.backends.valkey.backend import ValkeyBackend
from headrace.backends.valkey.intake import BULK
from headrace.errors import InvalidCommand, NotSupported
from headrace.model import Dedup
from tests.conformance.rig import Rig, spec
from tests.valkey.foreign import Foreign
from tests.valkeyserver import shared_server

LONG = 2 * BULK + 1
REPLACING = Dedup(replace=True)


class Overtaken(ValkeyBackend):
    """Somebody makes a job depend on another one between the check and the first part."""

    awaited = ""

    async def _call(self, verb: str, queue: str, *args: Any, **options: Any) -> list[Any]:
        reply = await super()._call(verb, queue, *args, **options)
        if verb == "checkReplacements" and self.awaited:
            awaited, self.awaited = self.awaited, ""
            await self.insert_one("others", spec(depends_on=[awaited]))
        return reply


def test_jobs_that_replace_others_are_stored_in_parts(rig: Rig, foreign: Foreign) -> None:
    before = rig.push_many(*(spec(unique_key=f"k{n}") for n in range(LONG)))
    foreign.client.config_resetstat()
    after = rig.push_many(*(spec(unique_key=f"k{n}", dedup=REPLACING) for n in range(LONG)))
    assert foreign.client.info("commandstats")["cmdstat_fcall"]["calls"] == 6, "three checks and three parts"
    assert not set(before) & set(after)
    assert rig.count() == {"waiting": LONG}
    assert rig.pulled_ids(count=2 * LONG) == after


def test_one_of_them_may_replace_another_of_an_earlier_part(rig: Rig) -> None:
    first, *_, last = rig.push_many(*(spec(unique_key=f"k{n % BULK}", dedup=REPLACING) for n in range(LONG)))
    assert rig.states(first, last) == ["unknown", "waiting"]
    assert rig.count() == {"waiting": BULK}


def test_a_job_that_somebody_comes_to_wait_for_meanwhile_answers_for_the_push(rig: Rig) -> None:
    rig.wait(rig.backend.close())
    rig.backend = Overtaken(f"{shared_server().url}?prefix={rig.backend.url.prefix}", clock=rig.clock)
    rig.wait(rig.backend.open())
    known = rig.push(unique_key="k0")
    rig.backend.awaited = known
    ids = rig.push_many(*(spec(unique_key=f"k{n}", dedup=REPLACING) for n in range(LONG)))
    assert ids[0] == known
    assert rig.count() == {"waiting": LONG}
    assert rig.count("others") == {"waitingChildren": 1}


@pytest.mark.parametrize("data", ["x" * 1_100_000, "\x01" * 180_000], ids=["as it came", "as JSON"])
@pytest.mark.parametrize("options", [{}, {"priority": 1}, {"timeout": 1000}], ids=str)
def test_one_that_is_too_large_refuses_all(rig: Rig, data: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidCommand, match="too large for this backend"):
        rig.push_many(*(spec(n, **options) for n in range(LONG)), spec(data, **options))
    assert rig.count() == {}


def test_one_that_cannot_be_promised_refuses_all(rig: Rig) -> None:
    with pytest.raises(NotSupported, match="append-only file"):
        rig.push_many(*(spec(n) for n in range(LONG)), spec(durable=True))
    assert rig.count() == {}
