"""Workflows as the store sees them: a record with a revision, an append-only log, and the jobs that belong to it.

Live flows are held in memory (the record alone), their logs and the ended ones on disk; in memory mode the "disk" is
SQLite's own memory, so nothing differs. Every change happens together with the jobs it pushes and the job it settles:
one tick, one commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Raw, structs

from headrace.backends.base import Ack, FlowPush, NewStep
from headrace.backends.local.job import Job
from headrace.backends.local.records import Records
from headrace.errors import Conflict, LeaseLost, NotFound
from headrace.model import DAY_MS, EventName, Flow, FlowStatus, FlowStep, JobLinks, JobSettings, intern_settings
from headrace.states import State, Verb
from headrace.views import encode

KEPT_FLOWS: Final = 10_000
KEPT_FLOWS_MS: Final = 7 * DAY_MS
RETIRED_AT_ONCE: Final = 1000
RETIRE_EVERY_MS: Final = 5000

_COLUMNS: Final = "id, workflow, queue, status, revision, created, updated, ended"
_NEWS: Final = {
    FlowStatus.COMPENSATING: EventName.FLOW_COMPENSATING,
    FlowStatus.COMPLETED: EventName.FLOW_COMPLETED,
    FlowStatus.FAILED: EventName.FLOW_FAILED,
    FlowStatus.CANCELLED: EventName.FLOW_CANCELLED,
}
_LIVE: Final = (State.WAITING, State.DELAYED, State.ACTIVE)
_DECIDE: Final = "decide"
# Who decides must not give up because a worker was killed a few times.
_DECISION: Final = intern_settings(JobSettings(max_attempts=100))


class Flows(Records):
    problems: list[str]
    _flows: dict[str, Flow]
    """The live ones."""
    _flow_sizes: dict[str, int]
    """How many entries their logs have."""
    _next_retirement = 0

    def _load_flows(self) -> None:
        rows = self._journal.select(f"SELECT {_COLUMNS} FROM flow WHERE ended IS NULL")
        self._flows = {}
        for row in rows:
            try:
                self._flows[row[0]] = _flow_of(row)
            except ValueError as error:
                self.problems.append(f"workflow {row[0]} is unreadable and was left out: {error}")
        sizes = self._journal.select(
            "SELECT flow, max(seq) FROM flow_step WHERE flow IN (SELECT id FROM flow WHERE ended IS NULL) GROUP BY flow"
        )
        self._flow_sizes = dict.fromkeys(self._flows, 0) | dict(sizes)

    # -- changing ------------------------------------------------------------------------------------------------------

    async def start_flow(
        self, flow_id: str, workflow: str, queue: str, steps: Sequence[NewStep], jobs: Sequence[FlowPush]
    ) -> tuple[Flow, bool]:
        known = await self.flow(flow_id)
        if known is not None:
            return known, False
        now = self._clock.now_ms()
        flow = Flow(flow_id, workflow, queue, FlowStatus.RUNNING, 1, float(now), float(now))
        self._flows[flow_id] = flow
        self._flow_sizes[flow_id] = 0
        self._journal.later(f"INSERT INTO flow ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?)", *_row_of(flow))
        self._tell(flow, EventName.FLOW_STARTED, now)
        self._append(flow, steps, now)
        self._push_all(jobs, now)
        return flow, True

    async def advance_flow(
        self,
        flow_id: str,
        revision: int,
        status: FlowStatus | None,
        steps: Sequence[NewStep],
        jobs: Sequence[FlowPush],
        ack: Ack | None,
        drop: Sequence[str] = (),
        stop: Sequence[str] = (),
    ) -> Flow:
        flow = self._flows.get(flow_id)
        if flow is None:
            ended = await self.flow(flow_id)
            raise NotFound(f"Flow not found: {flow_id}") if ended is None else Conflict(f"Flow {flow_id} has ended")
        if flow.revision != revision:
            raise Conflict(f"Flow {flow_id} has changed: it is at revision {flow.revision}, not {revision}")
        if ack is not None and await self.complete((ack,)):
            raise LeaseLost(f"Invalid or expired lock token for job {ack.id}")
        now = self._clock.now_ms()
        flow = self._changed(flow, status, now)
        self._append(flow, steps, now)
        if status is not None and status in _NEWS:
            self._tell(flow, _NEWS[status], now)
        for job in self._live_jobs(flow, drop):
            self._withdraw(job, now)  # whoever decides that it is not wanted needs no news of its end
        for job in self._live_jobs(flow, stop):
            if job.state is not State.ACTIVE:  # else its worker tells
                self._tell_flow_of_removal(job, "its flow was stopped", now)
                self._withdraw(job, now)
        self._push_all(jobs, now)
        return flow

    def _live_jobs(self, flow: Flow, job_ids: Sequence[str]) -> Iterator[Job]:
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None and job.state in _LIVE and job.links is not None and job.links.flow_id == flow.id:
                yield job

    def _withdraw(self, job: Job, now: int) -> None:
        self._tell_removed(job, now)
        self._remove(job, Verb.CANCEL)

    def _changed(self, flow: Flow, status: FlowStatus | None, now: int) -> Flow:
        after = flow.status if status is None else status
        ended = float(now) if after.is_final else None
        changed = structs.replace(flow, status=after, revision=flow.revision + 1, updated_at=float(now), ended_at=ended)
        self._journal.later(
            "UPDATE flow SET status=?, revision=?, updated=?, ended=? WHERE id=?",
            after.value,
            changed.revision,
            now,
            now if after.is_final else None,
            flow.id,
        )
        if after.is_final:
            del self._flows[flow.id]
        else:
            self._flows[flow.id] = changed
        return changed

    def _append(self, flow: Flow, steps: Sequence[NewStep], now: int) -> None:
        size = self._flow_sizes[flow.id]
        for number, step in enumerate(steps, size + 1):
            self._journal.later(
                "INSERT INTO flow_step VALUES (?,?,?,?,?,?,?)",
                flow.id,
                number,
                now,
                step.kind,
                step.step,
                step.attempt,
                bytes(step.body),
            )
            if step.step:
                self._tell(flow, EventName.FLOW_STEP, now, f"{step.kind}:{step.step}")
        self._flow_sizes[flow.id] = size + len(steps)
        if flow.status.is_final:
            del self._flow_sizes[flow.id]

    def _push_all(self, jobs: Sequence[FlowPush], now: int) -> None:
        for push in jobs:
            self._admit(self._queue(push.queue), push.spec, now, None)

    def _tell(self, flow: Flow, name: EventName, now: int, action: str | None = None) -> None:
        event = self._emit_queue(name, flow.queue, now)
        event.job, event.name, event.action = flow.id, flow.workflow, action

    def _tell_flow(self, job: Job, error: str, now: int) -> None:
        flow = self._live_flow_of(job)
        if flow is not None and not _is_decision(job, flow):
            self._push_decision(flow, _news("job-lost", flow, job, error), now)

    def _tell_flow_of_removal(self, job: Job, why: str, now: int) -> None:
        flow = self._live_flow_of(job)
        if flow is not None:
            # A decision that is taken away is still to be made: nobody else would ever tell its news.
            is_news = _is_decision(job, flow)
            self._push_decision(flow, self._data(job) if is_news else _news("job-removed", flow, job, why), now)

    def _live_flow_of(self, job: Job) -> Flow | None:
        return self._flows.get(job.links.flow_id) if job.links is not None and job.links.flow_id else None

    def _push_decision(self, flow: Flow, data: bytes, now: int) -> None:
        self._job_seq += 1
        decision = Job(
            self._job_seq,
            self.ids.at(now),
            self._queue(flow.queue),
            data,
            _DECIDE,
            _DECISION,
            JobLinks(flow_id=flow.id),
            State.WAITING,
            0,
            now,
            now,
            len(data),
        )
        self._jobs[decision.id] = decision
        self._enter(decision)
        self._journal.add(decision)
        self._tell_pushed(decision, now)
        self._totals.pushed += 1

    # -- looking -------------------------------------------------------------------------------------------------------

    async def flow(self, flow_id: str) -> Flow | None:
        live = self._flows.get(flow_id)
        if live is not None:
            return live
        rows = self._journal.select(f"SELECT {_COLUMNS} FROM flow WHERE id=?", flow_id)
        return _flow_of(rows[0]) if rows else None

    async def flow_steps(self, flow_id: str, after: int) -> list[FlowStep]:
        rows = self._journal.select(
            "SELECT seq, at, kind, step, attempt, body FROM flow_step WHERE flow=? AND seq>? ORDER BY seq",
            flow_id,
            after,
        )
        return [FlowStep(seq, float(at), kind, step, attempt, Raw(body)) for seq, at, kind, step, attempt, body in rows]

    async def flows(
        self, workflow: str | None, status: FlowStatus | None, limit: int, before: str | None
    ) -> list[Flow]:
        rows = self._journal.select(
            f"SELECT {_COLUMNS} FROM flow WHERE (?1 IS NULL OR workflow=?1) AND (?2 IS NULL OR status=?2) "
            "AND (?3 IS NULL OR id<?3) ORDER BY id DESC LIMIT ?4",
            workflow,
            None if status is None else status.value,
            before,
            limit,
        )
        return [_flow_of(row) for row in rows]

    async def retire_flows(self) -> None:
        mono = self._clock.monotonic_ms()
        if mono < self._next_retirement:
            return
        self._next_retirement = mono + RETIRE_EVERY_MS
        rows = self._journal.select(
            "SELECT id FROM flow WHERE ended < max(?1, coalesce((SELECT ended FROM flow WHERE ended IS NOT NULL "
            "ORDER BY ended DESC LIMIT 1 OFFSET ?2), 0)) ORDER BY ended LIMIT ?3",
            self._clock.now_ms() - KEPT_FLOWS_MS,
            KEPT_FLOWS - 1,
            RETIRED_AT_ONCE,
        )
        if len(rows) == RETIRED_AT_ONCE:
            self._next_retirement = mono  # more end than that: go on at the next opportunity
        for (flow_id,) in rows:
            self._journal.later("DELETE FROM flow WHERE id=?", flow_id)
            self._journal.later("DELETE FROM flow_step WHERE flow=?", flow_id)


def _is_decision(job: Job, flow: Flow) -> bool:
    return job.name == _DECIDE and job.queue.name == flow.queue


def _news(word: str, flow: Flow, job: Job, error: str) -> bytes:
    return encode({"flow": flow.id, "news": word, "job": job.id, "name": job.name, "error": error})


def _row_of(flow: Flow) -> tuple[Any, ...]:
    ended = None if flow.ended_at is None else int(flow.ended_at)
    times = (int(flow.created_at), int(flow.updated_at), ended)
    return (flow.id, flow.workflow, flow.queue, flow.status.value, flow.revision, *times)


def _flow_of(row: tuple[Any, ...]) -> Flow:
    flow_id, workflow, queue, status, revision, created, updated, ended = row
    ended_at = None if ended is None else float(ended)
    return Flow(flow_id, workflow, queue, FlowStatus(status), revision, float(created), float(updated), ended_at)
