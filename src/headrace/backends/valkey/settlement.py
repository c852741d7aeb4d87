"""How jobs end: complete, fail, dead letters, and coming back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.backends.base import Ack
from headrace.backends.valkey.arguments import Completion, Failing, Successor, Text, flat, pack
from headrace.backends.valkey.hashes import StoredJob, to_fields
from headrace.backends.valkey.keys import marked
from headrace.backends.valkey.turns import Lot, Turns
from headrace.errors import HeadraceError, NotFound, error_of
from headrace.model import Event, JobLinks
from headrace.schedules import next_repeat


class Settlement(Turns):
    # -- completing ----------------------------------------------------------------------------------------------------

    async def complete(self, acks: Sequence[Ack]) -> list[int]:
        if not acks:
            return []
        plain = self._lot_of(acks)
        if plain is not None and (await self._end_in_turn([plain]))[0]:
            self._tell_completed(acks, plain.jobs)
            return []
        outcomes = await self._complete(acks, "all")
        return [i for i, outcome in enumerate(outcomes) if outcome is False]

    async def complete_each(self, acks: Sequence[Ack]) -> list[bool | HeadraceError]:
        outcomes: list[bool | HeadraceError] = [False] * len(acks)
        rest = set(range(len(acks))) - await self._complete_plain(acks)
        chosen = sorted(rest)
        found = await self._complete([acks[i] for i in chosen], "each") if chosen else []
        for i, outcome in zip(chosen, found, strict=True):
            outcomes[i] = outcome
        return [outcome if i in rest else True for i, outcome in enumerate(outcomes)]

    async def _complete_plain(self, acks: Sequence[Ack]) -> set[int]:
        """Which of them were plain and are completed now."""
        lots: dict[str, list[tuple[int, Lot]]] = {}
        for i, ack in enumerate(acks):
            plain = self._lot_of([ack])
            if plain is not None:
                lots.setdefault(plain.queue, []).append((i, plain))
        done: set[int] = set()
        for members in lots.values():
            ended = await self._end_in_turn([lot for _, lot in members])
            for (i, lot), is_ended in zip(members, ended, strict=True):
                if is_ended:
                    self._tell_completed([acks[i]], lot.jobs)
                    done.add(i)
        return done

    async def _complete(self, acks: Sequence[Ack], mode: str) -> list[bool | HeadraceError]:
        places: list[tuple[str, str] | None] = [await self._held_place(ack.id) for ack in acks]
        outcomes: list[bool | HeadraceError] = [False] * len(acks)
        for i, place in enumerate(places):
            if place is None:
                error = NotFound(f"Job not found or not in processing state: {acks[i].id}")
                if mode == "all":
                    raise error
                outcomes[i] = error
        for members in self._by_call([None if place is None else place[0] for place in places]):
            chosen = [(acks[i], places[i]) for i in members]
            for i, outcome in zip(members, await self._complete_some(chosen, mode), strict=True):
                outcomes[i] = outcome
        return outcomes

    def _by_call(self, queues: list[str | None]) -> list[list[int]]:
        """Which acknowledgements one call takes: all of them, or in a cluster those of one queue."""
        groups: dict[str, list[int]] = {}
        for i, queue in enumerate(queues):
            if queue is not None:
                groups.setdefault(queue if self._server.is_cluster else "", []).append(i)
        return list(groups.values())

    async def _complete_some(
        self, chosen: Sequence[tuple[Ack, Any]], mode: str, plans: dict[str, Successor] | None = None
    ) -> list[bool | HeadraceError]:
        queues = list(dict.fromkeys(place[0] for _, place in chosen))
        args: list[Text] = [mode, pack(plans) if plans else ""]
        for ack, (queue, job_id) in chosen:
            value, raw = (b"", b"") if ack.result is None else to_fields(ack.result, "Result")
            args += flat(Completion(queues.index(queue) + 1, job_id, ack.token or None, value, raw, ack.remove))
        before = self._event_seq
        status, found = await self._call("complete", queues[0], *args, others=queues[1:])
        if status == b"repeat":
            return await self._complete_some(chosen, mode, await self._plans([chosen[i] for i in found]))
        self._attach_results(self._told_since(before), {ack.id: ack for ack, _ in chosen})
        return [self._ended(ack, outcome) for (ack, _), outcome in zip(chosen, found, strict=True)]

    def _ended(self, ack: Ack, outcome: Any) -> bool | HeadraceError:
        if isinstance(outcome, list):
            return error_of(outcome[0].decode(), outcome[1].decode())
        self._let_go(ack.id)
        return bool(outcome)

    def _attach_results(self, events: Sequence[Event], acks: dict[str, Ack]) -> None:
        for event in events:
            ack = acks.get(event.job) if event.event == "completed" else None
            if ack is not None and ack.result is not None:
                event.bytes = len(ack.result)
                self._attach(event, ack.result)

    # -- repetition ----------------------------------------------------------------------------------------------------

    async def _plans(self, chosen: Sequence[tuple[Ack, Any]]) -> dict[str, Successor]:
        """When the successors of these repeat jobs run; the functions cannot compute schedules."""
        plans = {}
        for _, place in chosen:
            job = await self._read(*place)
            if job is not None:
                plans[job.id] = self._plan(job)
        return plans

    def _plan(self, job: StoredJob) -> Successor:
        repeat = (job.links or JobLinks()).repeat
        if repeat is None:
            return Successor()
        now = self._clock.now_ms()
        planned = repeat.prev_millis if repeat.prev_millis is not None else float(job.run_at)
        run_at = next_repeat(msgspec.structs.replace(repeat, prev_millis=planned), now)
        if run_at is None:
            return Successor()
        following = msgspec.structs.replace(repeat, count=repeat.count + 1, prev_millis=float(run_at))
        return Successor(int(run_at), marked(self.ids.at(now), job.queue), following, job.size)

    # -- failing -------------------------------------------------------------------------------------------------------

    async def fail(
        self,
        job_id: str,
        *,
        token: str | None,
        error: str | None,
        stack: list[str] | None,
        unrecoverable: bool,
        remove: bool | None,
        retry_after: float | None = None,
    ) -> bool:
        place = await self._held_place(job_id)
        if place is None:
            raise NotFound(f"Job not found or not in processing state: {job_id}")
        queue, own_id = place
        lines = [line.strip() for text in stack or [] for line in text.splitlines() if line.strip()]
        body: bytes | None = None
        job = None
        if lines or self._wants_bodies(queue):
            job = await self._read(queue, own_id)
        if job is not None:
            body, lines = job.data, lines[: job.settings.stack_trace_limit]
        asked = Failing(
            own_id,
            token or None,
            error,
            pack(lines) if lines else b"",
            unrecoverable,
            remove,
            self._rng(),
            error is not None,
            None if retry_after is None else int(retry_after),
        )
        before = self._event_seq
        reply = await self._call("fail", queue, *flat(asked))
        for event in self._told_since(before):
            if event.event == "failed" and event.job == job_id:
                self._attach(event, body)
        self._let_go(job_id)
        return bool(reply[0])

    # -- coming back ---------------------------------------------------------------------------------------------------

    async def _revive(self, queue: str, state: str, ids: Sequence[str]) -> int:
        revived = 0
        for start in range(0, len(ids), 200):
            reply = await self._call("revive", queue, state, *ids[start : start + 200])
            revived += reply[0]
        return revived
