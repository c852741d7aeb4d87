"""Answers that come once more, at another broker: the reply to the first was lost with the connection."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.backends.base import Ack, Demand
from headrace.backends.valkey.backend import ValkeyBackend
from headrace.errors import NotFound
from tests.conformance.rig import spec, unpack
from tests.valkeyserver import shared_server


@pytest.fixture
async def brokers(prefix: str) -> AsyncIterator[list[ValkeyBackend]]:
    opened = [ValkeyBackend(f"{shared_server().url}?prefix={prefix}") for _ in range(2)]
    for broker in opened:
        await broker.open()
    yield opened
    for broker in opened:
        await broker.close()


async def take(broker: ValkeyBackend) -> Ack:
    (claim,) = await broker.claim("q", Demand(1, "w", 30_000, {}))
    return Ack(unpack(claim.job)["id"], claim.token, None, None)


@pytest.mark.parametrize("custom_id", [None, "chosen"])
async def test_the_end_of_a_job_that_is_gone_may_be_told_again(
    brokers: list[ValkeyBackend], custom_id: str | None
) -> None:
    first, second = brokers
    await first.insert_one("q", spec(1, remove_on_complete=True, custom_id=custom_id))
    await first.insert_one("q", spec(2))
    done, other = await take(first), await take(first)
    assert await first.complete([done]) == []
    assert await second.complete([done, other]) == [0]
    assert (await second.counts("q")).completed == 1
    with pytest.raises(NotFound):
        await second.complete([Ack(done.id, "another", None, None)])


async def test_an_id_that_was_used_by_a_job_that_is_gone_can_be_used_at_once_in_another_queue(
    brokers: list[ValkeyBackend],
) -> None:
    first, second = brokers
    await first.insert_one("q", spec(1, remove_on_complete=True, custom_id="chosen"))
    done = await take(first)
    await first.complete([done])
    assert await second.insert_one("r", spec(2, custom_id="chosen")) == "chosen"
    assert await first.state("chosen") == "waiting"
    assert await second.state("chosen") == "waiting"
