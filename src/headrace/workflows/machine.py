"""How a flow continues. One pure function: the history so far and the news determine what is written and done next.

`Run` is the log replayed from its beginning; `decide` never changes it. Every process that decides on the same log
makes the same decision, and the store carries out only the first one: that is all there is to agreement.

Rules: compensation begins once, when the flow has failed for good, and is never left again; rollbacks run one at a
time, the last completed step first, and each is recorded once; then on_error runs; then the flow ends,
once. News that is late, duplicated or unexpected changes nothing.

A step that is running when its flow is stopped may complete nevertheless. So the flow does not end before it
knows: the step is told to stop, its end is awaited while other steps are rolled back, and if it completed, it is rolled
back as well.

To add something a flow can do: a kind of news, its branch in `decide`, and what its entries mean in `Run.apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from msgspec import Raw, Struct

from headrace.model import FlowStatus
from headrace.propagation import ErrorReport
from headrace.workflows.plan import NO_RESULT, Body, Cause, Entry, FlowJob, Plan, StepPlan, results_of

# -- news --------------------------------------------------------------------------------------------------------------


class StepDone(Struct, frozen=True, gc=False):
    step: str
    attempt: int
    body: Body
    is_enough: bool = False
    """Whether the flow is complete with its last step: who ran this one has no on_complete."""


class StepLost(Struct, frozen=True, gc=False):
    """A step failed for good."""

    step: str
    attempt: int
    error: ErrorReport
    body: Body = Body()


class AttemptFailed(Struct, frozen=True, gc=False):
    """An attempt at a step or rollback failed; another one follows."""

    step: str
    attempt: int
    body: Body


class RollbackDone(Struct, frozen=True, gc=False):
    step: str
    attempt: int = 1
    body: Body = Body()


class RollbackLost(Struct, frozen=True, gc=False):
    step: str
    attempt: int
    error: ErrorReport


class Completed(Struct, frozen=True, gc=False):
    """on_complete gave the result of the flow."""

    result: Raw


class CompleteLost(Struct, frozen=True, gc=False):
    error: ErrorReport


class Reported(Struct, frozen=True, gc=False):
    """on_error has run, or failed for good."""

    error: ErrorReport | None = None


class TimedOut(Struct, frozen=True, gc=False):
    pass


class Woken(Struct, frozen=True, gc=False):
    """A sleep is over, or the wait for a signal lasted too long."""

    step: str


class Signalled(Struct, frozen=True, gc=False):
    name: str
    payload: Raw


class Cancelled(Struct, frozen=True, gc=False):
    reason: str = ""
    compensate: bool = True


News = (
    StepDone
    | StepLost
    | AttemptFailed
    | RollbackDone
    | RollbackLost
    | Completed
    | CompleteLost
    | Reported
    | TimedOut
    | Woken
    | Signalled
    | Cancelled
)


class Decision(Struct, gc=False):
    """What is to be written and done. Nothing at all when the news changes nothing; then `refusal` may say why."""

    entries: list[Entry] = []
    status: FlowStatus | None = None
    jobs: list[FlowJob] = []
    drop: list[FlowJob] = []
    """Jobs that nobody needs to hear of any more."""
    stop: list[FlowJob] = []
    """Jobs of steps whose end is still to be told: by their worker, or by the store when no worker has them."""
    refusal: str = ""


# -- what has happened -------------------------------------------------------------------------------------------------


class Run:
    """A flow as its log tells it."""

    def __init__(self) -> None:
        self.plan: Plan = Plan("", ())
        self.start: Body = Body()
        self.status = FlowStatus.PENDING
        self.group = 0
        """The group at work; as many as there are groups when all are complete."""
        self.done: dict[str, Body] = {}
        """Completed steps in the order of their completion."""
        self.failed: dict[str, ErrorReport] = {}
        self.waiting: set[str] = set()
        """Steps that sleep or wait for a signal."""
        self.signals: dict[str, Raw] = {}
        self.cause: Cause | None = None
        self.failure: Body | None = None
        self.failed_step = ""
        self.unsettled: set[str] = set()
        """Steps that were at work when the flow was stopped, and whose end is not known yet."""
        self.undoing = ""
        self.undone: dict[str, ErrorReport | None] = {}
        """Rollbacks that have ended; those that failed with their error."""
        self.is_completing = False
        self.is_reporting = False
        self.has_reported = False
        self.result: Raw = NO_RESULT

    @classmethod
    def of(cls, log: Iterable[Entry]) -> Run:
        run = cls()
        for entry in log:
            run.apply(entry)
        return run

    def apply(self, entry: Entry) -> None:
        """Take note of one more entry."""
        _NOTES.get(entry.kind, _note_nothing)(self, entry)

    def after(self, entries: Iterable[Entry]) -> Run:
        """The same flow some entries later."""
        later = Run.__new__(Run)
        later.__dict__.update(self.__dict__)
        later.done, later.failed, later.undone = dict(self.done), dict(self.failed), dict(self.undone)
        later.waiting, later.unsettled, later.signals = set(self.waiting), set(self.unsettled), dict(self.signals)
        for entry in entries:
            later.apply(entry)
        return later

    @property
    def is_running(self) -> bool:
        return self.status is FlowStatus.RUNNING

    @property
    def is_compensating(self) -> bool:
        return self.status is FlowStatus.COMPENSATING

    @property
    def at_work(self) -> tuple[StepPlan, ...]:
        return self.plan.groups[self.group] if self.group < len(self.plan.groups) else ()

    @property
    def before(self) -> dict[str, Body]:
        """What the steps of earlier groups returned: neighbours of a parallel group do not see each other."""
        neighbours = {one.name for one in self.at_work}
        return {name: body for name, body in self.done.items() if name not in neighbours}

    @property
    def rollback_errors(self) -> dict[str, ErrorReport]:
        return {step: error for step, error in self.undone.items() if error is not None}

    def is_open(self, step: str) -> bool:
        """Whether the flow waits for the end of this step."""
        known = any(one.name == step for one in self.at_work)
        return self.is_running and known and step not in self.done and step not in self.failed

    def to_undo(self) -> str:
        """The step to be rolled back next: the one completed last of those that can be and were not."""
        assert self.failure is not None
        if not self.failure.compensate:
            return ""
        left = (step for step in reversed(self.done) if self.done[step].can_roll_back and step not in self.undone)
        return next(left, "")

    def jobs_at_work(self) -> list[FlowJob]:
        """The jobs that may be under way while the flow runs."""
        jobs = [FlowJob("complete")] if self.is_completing else []
        for one in self.at_work:
            if one.name not in self.done and one.name not in self.failed:
                jobs.append(FlowJob("step" if one.kind == "run" else "wake", one.name))
        return jobs

    def timeout_jobs(self) -> list[FlowJob]:
        return [FlowJob("timeout")] if self.plan.timeout and self.plan.on_timeout == "cancel" else []


def _note_nothing(run: Run, entry: Entry) -> None:
    """Entries that only tell a story, and kinds of a later version."""


def _note_started(run: Run, entry: Entry) -> None:
    assert entry.body.plan is not None
    run.plan, run.start, run.status = entry.body.plan, entry.body, FlowStatus.RUNNING


def _note_completed(run: Run, entry: Entry) -> None:
    run.done[entry.step] = entry.body
    run.waiting.discard(entry.step)
    run.unsettled.discard(entry.step)
    while run.at_work and all(one.name in run.done and one.name not in run.failed for one in run.at_work):
        run.group += 1


def _note_failed(run: Run, entry: Entry) -> None:
    assert entry.body.error is not None
    run.failed[entry.step] = entry.body.error
    run.waiting.discard(entry.step)
    run.unsettled.discard(entry.step)


def _note_waiting(run: Run, entry: Entry) -> None:
    run.waiting.add(entry.step)


def _note_signal(run: Run, entry: Entry) -> None:
    run.signals[entry.step] = entry.body.result


def _note_completing(run: Run, entry: Entry) -> None:
    run.is_completing = True


def _note_compensating(run: Run, entry: Entry) -> None:
    run.status, run.cause, run.failure = FlowStatus.COMPENSATING, entry.body.cause, entry.body
    run.failed_step = entry.step
    if entry.body.compensate:
        run.unsettled = {job.step for job in run.jobs_at_work() if job.role == "step"}


def _note_undoing(run: Run, entry: Entry) -> None:
    run.undoing = entry.step


def _note_undone(run: Run, entry: Entry) -> None:
    run.undone[entry.step] = entry.body.error
    run.undoing = ""


def _note_reporting(run: Run, entry: Entry) -> None:
    run.is_reporting = True


def _note_reported(run: Run, entry: Entry) -> None:
    run.has_reported = True


def _note_result(run: Run, entry: Entry) -> None:
    run.status, run.result = FlowStatus.COMPLETED, entry.body.result


def _note_ended(run: Run, entry: Entry) -> None:
    run.status = FlowStatus.CANCELLED if run.cause == "cancel" else FlowStatus.FAILED


_NOTES: Final[dict[str, Callable[[Run, Entry], None]]] = {
    "started": _note_started,
    "completed": _note_completed,
    "failed": _note_failed,
    "sleeping": _note_waiting,
    "waiting": _note_waiting,
    "signalled": _note_signal,
    "completing": _note_completing,
    "compensating": _note_compensating,
    "rolling-back": _note_undoing,
    "rolled-back": _note_undone,
    "rollback-failed": _note_undone,
    "reporting": _note_reporting,
    "reported": _note_reported,
    "result": _note_result,
    "ended": _note_ended,
}

# -- deciding ----------------------------------------------------------------------------------------------------------


def begin(started: Entry, kept: Iterable[Entry] = ()) -> Decision:
    """The first decision: the flow with this first entry, and the jobs of its first group. `kept` are entries of
    steps that need not run any more."""
    entries = [started, *kept]
    run = Run.of(entries)
    decision = Decision(entries, jobs=[FlowJob(job.role, delay=run.plan.timeout) for job in run.timeout_jobs()])
    _enter(run, decision)
    return decision


def decide(run: Run, news: News) -> Decision:
    """What follows from the news."""
    return _DECIDERS[type(news)](run, news)


def _write(run: Run, decision: Decision, *entries: Entry) -> Run:
    decision.entries.extend(entries)
    return run.after(entries)


def _step_done(run: Run, news: StepDone) -> Decision:
    decision = Decision()
    entry = Entry("completed", news.step, news.attempt, news.body)
    if run.is_open(news.step):
        _go_on(_write(run, decision, entry), decision, is_enough=news.is_enough)
    elif news.step in run.done or run.plan.step(news.step) is None:
        return decision
    elif run.is_compensating:
        # It ended although nobody wanted it any more: what it did must be undone as well.
        _wind_up(_write(run, decision, entry), decision)
    elif run.is_running and news.step in run.failed:
        # It was given up, and had been done all the same: the flow fails nevertheless, and takes it back.
        _write(run, decision, entry)
    return decision


def _step_lost(run: Run, news: StepLost) -> Decision:
    decision = Decision()
    body = Body(error=news.error, worker=news.body.worker, began=news.body.began)
    entry = Entry("failed", news.step, news.attempt, body)
    if run.is_open(news.step):
        _go_on(_write(run, decision, entry), decision)
    elif news.step in run.unsettled:
        _wind_up(_write(run, decision, entry), decision)
    return decision


def _attempt_failed(run: Run, news: AttemptFailed) -> Decision:
    is_wanted = run.is_open(news.step) or run.undoing == news.step
    return Decision([Entry("attempt-failed", news.step, news.attempt, news.body)] if is_wanted else [])


def _go_on(run: Run, decision: Decision, *, is_enough: bool = False) -> None:
    """A step has ended: fail or go on when all of its group have."""
    group = run.at_work
    if any(one.name not in run.done and one.name not in run.failed for one in group):
        if not any(one.name in run.done or one.name in run.failed for one in group):
            _enter(run, decision)
        return
    lost = next((one.name for one in group if one.name in run.failed), "")
    if lost:
        _compensate(run, decision, Body(cause="step", error=run.failed[lost]), lost)
    else:
        _enter(run, decision, is_enough=is_enough)


def _enter(run: Run, decision: Decision, *, is_enough: bool = False) -> None:
    """Begin the group that is next. A signal that came early lets its group pass at once. Behind the last group comes
    on_complete, or the end if there is none."""
    while run.at_work:
        early = [one for one in run.at_work if one.kind == "wait" and one.name in run.signals]
        entries = [Entry("completed", one.name, 0, Body(result=run.signals[one.name])) for one in early]
        for one in run.at_work:
            if one.name not in run.done and one not in early:
                _begin_step(one, decision, entries)
        here = run.group
        run = _write(run, decision, *entries)
        if run.group == here:
            return
    if is_enough:
        _complete(run, decision, results_of(run.done))
    else:
        decision.jobs.append(FlowJob("complete"))
        decision.entries.append(Entry("completing"))


def _complete(run: Run, decision: Decision, result: Raw) -> None:
    decision.entries.append(Entry("result", body=Body(result=result)))
    decision.status = FlowStatus.COMPLETED
    decision.drop += run.timeout_jobs()


def _begin_step(one: StepPlan, decision: Decision, entries: list[Entry]) -> None:
    if one.kind == "run":
        decision.jobs.append(FlowJob("step", one.name))
        return
    entries.append(Entry("sleeping" if one.kind == "sleep" else "waiting", one.name))
    if one.span is not None:
        decision.jobs.append(FlowJob("wake", one.name, one.span))


def _compensate(run: Run, decision: Decision, failure: Body, step: str = "") -> None:
    """The flow has failed for good: from here on it is compensated."""
    decision.status = FlowStatus.COMPENSATING
    after = _write(run, decision, Entry("compensating", step, 0, failure))
    for job in run.jobs_at_work() + run.timeout_jobs():
        (decision.stop if job.role == "step" and job.step in after.unsettled else decision.drop).append(job)
    _wind_up(after, decision)


def _wind_up(run: Run, decision: Decision) -> None:
    """The next rollback, one at a time; without one left, and none to come, on_error; after that the end."""
    step = run.to_undo()
    if run.undoing or (run.unsettled and not step):
        return
    if step:
        decision.jobs.append(FlowJob("rollback", step))
        decision.entries.append(Entry("rolling-back", step))
    elif not run.is_reporting:
        decision.jobs.append(FlowJob("error"))
        decision.entries.append(Entry("reporting"))
    elif run.has_reported:
        decision.status = FlowStatus.CANCELLED if run.cause == "cancel" else FlowStatus.FAILED
        decision.entries.append(Entry("ended"))


def _rollback_done(run: Run, news: RollbackDone) -> Decision:
    return _rollback_ended(run, Entry("rolled-back", news.step, news.attempt, news.body))


def _rollback_lost(run: Run, news: RollbackLost) -> Decision:
    return _rollback_ended(run, Entry("rollback-failed", news.step, news.attempt, Body(error=news.error)))


def _rollback_ended(run: Run, entry: Entry) -> Decision:
    decision = Decision()
    if run.is_compensating and run.undoing == entry.step:
        _wind_up(_write(run, decision, entry), decision)
    return decision


def _completed(run: Run, news: Completed) -> Decision:
    decision = Decision()
    if run.is_running and run.is_completing:
        _complete(run, decision, news.result)
    return decision


def _complete_lost(run: Run, news: CompleteLost) -> Decision:
    decision = Decision()
    if run.is_running and run.is_completing:
        _compensate(run, decision, Body(cause="complete", error=news.error))
    return decision


def _reported(run: Run, news: Reported) -> Decision:
    decision = Decision()
    if run.is_compensating and run.is_reporting and not run.has_reported:
        _wind_up(_write(run, decision, Entry("reported", body=Body(error=news.error))), decision)
    return decision


def _timed_out(run: Run, news: TimedOut) -> Decision:
    decision = Decision()
    if run.is_running:
        _compensate(run, decision, Body(cause="timeout"))
    return decision


def _woken(run: Run, news: Woken) -> Decision:
    one = run.plan.step(news.step)
    if one is None or not run.is_open(news.step) or one.kind == "run":
        return Decision()
    if one.kind == "sleep":
        return _step_done(run, StepDone(one.name, 0, Body(result=NO_RESULT)))
    error = ErrorReport(type="SignalTimeout", message=f"the signal {one.name!r} did not come in time", step=one.name)
    return _step_lost(run, StepLost(one.name, 0, error))


def _signalled(run: Run, news: Signalled) -> Decision:
    one = run.plan.step(news.name)
    if one is None or one.kind != "wait":
        return Decision(refusal=f"it waits for no signal {news.name!r}")
    if news.name in run.signals or news.name in run.done:
        return Decision(refusal=f"the signal {news.name!r} was given already")
    if not run.is_running or news.name in run.failed:
        return Decision(refusal=f"the signal {news.name!r} came too late")
    decision = Decision()
    after = _write(run, decision, Entry("signalled", news.name, 0, Body(result=news.payload)))
    if after.is_open(news.name):
        decision.drop.append(FlowJob("wake", news.name))
        _go_on(_write(after, decision, Entry("completed", news.name, 0, Body(result=news.payload))), decision)
    return decision


def _cancelled(run: Run, news: Cancelled) -> Decision:
    if not run.is_running:
        return Decision(refusal=f"it is {run.status.value} already")
    decision = Decision()
    error = ErrorReport(type="WorkflowCancelledError", message=news.reason)
    _compensate(run, decision, Body(cause="cancel", error=error, compensate=news.compensate))
    return decision


_DECIDERS: Final[dict[type[Any], Callable[[Run, Any], Decision]]] = {
    StepDone: _step_done,
    StepLost: _step_lost,
    AttemptFailed: _attempt_failed,
    RollbackDone: _rollback_done,
    RollbackLost: _rollback_lost,
    Completed: _completed,
    CompleteLost: _complete_lost,
    Reported: _reported,
    TimedOut: _timed_out,
    Woken: _woken,
    Signalled: _signalled,
    Cancelled: _cancelled,
}
