"""Running a workflow in a test: fake steps, injected failures, time that passes instantly.

Only the machine's decisions are real: there is no store, no queue, no worker. What `run_workflow` shows is
therefore what a flow does on every backend, apart from crashes.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from msgspec import Raw, Struct

from headrace.client.payloads import decode_payload
from headrace.errors import WorkflowError
from headrace.model import FlowStatus
from headrace.propagation import ErrorReport
from headrace.tasks.arguments import fitted
from headrace.worker.failures import UnrecoverableError, is_final
from headrace.worker.processes import TimeLimitExceeded
from headrace.workflows import machine
from headrace.workflows.context import FlowLogger, Results, StepContext, encoded, signal_payload
from headrace.workflows.definition import Step, WorkflowDefinition
from headrace.workflows.failures import failure_of
from headrace.workflows.ledger import policy_of
from headrace.workflows.plan import ROLLBACK, Body, Entry, FlowJob, Plan, job_name, plan_of, results_of
from headrace.workflows.registry import Implementation

_log: Final = logging.getLogger("headrace.workflows.testing")
_MOST_JOBS: Final = 100_000


class InjectedFailure(Exception):
    """A failure that the test asked for."""


class Report(Struct):
    """The outcome of the flow."""

    status: FlowStatus
    calls: list[str]
    """Every attempt: steps by name, rollbacks as `{step}:rollback`, hooks as `on_complete` and `on_error`."""
    results: dict[str, Any]
    result: Any
    error: Exception | None
    log: list[Entry]
    seconds: float
    """Virtual time that went by: sleeps and waits."""


async def run_workflow(
    definition: WorkflowDefinition[Any, Any],
    data: Any = None,
    *,
    code: Any = None,
    fakes: Mapping[str | Step[Any], Any] | None = None,
    fail: Mapping[str | Step[Any], int] | None = None,
    kill_after: Mapping[str | Step[Any], int] | None = None,
    signals: Mapping[str, Any] | None = None,
    timeout: float = 0,
) -> Report:
    """Run a flow to its end. `code` is a class or an object as for `flows.implement`; `fakes` are functions or plain
    results for single steps; a step with neither returns None, and has a rollback that does nothing. `fail` says how
    often a call fails before it succeeds (99: always), `kill_after` how often the worker dies when the call is made and
    nobody knows yet, so that it is made again. Calls are steps or names as in `Report.calls`. `signals` are given at
    the beginning; `timeout` (s) is virtual. The `timeout` of a step is real, as is the time that its code takes.
    """
    rehearsal = _Rehearsal(definition, data, code, _named(fakes), _named(fail), _named(kill_after), timeout)
    await rehearsal.play(signals or {})
    return rehearsal.report()


class _Rehearsal:
    def __init__(
        self,
        definition: WorkflowDefinition[Any, Any],
        data: Any,
        code: Any,
        fakes: Mapping[str, Any],
        fail: Mapping[str, int],
        kill_after: Mapping[str, int],
        timeout: float,
    ) -> None:
        self._definition = definition
        self._data = encoded(data, definition.data, f"data of workflow {definition.name!r}")
        self._code = None if code is None else Implementation.of(definition, code)
        self._fakes = fakes
        self._failing = Counter(fail)
        self._dying = Counter(kill_after)
        self._plan: Plan = plan_of(definition, timeout=timeout * 1000)
        self._jobs: list[tuple[float, int, FlowJob]] = []
        self._numbers = itertools.count()
        self._now = 0.0
        self._log: list[Entry] = []
        self.calls: list[str] = []

    async def play(self, signals: Mapping[str, Any]) -> None:
        self._carry_out(machine.begin(Entry("started", body=Body(plan=self._plan, data=self._data))))
        for name, payload in signals.items():
            decision = machine.decide(
                self._run, machine.Signalled(name, signal_payload(self._definition, name, payload))
            )
            if not decision.entries:
                raise WorkflowError(f"the workflow does not take the signal: {decision.refusal}")
            self._carry_out(decision)
        for _ in range(_MOST_JOBS):
            if self._run.status.is_final:
                return
            if not self._jobs:
                raise WorkflowError("the flow waits for a signal that never comes: give it in signals=")
            self._now, _, job = heapq.heappop(self._jobs)
            self._carry_out(machine.decide(self._run, await self._news(job)))

    def report(self) -> Report:
        run = self._run
        results = {name: decode_payload(body.result) for name, body in run.done.items()}
        error = None if run.failure is None else failure_of("test", run)
        return Report(run.status, self.calls, results, decode_payload(run.result), error, self._log, self._now / 1000)

    @property
    def _run(self) -> machine.Run:
        return machine.Run.of(self._log)

    def _carry_out(self, decision: machine.Decision) -> None:
        self._log += decision.entries
        dropped = {(job.role, job.step) for job in (*decision.drop, *decision.stop)}
        self._jobs = [one for one in self._jobs if (one[2].role, one[2].step) not in dropped]
        heapq.heapify(self._jobs)
        for job in decision.jobs:
            heapq.heappush(self._jobs, (self._now + job.delay, next(self._numbers), job))
        for job in decision.stop:
            error = ErrorReport(type="JobRemoved", message="its flow was stopped", step=job.step)
            self._carry_out(machine.decide(self._run, machine.StepLost(job.step, 0, error)))

    async def _news(self, job: FlowJob) -> machine.News:
        if job.role == "timeout":
            return machine.TimedOut()
        if job.role == "wake":
            return machine.Woken(job.step)
        attempts = policy_of(self._plan, job.role, job.step).attempts
        call = f"on_{job.role}" if job.role in ("complete", "error") else job_name(job)
        attempt, deaths = 1, 0
        while True:
            try:
                news = await self._attempt(job, attempt)
                if self._dying[call] <= 0:
                    return news
                self._dying[call] -= 1
                deaths += 1
                if deaths > self._plan.max_stalls:
                    raise UnrecoverableError(f"its worker died {deaths} times")
            except BaseException as error:
                # As in a worker, sys.exit() or a CancelledError of its own is a failure like any other.
                if isinstance(error, KeyboardInterrupt | GeneratorExit) or _is_cancelled():
                    raise
                if attempt >= attempts or is_final(error):
                    return _lost(job, attempt, ErrorReport.of(error, step=job.step or None, attempt=attempt))
                attempt += 1

    async def _attempt(self, job: FlowJob, attempt: int) -> machine.News:
        if job.role == "complete":
            return machine.Completed(await self._complete(attempt))
        if job.role == "error":
            await self._call("on_error", self._hook("on_error"), attempt, failure_of("test", self._run))
            return machine.Reported()
        known = None if self._code is None else self._code.steps[job.step]
        if job.role == "rollback":
            await self._call(job.step + ROLLBACK, known.rollback if known is not None else None, attempt)
            return machine.RollbackDone(job.step, attempt)
        given = self._fakes.get(job.step, None if known is None else known.handler)
        planned = self._plan.step(job.step)
        limit = None if planned is None or planned.timeout is None else planned.timeout / 1000
        value = await _in_time(limit, self._call(job.step, given, attempt))
        result = encoded(value, self._definition.steps[job.step].result, f"result of step {job.step!r}")
        can_roll_back = known is None or known.rollback is not None
        return machine.StepDone(job.step, attempt, Body(result=result, can_roll_back=can_roll_back))

    async def _complete(self, attempt: int) -> Raw:
        hook = self._hook("on_complete")
        if hook is None and not self._failing["on_complete"]:
            return results_of(self._run.done)
        value = await self._call("on_complete", hook, attempt)
        return encoded(value, self._definition.result, f"result of {self._definition.name!r}")

    def _hook(self, name: str) -> Callable[..., Any] | None:
        return None if self._code is None else getattr(self._code, name)

    async def _call(self, call: str, given: Any, attempt: int, *more: Any) -> Any:
        if given is not None or not call.startswith("on_"):
            self.calls.append(call)
        if self._failing[call] > 0:
            self._failing[call] -= 1
            raise InjectedFailure(f"{call} fails because the test wants it")
        if not callable(given):
            return given
        found = given(self._context(call, attempt), *more)
        return await found if inspect.isawaitable(found) else found

    def _context(self, call: str, attempt: int) -> StepContext[Any]:
        run = self._run
        return StepContext(
            flow_id="test",
            workflow=self._definition.name,
            step="" if call.startswith("on_") else call,
            data=fitted(decode_payload(self._data), self._definition.data, f"data of {self._definition.name!r}"),
            results=Results(run.before if call in self._definition.steps else dict(run.done), self._definition),
            attempt=attempt,
            meta={},
            log=FlowLogger(_log, {}),
        )


async def _in_time(limit: float | None, call: Coroutine[Any, Any, Any]) -> Any:
    """Code takes real time, so the limit of a step is real as well."""
    deadline = asyncio.timeout(limit)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        if not deadline.expired():
            raise  # the step's own
        raise TimeLimitExceeded(f"it ran longer than {limit:g} s") from None


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _named(given: Mapping[str | Step[Any], Any] | None) -> dict[str, Any]:
    return {key if isinstance(key, str) else key.name: value for key, value in (given or {}).items()}


def _lost(job: FlowJob, attempts: int, error: ErrorReport) -> machine.News:
    if job.role == "complete":
        return machine.CompleteLost(error)
    if job.role == "error":
        return machine.Reported(error)
    return (machine.RollbackLost if job.role == "rollback" else machine.StepLost)(job.step, attempts, error)
