"""Completions of plain jobs, and claims, of one queue in one turn of the loop are batched into one call to the server.

A busy worker completes its jobs and asks for the next ones at the same time, and a broker gets that from many
workers at once: one call for all of them costs the server a fraction of one call each. Batching adds no delay: the call
leaves at the end of the turn.

Rules: a lot of completions is atomic; a claim is served completely before the next one. What is not plain goes through
`complete` and `claim` on their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from headrace.backends.base import Ack
from headrace.backends.valkey.arguments import Claiming, Text, flat
from headrace.backends.valkey.hashes import PLAIN_PARTICULARS, to_fields
from headrace.backends.valkey.intake import BULK, Intake
from headrace.backends.valkey.store import InHand
from headrace.backends.valkey.transport import Transport
from headrace.clock import Clock

_MAX_IN_HAND: Final = 100_000

HandedOut = tuple[int, list[Any]]
"""When jobs were handed out, and what the server gave of each."""


class Lot(NamedTuple):
    """Plain jobs of one queue that end together."""

    jobs: list[InHand]
    endings: list[Text]
    """Records `Ending`, flattened."""

    @property
    def queue(self) -> str:
        return self.jobs[0].queue


def split_claims(found: list[Any]) -> list[list[Any]]:
    """One list per job that was handed out: its hash or, of a plain job, its particulars, which stand in a row."""
    claims, at = [], 0
    while at < len(found):
        if isinstance(found[at], list):
            claims.append(found[at])
            at += 1
        else:
            claims.append(found[at : at + PLAIN_PARTICULARS])
            at += PLAIN_PARTICULARS
    return claims


class Turn:
    """What one call will carry, and who waits for its answer."""

    __slots__ = ("claims", "lots", "size")

    def __init__(self) -> None:
        self.lots: list[tuple[Lot, asyncio.Future[bool]]] = []
        self.claims: list[tuple[Claiming, asyncio.Future[HandedOut]]] = []
        self.size = 0

    def arguments(self) -> list[Text]:
        args: list[Text] = [str(len(self.claims))]
        for asked, _ in self.claims:
            args += flat(asked)
        for lot, _ in self.lots:
            args.append(str(len(lot.jobs)))
            args += lot.endings
        return args

    def answer(self, now: int, outcomes: list[int], handed_out: list[Any]) -> None:
        for (_, ended), outcome in zip(self.lots, outcomes, strict=True):
            if not ended.done():
                ended.set_result(bool(outcome))
        at = 0
        for asked, served in self.claims:
            if not served.done():
                served.set_result((now, handed_out[at : at + asked.count]))
            at += asked.count

    def fail(self, error: BaseException) -> None:
        waiting: list[asyncio.Future[Any]] = [ended for _, ended in self.lots]
        waiting += [served for _, served in self.claims]
        for future in waiting:
            if not future.done():
                future.set_exception(error)


class Turns(Intake):
    def __init__(self, transport: Transport, prefix: str, clock: Clock, rng: Callable[[], float]) -> None:
        super().__init__(transport, prefix, clock, rng)
        self._turns: dict[str, Turn] = {}
        self._turns_under_way: set[asyncio.Task[None]] = set()

    # -- joining -------------------------------------------------------------------------------------------------------

    async def _claim_in_turn(self, queue: str, asked: Claiming) -> HandedOut:
        served: asyncio.Future[HandedOut] = asyncio.get_running_loop().create_future()
        self._turn(queue, asked.count).claims.append((asked, served))
        return await served

    async def _end_in_turn(self, lots: Sequence[Lot]) -> list[bool]:
        """Whether each lot was completed; one that was not is untouched. All are of one queue."""
        loop = asyncio.get_running_loop()
        ended: list[asyncio.Future[bool]] = [loop.create_future() for _ in lots]
        for lot, future in zip(lots, ended, strict=True):
            self._turn(lot.queue, len(lot.jobs)).lots.append((lot, future))
        return [await ended[0]] if len(ended) == 1 else list(await asyncio.gather(*ended))

    def _turn(self, queue: str, size: int) -> Turn:
        turn = self._turns.get(queue)
        if turn is None or turn.size + size > BULK:
            turn = self._turns[queue] = Turn()
            task = asyncio.get_running_loop().create_task(self._take(queue, turn))
            self._turns_under_way.add(task)
            task.add_done_callback(self._turns_under_way.discard)
        turn.size += size
        return turn

    async def _take(self, queue: str, turn: Turn) -> None:
        if self._turns.get(queue) is turn:
            del self._turns[queue]
        now = self._clock.now_ms()
        try:
            outcomes, found = await self._call("completeAndClaim", queue, self.broker, *turn.arguments(), now=now)
            turn.answer(now, outcomes, split_claims(found))
        except BaseException as error:
            turn.fail(error)
            if not isinstance(error, Exception):
                raise

    # -- plain jobs ----------------------------------------------------------------------------------------------------

    def _take_in_hand(self, job_id: str, job: InHand) -> None:
        if len(self._in_hand) >= _MAX_IN_HAND:
            self._in_hand.clear()  # their ends take the longer way
        self._in_hand[job_id] = job

    def _lot_of(self, acks: Sequence[Ack]) -> Lot | None:
        """What ends these jobs, if all of them are plain ones of one queue that were handed out here."""
        if len(acks) > BULK:
            return None
        lot = Lot([], [])
        for ack in acks:
            job = self._in_hand.get(ack.id)
            if job is None or ack.remove is not None or (lot.jobs and job.queue != lot.queue):
                return None
            value, raw = (b"", b"") if ack.result is None else to_fields(ack.result, "Result")
            if raw:
                return None
            lot.jobs.append(job)
            lot.endings.extend((ack.id, ack.token or "", value))
        return lot

    def _tell_completed(self, acks: Sequence[Ack], jobs: Sequence[InHand]) -> None:
        """Plain jobs have ended; their events are made here."""
        now = self._clock.now_ms()
        for ack, job in zip(acks, jobs, strict=True):
            event = self._emit("completed", job.queue, now, ack.id, job.name)
            event.attempt, event.worker = job.attempts + 1, job.owner
            event.delay = now - job.started
            self._count(event)
            event.delay = None
            if ack.result is not None:
                event.bytes = len(ack.result)
                self._attach(event, ack.result)
            self._let_go(ack.id)
