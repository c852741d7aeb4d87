"""The promises, checked against what the load wrote down and what the stores say.

A promise is a function of the evidence that returns a `Line`: what was counted, and every breach in words. Excuses are
those of docs/workers.md and docs/workflows.md and nothing else: a job may run again when the process that ran it was
killed, when its server kept no leases over a restart, or when nobody could renew its lease for most of its length.
To add a promise, write such a function and put it into PROMISES.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Final, NamedTuple

from headrace.workflows import FlowStatus
from headrace.workflows.timeline import Timeline
from soak.accounts import Account
from soak.ledger import Push, Run, Start, read
from soak.load import STEPS
from soak.stage import MACHINE, TICK_SECONDS, Incident

SHOWN: Final = 5
"""Breaches of a promise that are printed."""
FLOW_LEASE: Final = 5.0
_MB: Final = 1 << 20
_SAME_MOMENT: Final = 0.002
"""Stores write milliseconds, the load writes microseconds."""


class Line(NamedTuple):
    promise: str
    counted: str
    breaches: list[str]

    @property
    def is_kept(self) -> bool:
        return not self.breaches


class Execution(NamedTuple):
    job: str
    attempt: int
    pid: int
    began: float
    ended: float
    outcome: str
    """done, failed, cancelled, or `killed` if it did not come to its end."""
    key: str
    slot: float | None


@dataclass
class Side:
    """All that is known of one store and its load."""

    name: str
    lease: float
    pushes: list[Push]
    starts: list[Start]
    runs: list[Execution]
    steps: list[Execution]
    account: Account
    timelines: Mapping[str, Timeline | None]
    incidents: list[Incident]
    scheduled_until: float
    """When its schedules were taken away."""


@dataclass
class Evidence:
    sides: list[Side]
    sizes: Mapping[str, Sequence[float]]
    deaths: list[str]
    logs: list[Path]
    left: list[str]
    log_events: list[int]
    """Numbers of the events in the captured log."""
    bronze_events: int | None = None
    """How many of them the lake has; None when it was not asked for."""
    pipeline_problems: list[str] = field(default_factory=list)


def targets_of(side: str) -> tuple[str, ...]:
    """How the names of what belongs to a side begin."""
    shared = ("server", "way to server", "disk") if side == "local" else ("broker", "way to broker", "valkey")
    return (side, MACHINE, *shared)


def executions(path: Path, incidents: Sequence[Incident]) -> list[Execution]:
    """Beginnings and ends put together."""
    killed = {incident.pid: incident.began for incident in incidents if incident.pid is not None}
    unended: dict[tuple[str, int], list[Run]] = defaultdict(list)
    found: list[Execution] = []
    for run in read(path, Run):
        mine = unended[run.job, run.pid]
        if run.what == "begin":
            mine.append(run)
        else:
            began = mine.pop(0)
            found.append(Execution(run.job, run.attempt, run.pid, began.at, run.at, run.what, run.key, run.slot))
    for runs in unended.values():
        for run in runs:
            ended = killed.get(run.pid, float("inf"))
            found.append(Execution(run.job, run.attempt, run.pid, run.at, ended, "killed", run.key, run.slot))
    return sorted(found, key=lambda one: one.began)


# -- jobs --------------------------------------------------------------------------------------------------------------


def every_push_has_one_outcome(side: Side) -> Line:
    endings = side.account.endings
    known = {push.job for push in side.pushes} | (side.account.pushed or set())
    breaches = [f"{job} has no outcome" for job in known if not endings.get(job)]
    breaches += [f"{job} ended {len(ends)} times: {ends}" for job, ends in endings.items() if len(ends) > 1]
    if side.account.pushed is not None:
        breaches += [f"{push.job} is not in the log" for push in side.pushes if push.job not in side.account.pushed]
    states = Counter(ends[0].state for job, ends in endings.items() if ends)
    counted = f"{len(side.pushes):,} acknowledged; {states['completed']:,} completed, {states['failed']:,} dead letters"
    return Line("every acknowledged push has exactly one outcome", counted, breaches)


def outcomes_are_right(side: Side) -> Line:
    """Doomed jobs are dead letters after exactly their attempts, all others completed."""
    breaches = []
    for push in side.pushes:
        for ending in side.account.endings.get(push.job, ()):
            wanted = "failed" if push.kind == "doomed" else "completed"
            if ending.state != wanted:
                breaches.append(f"{push.job} ({push.kind}) {ending.state} after {ending.attempts} attempts")
            elif wanted == "failed" and ending.attempts != push.attempts:
                breaches.append(f"{push.job} was buried after {ending.attempts} attempts and not {push.attempts}")
    kinds = Counter(push.kind for push in side.pushes)
    return Line("it is the right one", ", ".join(f"{count:,} {kind}" for kind, count in kinds.items()), breaches)


def one_job_per_id(side: Side) -> Line:
    jobs: dict[str, set[str]] = defaultdict(set)
    for push in side.pushes:
        if push.kind == "once":
            jobs[push.key].add(push.job)
    for run in side.runs:
        if run.key in jobs:
            jobs[run.key].add(run.job)
    breaches = [f"{key} became {len(ids)} jobs: {sorted(ids)}" for key, ids in jobs.items() if len(ids) > 1]
    return Line("an id pushed again and again is one job", f"{len(jobs):,} ids", breaches)


def nothing_runs_after_its_completion(side: Side) -> Line:
    breaches = []
    for run in side.runs:
        for ending in side.account.endings.get(run.job, ()):
            if run.began > ending.at + _SAME_MOMENT:
                breaches.append(f"{run.job} ended at {ending.at:.3f} and began at {run.began:.3f} in {run.pid}")
    return Line("nothing runs after its outcome was acknowledged", f"{len(side.runs):,} executions", breaches)


def nothing_repeats_without_cause(side: Side) -> Line:
    repeats = [
        (one, another)
        for one, another in _consecutive(side.runs)
        if one.outcome != "failed" or another.attempt <= one.attempt
    ]
    breaches = _unexcused(side, repeats, side.lease)
    return Line("a job repeats only after a kill or a lost lease", f"{len(repeats):,} repeats", breaches)


def never_two_at_once(side: Side) -> Line:
    overlaps = [(one, another) for one, another in _consecutive(side.runs) if another.began < one.ended]
    breaches = _unexcused(side, overlaps, side.lease)
    return Line("never two at once while leased", f"{len(overlaps):,} overlaps", breaches)


Pair = tuple[Execution, Execution]


def _consecutive(executions: Sequence[Execution]) -> Iterator[Pair]:
    """Each execution of a job and the next one of the same job."""
    by_job: dict[str, list[Execution]] = defaultdict(list)
    for one in executions:
        by_job[one.job].append(one)
    for mine in by_job.values():
        yield from pairwise(mine)


def _unexcused(side: Side, pairs: Iterable[Pair], lease: float) -> list[str]:
    return [_told(one, another) for one, another in pairs if not _is_excused(side, one, another, lease)]


def _told(one: Execution, another: Execution) -> str:
    first = f"{one.began:.3f}..{one.ended:.3f} {one.outcome} in {one.pid}"
    return f"{one.job}: {first}, again {another.began:.3f} in {another.pid}"


def _is_excused(side: Side, one: Execution, another: Execution, lease: float) -> bool:
    return any(_explains(each, one, lease) for each in side.incidents if each.began <= another.began)


def _explains(incident: Incident, one: Execution, lease: float) -> bool:
    is_long = incident.ended - incident.began > lease / 2
    if _is_restart(incident, "server") or (is_long and incident.target == MACHINE):
        return incident.ended >= one.began - lease  # it may have been held for a while before its handler began
    return incident.ended >= one.began and (is_long or incident.pid == one.pid)


def _is_restart(incident: Incident, *targets: str) -> bool:
    return incident.fault in ("kill", "stop") and incident.target in targets


# -- workflows ---------------------------------------------------------------------------------------------------------


def every_flow_ends(side: Side) -> Line:
    statuses = Counter("missing" if line is None else line.status.value for line in side.timelines.values())
    breaches = [
        f"{flow} is {'missing' if line is None else line.status.value}"
        for flow, line in side.timelines.items()
        if line is None or not line.status.is_final
    ]
    counted = f"{len(side.starts):,} started; " + ", ".join(f"{n:,} {status}" for status, n in statuses.items())
    return Line("every workflow has one terminal state", counted, breaches)


def compensation_is_right(side: Side) -> Line:
    undone, breaches = 0, []
    failing = {start.flow: start.failing for start in side.starts}
    for flow, line in side.timelines.items():
        if line is None or not line.status.is_final:
            continue
        done = [bar.step for bar in line.bars if bar.outcome == "completed"]
        taken_back = [bar.step for bar in line.bars if bar.outcome == "rolled-back"]
        undone += len(taken_back)
        is_completed = line.status is FlowStatus.COMPLETED
        if is_completed != (failing[flow] is None):
            breaches.append(f"{flow} is {line.status.value}: {line.cause} {line.error}")
        if taken_back != ([] if is_completed else done[::-1]) or (is_completed and sorted(done) != list(STEPS)):
            breaches.append(f"{flow} {line.status.value}: did {done}, took back {taken_back}")
    return Line("failed ones are taken back once, in reverse", f"{undone:,} rollbacks", breaches)


def steps_repeat_only_with_cause(side: Side) -> Line:
    repeats = [pair for pair in _consecutive(side.steps) if pair[0].outcome != "failed"]
    breaches = _unexcused(side, repeats, FLOW_LEASE)
    counted = f"{len(side.steps):,} calls, {len(repeats):,} repeats"
    return Line("a step repeats only after a kill or a lost lease", counted, breaches)


# -- schedules ---------------------------------------------------------------------------------------------------------


def slots_fire_once(side: Side) -> Line:
    fired, breaches = 0, []
    for name, seconds in zip(("interval", "cron"), TICK_SECONDS, strict=True):
        slots: dict[int, set[str]] = defaultdict(set)
        for run in side.runs:
            if run.key == name and run.slot is not None:
                slots[round(run.slot)].add(run.job)
        fired += len(slots)
        breaches += [] if slots else [f"{name} never fired"]
        breaches += [f"{name} {slot} fired as {sorted(jobs)}" for slot, jobs in slots.items() if len(jobs) > 1]
        breaches += [f"{name} {slot} was missed" for slot in _missed(side, slots, seconds * 1000)]
    return Line("no cron slot fires twice, none is missed", f"{fired:,} slots", breaches)


def _missed(side: Side, slots: Iterable[int], step: int) -> Iterator[int]:
    """Slots that nobody ran though somebody was up: what fell into a restart is left out by design."""
    down = [*_nobody_was_up(side.incidents), (side.scheduled_until, float("inf"))]
    for one, another in pairwise([*sorted(slots), round(side.scheduled_until * 1000)]):
        for slot in range(one + step, another, step):
            if not any(began - 1 <= slot / 1000 <= ended + 1 for began, ended in down):
                yield slot


def _nobody_was_up(incidents: Sequence[Incident]) -> Iterator[tuple[float, float]]:
    for one in incidents:
        if _is_restart(one, "server", "valkey"):
            yield one.began, one.ended
    of_brokers = [one for one in incidents if one.fault != "garbage" and one.target.startswith("broker")]
    for one, another in combinations(of_brokers, 2):
        if one.target != another.target and one.began < another.ended and another.began < one.ended:
            yield min(one.began, another.began), max(one.ended, another.ended)


# -- the whole ---------------------------------------------------------------------------------------------------------


def sizes_are_flat(evidence: Evidence) -> list[Line]:
    """The middle of the last quarter beside that of the quarter before it."""
    lines = []
    for name, sizes in evidence.sizes.items():
        half, last_quarter = len(sizes) // 2, len(sizes) * 3 // 4
        before, after = _middle(sizes[half:last_quarter]), _middle(sizes[last_quarter:])
        limit = before * 1.15 + 8 * _MB
        figures = f"{before / _MB:.1f} MB, then {after / _MB:.1f} MB"
        lines.append(
            Line(f"{name} is flat", figures, [f"it grew beyond {limit / _MB:.1f} MB"] if after > limit else [])
        )
    return lines


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def nobody_ended_by_itself(evidence: Evidence) -> Line:
    breaches = list(evidence.deaths)
    for log in evidence.logs:
        if tracebacks := log.read_text(errors="replace").count("Traceback (most recent call last)"):
            breaches.append(f"{log.name} has {tracebacks} tracebacks")
    return Line("no process ends by itself or stumbles", f"{len(evidence.logs)} logs", breaches)


def nothing_is_left(evidence: Evidence) -> Line:
    return Line("nothing is left when the load has ended", "", evidence.left)


def log_is_whole(evidence: Evidence) -> Line:
    seqs = evidence.log_events
    breaches = [f"{one} is followed by {another}" for one, another in pairwise([0, *seqs]) if another != one + 1]
    return Line("the event log has no hole and no repeat", f"{len(seqs):,} events", breaches)


def bronze_is_complete(evidence: Evidence) -> list[Line]:
    if evidence.bronze_events is None:
        return []
    breaches = list(evidence.pipeline_problems)
    if evidence.bronze_events != len(evidence.log_events):
        breaches.append(f"the log has {len(evidence.log_events):,}")
    return [Line("bronze has exactly the events of the log", f"{evidence.bronze_events:,} events", breaches)]


PROMISES: Final[tuple[Callable[[Side], Line], ...]] = (
    every_push_has_one_outcome,
    outcomes_are_right,
    one_job_per_id,
    nothing_runs_after_its_completion,
    nothing_repeats_without_cause,
    never_two_at_once,
    every_flow_ends,
    compensation_is_right,
    steps_repeat_only_with_cause,
    slots_fire_once,
)


def judge(evidence: Evidence) -> list[Line]:
    of_sides = [
        line._replace(promise=f"{side.name}: {line.promise}")
        for side in evidence.sides
        for line in (promise(side) for promise in PROMISES)
    ]
    return [
        *of_sides,
        nothing_is_left(evidence),
        nobody_ended_by_itself(evidence),
        log_is_whole(evidence),
        *bronze_is_complete(evidence),
        *sizes_are_flat(evidence),
    ]


def table(lines: Sequence[Line]) -> str:
    width = max(len(line.promise) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{'PASS' if line.is_kept else 'FAIL'}  {line.promise:<{width}}  {line.counted}")
        rows += [f"        {breach}" for breach in line.breaches[:SHOWN]]
        if len(line.breaches) > SHOWN:
            rows.append(f"        ... and {len(line.breaches) - SHOWN:,} more")
    return "\n".join(rows)
