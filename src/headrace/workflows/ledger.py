"""Reading and changing flows with optimistic concurrency: the store accepts a decision, or it is read and made again.

A process caches the flows it works on, so that a step costs one command and not two. The cache may be stale:
then the store refuses the change, and the flow is read again. A refusal is no error, it is how processes agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import OrderedDict
from typing import Final, Protocol

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from headrace.client.client import Client
from headrace.client.payloads import encode_payload
from headrace.commands.flows import FlowAdvance, FlowFound, FlowGet, FlowStart, GivenAck, GivenJob, GivenStep
from headrace.commands.jobs import PushEntry
from headrace.errors import (
    CommandTimeout,
    Conflict,
    ConnectionLost,
    LeaseLost,
    NotFound,
    PayloadError,
    StorageUnavailable,
)
from headrace.hooks import Hooks
from headrace.model import Flow, FlowStatus, FlowStep
from headrace.propagation import ErrorReport
from headrace.worker.context import JobContext
from headrace.workflows.context import check_room
from headrace.workflows.machine import AttemptFailed, Decision, News, Run, Signalled, StepDone, StepLost, decide
from headrace.workflows.plan import NO_RESULT, Entry, FlowJob, Plan, Policy, decode_body, encode_body, job_id, job_name
from headrace.workflows.tree import steps_queue

REMEMBERED_FLOWS: Final = 256
_REMEMBERED_BYTES: Final = 65_536
_STORY_BYTES: Final = 1024 * 1024
"""So long may a log be that attempts which are followed by others are written into it with their tracebacks: a step may
be tried a thousand times, and whoever works on a flow reads all of its log."""
_PATIENCE: Final = 60.0
"""Seconds for which a change is tried again while the store cannot be reached or others are always faster."""
_RECLAIM: Final = 1.0
"""Seconds within which a worker gets its leases back from a server that was restarted."""
NEWEST: Final = 1 << 62
"""The revision to ask for when nothing that is remembered will do."""
_NO_LOG: Final = 2**31 - 1
_UNREACHED: Final = (ConnectionLost, CommandTimeout, StorageUnavailable)
# Jobs without code of a user must not give up because a worker was killed a few times.
_TIRELESS: Final = Policy(attempts=100)


class FlowMetrics(Protocol):
    """Hooks that are called in the process in which something happens; all are optional, and none can break a flow.

    `step` is `{step}:rollback` for a rollback and empty for a hook of the whole flow; times are ms.
    """

    def on_flow_started(self, workflow: str, flow_id: str) -> None: ...
    def on_step_completed(self, workflow: str, flow_id: str, step: str, duration: float) -> None: ...
    def on_step_failed(self, workflow: str, flow_id: str, step: str, error: BaseException) -> None: ...
    def on_flow_ended(self, workflow: str, flow_id: str, status: FlowStatus, duration: float) -> None: ...


class Work(Struct, rename="camel", omit_defaults=True, gc=False):
    """The data of a job of a flow: what to do, and how much of the log must be known to do it."""

    flow: str
    role: str = ""
    step: str = ""
    revision: int = 0
    news: str = ""
    name: str = ""
    error: str = ""
    """These three are set by the server when a job of the flow ended without success."""
    payload: Raw = NO_RESULT
    compensate: bool = True
    reason: str = ""
    """And these when somebody left a request (commands FlowSignal, FlowCancel)."""


decode_work: Final = msgspec.msgpack.Decoder(Work, strict=False).decode


class Record:
    """A flow as this process knows it."""

    def __init__(self, flow: Flow, run: Run, size: int) -> None:
        self.flow = flow
        self.run = run
        self.size = size
        self.lock = asyncio.Lock()


class Ledger:
    def __init__(self, client: Client, hooks: Hooks, most: int = REMEMBERED_FLOWS) -> None:
        self._client = client
        self._hooks = hooks
        self._most = most
        self._records: OrderedDict[str, Record] = OrderedDict()

    async def start(self, flow_id: str, queue: str, decision: Decision) -> tuple[Flow, bool]:
        """Begin a flow, or find the one that has this id; whether it is new."""
        run = Run.of(decision.entries)
        steps = _given_steps(decision.entries)
        jobs = _given_jobs(run.plan, flow_id, queue, 1, decision.jobs)
        asked = FlowStart(id=flow_id, workflow=run.plan.workflow, queue=queue, steps=steps, jobs=jobs)
        reply = await self._client.ask(asked)
        if reply.created:
            self._hooks.tell("on_flow_started", run.plan.workflow, flow_id)
            self._remember(Record(reply.flow, run, sum(len(step.body) for step in steps)))
        return reply.flow, reply.created

    async def read(self, flow_id: str, revision: int = 1) -> Record:
        """The flow as it was at this revision or later. NotFound when there is none."""
        known = self._records.get(flow_id)
        if known is not None and known.flow.revision >= revision:
            self._records.move_to_end(flow_id)
            return known
        return self._remember(record_of(await self._client.ask(FlowGet(id=flow_id))))

    async def reach(self, flow_id: str, revision: int = 1) -> Record:
        """The same for a worker with a job of the flow: a store that is away for a while costs the job no attempt."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return await self.read(flow_id, revision)
            except _UNREACHED:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(random.uniform(0.1, 0.5))

    async def is_running(self, flow_id: str) -> bool:
        """Whether the flow still wants its steps, as the store says; nothing of its log is read."""
        return (await self._client.ask(FlowGet(id=flow_id, after=_NO_LOG))).flow.status is FlowStatus.RUNNING

    async def carry_out(self, flow_id: str, news: News, job: JobContext | None = None) -> Decision:
        """Decide on the news and have it done, the job completed with it. A decision without entries changed nothing.

        LeaseLost when the job is not ours any more.
        """
        deadline = time.monotonic() + _PATIENCE
        read = self.read if job is None else self.reach
        revision = 1
        while True:
            record = await read(flow_id, revision)
            async with record.lock:
                decision = _decided(record, news)
                if decision.entries:
                    if await self._advance(record, decision, job, deadline):
                        return decision
                elif revision == NEWEST or record.run.status.is_final:
                    return decision
            # What is remembered here may be old: nothing is turned away without a look at the store.
            revision = 1 if decision.entries else NEWEST

    async def _advance(self, record: Record, decision: Decision, job: JobContext | None, deadline: float) -> bool:
        flow = record.flow
        steps = _given_steps(decision.entries)
        asked = FlowAdvance(
            id=flow.id,
            revision=flow.revision,
            status=decision.status,
            steps=steps,
            jobs=_given_jobs(record.run.plan, flow.id, flow.queue, flow.revision + 1, decision.jobs),
            ack=None if job is None else GivenAck(job.id, job.token),
            drop=tuple(job_id(flow.id, one) for one in decision.drop),
            stop=tuple(job_id(flow.id, one) for one in decision.stop),
        )
        try:
            with contextlib.nullcontext() if job is None else job.settling():
                reply = await self._client.ask(asked)
        except (Conflict, LeaseLost, NotFound, *_UNREACHED) as error:
            self._records.pop(flow.id, None)
            is_lost = isinstance(error, LeaseLost | NotFound)
            if time.monotonic() > (deadline - _PATIENCE + _RECLAIM if is_lost else deadline):
                # NotFound means the job here, for the flow was read just now.
                raise LeaseLost(str(error)) if is_lost and job is not None else error from None
            await asyncio.sleep(random.random() / 100 if isinstance(error, Conflict) else random.uniform(0.1, 0.5))
            return False
        self._note(record, reply.flow, decision, sum(len(step.body) for step in steps))
        return True

    def stop(self) -> None:
        """Forget everything: the store has it."""
        self._records.clear()

    def _note(self, record: Record, flow: Flow, decision: Decision, size: int) -> None:
        for entry in decision.entries:
            record.run.apply(entry)
        record.flow = flow
        record.size += size
        if flow.status.is_final:
            lasted = (flow.ended_at or flow.updated_at) - flow.created_at
            self._hooks.tell("on_flow_ended", flow.workflow, flow.id, flow.status, lasted)
        if flow.status.is_final or record.size > _REMEMBERED_BYTES:
            self._records.pop(flow.id, None)

    def _remember(self, record: Record) -> Record:
        if not record.flow.status.is_final and record.size <= _REMEMBERED_BYTES:
            self._records[record.flow.id] = record
            if len(self._records) > self._most:
                self._records.popitem(last=False)
        return record


def record_of(found: FlowFound) -> Record:
    return Record(found.flow, Run.of(map(entry_of, found.steps)), sum(len(step.body) for step in found.steps))


def entry_of(step: FlowStep) -> Entry:
    return Entry(step.kind, step.step, step.attempt, decode_body(step.body), step.at)


def _decided(record: Record, news: News) -> Decision:
    """What follows from the news, if the log has room for it: neighbours of a step may have filled it since it began,
    and a signal is written twice, when it comes and when its wait is over."""
    if isinstance(news, StepDone):
        try:
            check_room(record.size, len(news.body.result), f"result of step {news.step!r}")
        except PayloadError as error:
            report = ErrorReport.of(error, step=news.step, attempt=news.attempt)
            return decide(record.run, StepLost(news.step, news.attempt, report, news.body))
    elif isinstance(news, Signalled):
        try:
            check_room(record.size, 2 * len(news.payload), f"payload of signal {news.name!r}")
        except PayloadError as error:
            return Decision(refusal=str(error))
    elif isinstance(news, AttemptFailed) and news.body.error is not None and record.size > _STORY_BYTES:
        news = replace(news, body=replace(news.body, error=replace(news.body.error, traceback="")))
    return decide(record.run, news)


def _given_steps(entries: list[Entry]) -> tuple[GivenStep, ...]:
    return tuple(GivenStep(entry.kind, entry.step, entry.attempt, Raw(encode_body(entry.body))) for entry in entries)


def _given_jobs(plan: Plan, flow_id: str, queue: str, revision: int, jobs: list[FlowJob]) -> tuple[GivenJob, ...]:
    return tuple(
        GivenJob(
            steps_queue(queue) if job.role in ("step", "rollback") else queue, _entry(plan, flow_id, revision, job)
        )
        for job in jobs
    )


def _entry(plan: Plan, flow_id: str, revision: int, job: FlowJob) -> PushEntry:
    policy = policy_of(plan, job.role, job.step)
    return PushEntry(
        data=encode_payload(Work(flow_id, job.role, job.step, revision)),
        name=job_name(job),
        custom_id=job_id(flow_id, job),
        # A worker that dies uses up an attempt, too; the worker tells the two apart (see runner).
        max_attempts=policy.attempts + plan.max_stalls + 1,
        backoff=policy.wire(),
        delay=job.delay,
        priority=plan.priority,
        # The log of the flow is the record of what became of them.
        remove_on_complete=True,
        remove_on_fail=True,
    )


def policy_of(plan: Plan, role: str, step: str) -> Policy:
    if role in ("timeout", "wake", ""):
        return _TIRELESS
    one = plan.step(step)
    if role == "rollback":
        return (one.rollback_retry if one is not None else None) or plan.rollback_retry
    return (one.retry if one is not None else None) or plan.retry
