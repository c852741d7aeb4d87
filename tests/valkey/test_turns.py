"""What is asked of a queue in one turn of the loop is one call: who gets what, and what it costs inside the server."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Ack, Demand
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.errors import StorageUnavailable
from tests.conformance import valkeykeys
from tests.conformance.rig import Held, Rig, spec, unpack
from tests.valkey.foreign import Foreign
from tests.valkeyserver import ValkeyServer

MAX_TO_ADD = 4
MAX_TO_WORK = 17
NOT_INNER = ("cmdstat_info", "cmdstat_config|resetstat", "cmdstat_fcall")


def together(rig: Rig, *work: Awaitable[Any], is_checked: bool = True) -> list[Any]:
    """Replies and errors of what is asked in one turn; a check would count among the commands of the server."""

    async def gathered() -> list[Any]:
        return await asyncio.gather(*work, return_exceptions=True)

    replies = rig.wait(gathered())
    rig.settle()
    if is_checked:
        valkeykeys.check(rig.backend)
    return replies


def ended(held: Held, result: bytes | None = None) -> Ack:
    return Ack(held.id, held.token, result)


def ids(claims: Any) -> list[str]:
    return [unpack(claim.job)["id"] for claim in claims]


def calls(foreign: Foreign) -> tuple[int, int]:
    """Function calls, and commands inside them, since the figures were reset."""
    stats = foreign.client.info("commandstats")
    inner = sum(row["calls"] for name, row in stats.items() if name not in NOT_INNER)
    return stats.get("cmdstat_fcall", {"calls": 0})["calls"], inner


def test_a_worker_in_full_swing_needs_one_call_per_job_and_no_more_commands_than_promised(
    rig: Rig, foreign: Foreign
) -> None:
    rig.push_many(*(spec(n) for n in range(30)))
    held = rig.take(lease_ms=30_000)
    foreign.client.config_resetstat()
    for _ in range(20):
        rig.clock.advance(1)
        _, claims = together(
            rig, rig.backend.complete([ended(held)]), rig.backend.claim("q", Demand(1, "w")), is_checked=False
        )
        held = Held(ids(claims)[0], claims[0].token, {})
    functions, inner = calls(foreign)
    assert functions == 20
    assert inner / 20 <= MAX_TO_WORK


def test_adding_one_job_needs_no_more_commands_than_promised(rig: Rig, foreign: Foreign) -> None:
    rig.push()
    foreign.client.config_resetstat()
    for _ in range(20):
        rig.push()
    functions, inner = calls(foreign)
    assert (functions, inner) == (20, 20 * MAX_TO_ADD)


def test_many_workers_at_once_share_the_call_and_its_books(rig: Rig, foreign: Foreign) -> None:
    pushed = rig.push_many(*(spec(n) for n in range(40)))
    held = rig.pull(count=20)
    foreign.client.config_resetstat()
    acks = [rig.backend.complete([ended(one)]) for one in held]
    pulls = [rig.backend.claim("q", Demand(1, f"w{n}")) for n in range(20)]
    replies = together(rig, *acks, *pulls, is_checked=False)
    functions, inner = calls(foreign)
    assert (functions, replies[:20]) == (1, [[]] * 20)
    assert inner / 20 < 7
    assert [ids(claims) for claims in replies[20:]] == [[job_id] for job_id in pushed[20:]]


def test_the_first_who_asked_is_served_whole_before_the_next(rig: Rig) -> None:
    pushed = rig.push_many(*(spec(n) for n in range(5)), spec(5, priority=3))
    claims = together(rig, *(rig.backend.claim("q", Demand(count, "w")) for count in (2, 3, 4)))
    found = [ids(one) for one in claims]
    assert [len(one) for one in found] == [2, 3, 1]
    assert found[0] == [pushed[5], pushed[0]]
    tokens = [claim.token for one in claims for claim in one]
    assert len(set(tokens)) == 6


def test_a_lot_is_all_or_none_and_those_beside_it_are_not_held_up(rig: Rig, foreign: Foreign) -> None:
    rig.push_many(*(spec(n) for n in range(4)))
    first, second, third, fourth = rig.pull(count=4)
    rig.ack(fourth)
    fine, refused = together(
        rig,
        rig.backend.complete([ended(first)]),
        rig.backend.complete([ended(second), Ack(third.id, "not its token")]),
    )
    assert fine == []
    assert isinstance(refused, Exception)
    assert rig.states(first.id, second.id, third.id) == ["completed", "active", "active"]
    assert rig.ack(second) == rig.ack(third) == []


def test_an_end_that_comes_twice_in_one_turn_counts_once(rig: Rig, foreign: Foreign) -> None:
    rig.push()
    held = rig.take()
    once, twice = together(rig, rig.backend.complete([ended(held)]), rig.backend.complete([ended(held)]))
    assert (once, twice) == ([], [0])
    assert [event["event"] for event in foreign.events()].count("completed") == 1
    (same,) = together(rig, rig.backend.complete([ended(held), ended(held)]))
    assert same == [0, 1]


def test_a_job_that_is_no_longer_plain_ends_by_the_longer_way(rig: Rig, foreign: Foreign) -> None:
    job_id = rig.push()
    held = rig.take()
    waiting = rig.push(depends_on=[job_id])
    assert foreign.hash(job_id)["hv"] == "1"
    rig.ack(held, "done")
    assert rig.state(waiting) == "waiting"
    assert rig.look(job_id)["returnvalue"] == "done"


def test_a_result_that_json_does_not_hold_comes_back_as_it_was(rig: Rig) -> None:
    rig.push()
    held = rig.take()
    rig.complete([ended(held, b"\xc4\x02\x00\xff")])
    assert rig.look(held.id)["returnvalue"] == b"\x00\xff"


@pytest.mark.parametrize("owner", ["w", None], ids=["leased", "held by a connection"])
def test_plain_jobs_come_back_with_nothing_left_of_the_lease(rig: Rig, foreign: Foreign, owner: str | None) -> None:
    job_id = rig.push()
    holder: dict[str, int] = {}
    rig.take(owner=owner, holder=holder)
    rig.release(holder)
    fields = foreign.hash(job_id)
    assert fields["state"] == "waiting"
    assert not {"tok", "own", "hb", "ls", "ser", "until"} & set(fields)
    assert rig.run().id == job_id


async def test_who_shares_a_call_that_fails_hears_of_it_and_nothing_is_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ValkeyServer(tmp_path) as server:
        backend = ValkeyBackend(server.url)
        await backend.open()
        await backend.insert("q", [spec(n) for n in range(5)])
        held = await backend.claim("q", Demand(3, "w"))
        acks = [Ack(unpack(claim.job)["id"], claim.token) for claim in held]
        server.kill()
        asked = (backend.complete_each(acks), backend.claim("q", Demand(1, "w")))
        for outcome in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(outcome, StorageUnavailable)
        assert not backend._turns
        await backend.close()
    gc.collect()
    assert "never retrieved" not in caplog.text
