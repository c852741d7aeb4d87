"""The workers of a workflow: one for its steps and rollbacks, one that decides and runs the hooks.

A step ends with one command that stores its result, pushes what follows and completes its job. An attempt that fails
and is not the last is an ordinary failed attempt of its job. A worker that dies uses up an attempt of the job, too, but
counts as a stall: handlers have all their attempts whatever happens to workers, up to `max_stalls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from headrace.client.client import Client
from headrace.client.payloads import decode_payload
from headrace.commands.control import MoveToDelayed
from headrace.errors import (
    ClientError,
    HeadraceError,
    LeaseLost,
    NotFound,
    PayloadError,
    StalledError,
    StorageUnavailable,
)
from headrace.hooks import Hooks
from headrace.propagation import ErrorReport, capture, is_stall, log_fields, restored
from headrace.tasks.arguments import fitted
from headrace.worker.context import SETTLED, JobContext
from headrace.worker.failures import JobCancelled, UnrecoverableError, is_final
from headrace.worker.worker import Worker
from headrace.workflows.context import FlowLogger, Results, StepContext, encoded, signal_payload
from headrace.workflows.failures import failure_of
from headrace.workflows.ledger import NEWEST, Ledger, Record, Work, decode_work, policy_of
from headrace.workflows.machine import (
    AttemptFailed,
    Cancelled,
    Completed,
    CompleteLost,
    News,
    Reported,
    RollbackDone,
    RollbackLost,
    Run,
    Signalled,
    StepDone,
    StepLost,
    TimedOut,
    Woken,
)
from headrace.workflows.plan import ROLLBACK, Body, results_of
from headrace.workflows.registry import Implementation

Implementations = Mapping[tuple[str, int], Implementation]
_PUT_OFF_MS: Final = (50.0, 5000.0)
"""The shortest and the longest span of which a job is put off for a part when there is no code for it here."""


class StepInterrupted(UnrecoverableError):
    """A step was running when its flow was stopped."""


class _Forgotten(Exception):
    """There is no such flow any more, and nothing left to do for it. An error of its own, because NotFound may also
    come from a handler, and is a failed attempt then."""


class FlowWorker(Worker):
    """Takes jobs of flows from one queue."""

    def __init__(
        self,
        client: Client,
        queue: str,
        ledger: Ledger,
        implementations: Implementations,
        *,
        provider_id: str,
        logger: logging.Logger,
        hooks: Hooks,
        **options: Any,
    ) -> None:
        super().__init__(client, queue, self._handle, name=provider_id, **options)
        self._ledger = ledger
        self._implementations = implementations
        self._provider_id = provider_id
        self._log = logger
        self._hooks = hooks

    async def _handle(self, job: JobContext) -> Any:
        try:
            work = decode_work(job.info.encoded_data)
        except Exception:
            raise UnrecoverableError(
                f"job {job.id} is no job of a flow: start them with flows.execute(), not by adding jobs to {job.queue}"
            ) from None
        try:
            if work.name == "__timeout__":
                return await self._watch_time(job, work)
            if not work.role:
                return await self._settle(job, work, _lost_news(work))
            return await _ROLES[work.role](self, job, work)
        except _Forgotten:
            return None

    async def _run(self, work: Work) -> Run:
        return (await self._reach(work, work.revision)).run

    async def _reach(self, work: Work, revision: int) -> Record:
        try:
            return await self._ledger.reach(work.flow, revision)
        except NotFound:
            raise _Forgotten from None

    async def _settle(self, job: JobContext, work: Work, news: News) -> Any:
        """Have the news decided upon, the job completed with it."""
        try:
            decision = await self._ledger.carry_out(work.flow, news, job)
        except LeaseLost:
            await self._tell_late(work, news)
            return SETTLED
        except NotFound:
            raise _Forgotten from None
        if decision.refusal:
            self._log.warning("flow %s does not take what was wished: %s", work.flow, decision.refusal)
        return SETTLED if decision.entries else None

    async def _tell_late(self, work: Work, news: News) -> None:
        """The job was taken away while its step ended. A step that is to run once more needs no word of it; in any
        other case the flow has to know what was done, to take it back."""
        self._log.warning("flow %s: the end of %r came when its lease was over", work.flow, work.step)
        run = await self._run(work)
        if not isinstance(news, StepDone) or run.is_open(work.step) or work.step in run.done:
            return
        if not run.status.is_final:
            await self._ledger.carry_out(work.flow, news)
        elif run.failure is not None and run.failure.compensate:
            text = "flow %s of %s has ended without step %r, which is done now and is not taken back"
            self._log.error(text, work.flow, run.plan.workflow, work.step)

    # -- steps ---------------------------------------------------------------------------------------------------------

    async def _run_step(self, job: JobContext, work: Work) -> Any:
        # A flow may have been stopped since somebody else had the job.
        record = await self._reach(work, work.revision if job.attempt == 1 else NEWEST)
        run = record.run
        if work.step in run.unsettled:
            error = ErrorReport(type="StepInterrupted", message="its flow was stopped", step=work.step)
            return await self._settle(job, work, StepLost(work.step, _attempt(job), error))
        if not run.is_open(work.step):
            return None
        code = self._code(run)
        if code is None or work.step not in code.steps:
            return await self._put_off(job, run)
        one, step = code.steps[work.step], run.plan.step(work.step)
        assert step is not None
        attempt, began = _attempt(job), time.time() * 1000

        async def done() -> News:
            context = self._context(code, run, work, job, run.before, work.step)
            with self._interruptible(job, work):
                value = await self._call_code(job, one.handler, context, limit=step.timeout)
            wanted = code.definition.steps[work.step].result
            result = encoded(value, wanted, f"result of step {work.step!r}", record.size)
            body = Body(result=result, can_roll_back=one.rollback is not None, worker=self._provider_id, began=began)
            return StepDone(work.step, attempt, body, is_enough=code.on_complete is None)

        told = Body(worker=self._provider_id, began=began)
        return await self._try(job, work, run, done, lambda error: StepLost(work.step, attempt, error, told), told)

    async def _run_rollback(self, job: JobContext, work: Work) -> Any:
        run = await self._run(work)
        if not run.is_compensating or run.undoing != work.step:
            return None
        code = self._code(run)
        one = None if code is None else code.steps.get(work.step)
        if code is None or one is None or one.rollback is None:
            return await self._put_off(job, run)
        rollback, attempt = one.rollback, _attempt(job)
        told = Body(worker=self._provider_id, began=time.time() * 1000)

        async def done() -> News:
            context = self._context(code, run, work, job, dict(run.done), work.step + ROLLBACK)
            await self._call_code(job, rollback, context)
            return RollbackDone(work.step, attempt, told)

        return await self._try(job, work, run, done, lambda error: RollbackLost(work.step, attempt, error), told)

    async def _try(
        self,
        job: JobContext,
        work: Work,
        run: Run,
        attempt: Callable[[], Any],
        lost: Callable[[ErrorReport], News],
        told: Body,
    ) -> Any:
        """One attempt: its news, or that of the final failure; another failure is the engine's to retry."""
        number, began = _attempt(job), time.perf_counter()
        told_as = (run.plan.workflow, work.flow, job.name if work.step else "")
        stalls = job.info.stall_count
        try:
            if stalls > run.plan.max_stalls:
                raise StalledError(f"its worker died {stalls} times")
            news = await attempt()
            self._hooks.tell("on_step_completed", *told_as, (time.perf_counter() - began) * 1000)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            # sys.exit() or a CancelledError of its own is a failure like any other, and has no more attempts.
            if self._has_stopped(job, error):
                raise
            self._hooks.tell("on_step_failed", *told_as, error)
            report = ErrorReport.of(error, step=work.step or None, attempt=number)
            is_last = number >= policy_of(run.plan, work.role, work.step).attempts or stalls > run.plan.max_stalls
            if not is_last and not is_final(error):
                failed = AttemptFailed(work.step, number, replace(told, error=report))
                if await self._wants_another(work, failed):
                    raise
            self._log.warning("flow %s: %s %s failed for good: %s", work.flow, work.role, work.step, error)
            news = lost(report)
        return await self._settle(job, work, news)

    async def _wants_another(self, work: Work, failed: AttemptFailed) -> bool:
        """Note the failed attempt in the log of the flow, unless the flow has been stopped and wants no other one."""
        if not work.step:
            return True
        try:
            return bool((await self._ledger.carry_out(work.flow, failed)).entries)
        except HeadraceError:
            return True  # it is there for the story only: the retry does not depend on it

    # -- the flow itself -----------------------------------------------------------------------------------------------

    async def _run_complete(self, job: JobContext, work: Work) -> Any:
        run = await self._run(work)
        if not (run.is_running and run.is_completing):
            return None
        code = self._code(run)
        if code is None:
            return await self._put_off(job, run)

        async def done() -> News:
            if code.on_complete is None:
                return Completed(results_of(run.done))
            context = self._context(code, run, work, job, dict(run.done), "")
            value = await self._call_code(job, code.on_complete, context)
            return Completed(encoded(value, code.definition.result, f"result of {run.plan.workflow!r}"))

        return await self._try(job, work, run, done, CompleteLost, Body())

    async def _run_error(self, job: JobContext, work: Work) -> Any:
        run = await self._run(work)
        if not run.is_compensating or run.has_reported:
            return None
        code = self._code(run)
        if code is None:
            return await self._put_off(job, run)
        if run.undone:
            failed = run.rollback_errors
            text = "flow %s of %s: %d steps were rolled back, %d rollbacks failed"
            self._log.warning(text, work.flow, run.plan.workflow, len(run.undone) - len(failed), len(failed))

        async def done() -> News:
            if code.on_error is not None:
                context = self._context(code, run, work, job, dict(run.done), "")
                await self._call_code(job, partial(code.on_error, context), failure_of(work.flow, run))
            return Reported()

        return await self._try(job, work, run, done, Reported, Body())

    async def _run_timeout(self, job: JobContext, work: Work) -> Any:
        return await self._settle(job, work, TimedOut())

    async def _watch_time(self, job: JobContext, work: Work) -> Any:
        """The job for the time limit of a flow was lost: the one that reports it takes its place."""
        record = await self._reach(work, work.revision)
        # By the clock of the store alone: it is the one that the limit was set by.
        left = record.flow.created_at + record.run.plan.timeout - (job.info.started_at or job.info.run_at)
        if left <= 0 or not record.run.is_running:
            return await self._settle(job, work, TimedOut())
        await self._client.ask(MoveToDelayed(id=job.id, delay=left, token=job.token))
        return SETTLED

    async def _run_wake(self, job: JobContext, work: Work) -> Any:
        return await self._settle(job, work, Woken(work.step))

    async def _run_cancel(self, job: JobContext, work: Work) -> Any:
        return await self._settle(job, work, Cancelled(work.reason, work.compensate))

    async def _run_signal(self, job: JobContext, work: Work) -> Any:
        code = self._code(await self._run(work))
        try:
            definition = None if code is None else code.definition
            given = signal_payload(definition, work.step, decode_payload(work.payload))
        except PayloadError as error:
            self._log.warning("flow %s does not take what was wished: %s", work.flow, error)
            return None
        return await self._settle(job, work, Signalled(work.step, given))

    # -- running code --------------------------------------------------------------------------------------------------

    def _code(self, run: Run) -> Implementation | None:
        return self._implementations.get((run.plan.workflow, run.plan.version))

    async def _put_off(self, job: JobContext, run: Run) -> Any:
        """Somebody changed the steps of a workflow and not its version: the job waits for a process that has its code.

        It waits for up to a quarter as long again as it has waited already: during a deploy the next worker may have
        the code, and the time of a flow is short. The length is random: with fixed pauses and workers that take turns,
        two jobs could go to the wrong worker for ever.
        """
        text = "workflow %s: no code for version %d of %s here; it waits for a worker that has it"
        self._log.warning(text, run.plan.workflow, run.plan.version, job.name)
        shortest, longest = _PUT_OFF_MS
        delay = random.uniform(0.2, 1) * min(max((job.info.run_at - job.info.created_at) / 4, shortest), longest)
        await self._client.ask(MoveToDelayed(id=job.id, delay=delay, token=job.token))
        return SETTLED

    @contextlib.contextmanager
    def _interruptible(self, job: JobContext, work: Work) -> Iterator[None]:
        """While a step runs, look as often as its lease is renewed whether the flow still wants it. If not, an async
        handler is cancelled, and one in a thread can see it."""
        task = asyncio.current_task()
        assert task is not None
        watching: list[asyncio.Task[None]] = []
        has_cancelled = False

        async def watch() -> None:
            nonlocal has_cancelled
            while await self._is_wanted(work):  # noqa: ASYNC110 - what it waits for happens elsewhere
                await asyncio.sleep(self._lease / 3)
            job.cancel()
            if job.run_in == "loop":
                has_cancelled = task.cancel()

        # Most steps end before the first look.
        timer = self._loop.call_later(self._lease / 3, lambda: watching.append(self._loop.create_task(watch())))
        try:
            yield
        except asyncio.CancelledError:
            if not has_cancelled:
                raise
            raise StepInterrupted("its flow was stopped") from None
        finally:
            timer.cancel()
            for one in watching:
                one.cancel()
            if has_cancelled:
                task.uncancel()

    async def _is_wanted(self, work: Work) -> bool:
        try:
            return await self._ledger.is_running(work.flow)
        except NotFound:
            return False
        except (ClientError, StorageUnavailable):
            return True  # a store that cannot be asked has not said no

    def _context(
        self, code: Implementation, run: Run, work: Work, job: JobContext, done: Mapping[str, Body], step: str
    ) -> StepContext[Any]:
        data = fitted(decode_payload(run.start.data), code.definition.data, f"data of {run.plan.workflow!r}")
        meta = capture(run.start.meta or {})
        said = {"flowId": work.flow, "workflow": run.plan.workflow, "step": step, "providerId": self._provider_id}
        return StepContext(
            flow_id=work.flow,
            workflow=run.plan.workflow,
            step=step,
            data=data,
            results=Results(done, code.definition),
            attempt=_attempt(job),
            meta=meta,
            log=FlowLogger(self._log, {**log_fields(meta), **said}),
            provider_id=self._provider_id,
            job=job,
        )

    async def _call_code(
        self, job: JobContext, function: Callable[..., Any], given: Any, limit: float | None = None
    ) -> Any:
        """Run a function of the user inside the context of the flow, on the loop or in a thread."""
        is_async = inspect.iscoroutinefunction(function.func if isinstance(function, partial) else function)
        job.run_in = "loop" if is_async else "thread"
        meta = given.meta if isinstance(given, StepContext) else function.args[0].meta  # type: ignore[attr-defined]
        with restored(meta):
            try:
                return await self._in_time(job, None if limit is None else limit / 1000, partial(function, given))
            except JobCancelled:
                raise asyncio.CancelledError from None


def _attempt(job: JobContext) -> int:
    """Which try of the handler this is; stalls of workers are none."""
    return max(1, job.info.attempts - job.info.stall_count + 1)


def _lost_news(work: Work) -> News:
    """What it means that a job of this name ended without success and without a word of its worker."""
    is_removed = work.news == "job-removed"
    lost = "JobRemoved" if is_removed else "StalledError" if is_stall(work.error) else "JobLost"
    error = ErrorReport(type=lost, message=work.error)
    if work.name == "__complete__":
        return CompleteLost(error)
    if work.name == "__error__":
        return Reported(error)
    if work.name.startswith("__wake__"):
        asleep = work.name.removeprefix("__wake__")
        # Its time had come, unless somebody took the job away: then nothing may go on as if it had.
        return StepLost(asleep, 0, error) if is_removed else Woken(asleep)
    step = work.name.removesuffix(ROLLBACK)
    error.step = step
    return StepLost(step, 0, error) if step == work.name else RollbackLost(step, 0, error)


_ROLES: Final[Mapping[str, Callable[[FlowWorker, JobContext, Work], Any]]] = {
    "step": FlowWorker._run_step,
    "rollback": FlowWorker._run_rollback,
    "complete": FlowWorker._run_complete,
    "error": FlowWorker._run_error,
    "timeout": FlowWorker._run_timeout,
    "wake": FlowWorker._run_wake,
    "cancel": FlowWorker._run_cancel,
    "signal": FlowWorker._run_signal,
}
