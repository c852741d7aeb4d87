"""Waiting without polling: long-poll PULLs and WaitJob park here until something happens or their time is up.

A parked command awaits a `Waiter`, which suspends its coroutine and hands the waiter to whoever drives it; `resume`
continues it within the same tick, so that the job it gets, its event and its reply share one commit.

To add another kind of waiting: give it a registry keyed by what it waits for, resume it from `Engine.settle`, and let
`expired` and `cancel` know the registry.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from headrace.backends.base import Claim, Demand
from headrace.clock import Alarm


class Waiter:
    """One suspended command. `resume(value)` continues it; a waiter is resumed or cancelled exactly once."""

    __slots__ = ("deadline_mono", "demand", "is_over", "key", "resume", "value")

    def __init__(self, key: str, demand: Demand | None, deadline_mono: int) -> None:
        self.key = key
        self.demand = demand
        self.deadline_mono = deadline_mono
        self.is_over = False
        self.resume: Callable[[Any], None] | None = None
        self.value: Any = None

    def __await__(self) -> Generator[Waiter, Any, Any]:
        return self.value if self.is_over else (yield self)

    def finish(self, value: Any) -> None:
        """Give it what it waits for; one that is not awaited yet will find it there."""
        if self.is_over:
            return
        self.is_over = True
        # It is on the list of deadlines until its own has passed: nothing it was given may be kept that long.
        resume, self.resume = self.resume, None
        if resume is not None:
            resume(value)
        else:
            self.value = value


_TIDY_AFTER: Final = 1024
_FLOW_KEYS: Final = (":flow:", ":flow-change:")


def _flow_key(flow_id: str) -> str:
    """Under which its waiters are kept, beside those of jobs, which have no colon in front."""
    return f":flow:{flow_id}"


def _change_key(flow_id: str) -> str:
    return f":flow-change:{flow_id}"


class Waiters:
    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self._pulls: dict[str, deque[Waiter]] = {}
        self._jobs: dict[str, list[Waiter]] = {}
        self._deadlines: list[tuple[int, int, Waiter]] = []
        """A heap. May have entries of waiters that are over."""
        self._most_deadlines = 0
        """The number of entries above which such are looked for."""
        self._serial = itertools.count()

    def park_pull(self, queue: str, demand: Demand, deadline_mono: int) -> Waiter:
        waiter = Waiter(queue, demand, deadline_mono)
        self._pulls.setdefault(queue, deque()).append(waiter)
        return self._with_deadline(waiter)

    def park_job(self, job_id: str, deadline_mono: int) -> Waiter:
        waiter = Waiter(job_id, None, deadline_mono)
        self._jobs.setdefault(job_id, []).append(waiter)
        return self._with_deadline(waiter)

    def park_flow(self, flow_id: str, deadline_mono: int, *, is_any_change: bool) -> Waiter:
        """Wait for the end of a workflow, or for any change of it."""
        return self.park_job(_change_key(flow_id) if is_any_change else _flow_key(flow_id), deadline_mono)

    def park_until(self, deadline_mono: int) -> Waiter:
        """Wait for nothing but time: how replies to wrong tokens are slowed down."""
        return self._with_deadline(Waiter("", None, deadline_mono))

    def _with_deadline(self, waiter: Waiter) -> Waiter:
        heapq.heappush(self._deadlines, (waiter.deadline_mono, next(self._serial), waiter))
        if len(self._deadlines) > self._most_deadlines + _TIDY_AFTER:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_over]
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines)
        self._alarm.ring_by(waiter.deadline_mono)
        return waiter

    def serve_pulls(self, queue: str, claim: Callable[[str, Demand], Sequence[Claim]]) -> None:
        """Give parked pulls of a queue what can be claimed for them, in the order in which they came.

        The first that gets nothing ends it. One with a demand of its own (a group) only keeps its place, for there may
        be jobs for those behind it.
        """
        parked = self._pulls.get(queue)
        if parked is None:
            return
        unserved: list[Waiter] = []
        try:
            for _ in range(len(parked)):  # who is served may well pull again
                if not parked:
                    break
                waiter = parked.popleft()
                if waiter.is_over:
                    continue
                assert waiter.demand is not None
                unserved.append(waiter)
                claims = claim(queue, waiter.demand)
                if claims:
                    unserved.pop()
                    waiter.finish(claims)
                elif waiter.demand.group is None:
                    break
        finally:
            parked = self._pulls.setdefault(queue, parked)
            parked.extendleft(reversed(unserved))
            if not parked:
                del self._pulls[queue]

    def parked_pulls(self, queue: str) -> list[Waiter]:
        """Parked pulls of a queue in the order in which they came, for who serves them over several turns of the
        loop."""
        return [waiter for waiter in self._pulls.get(queue, ()) if not waiter.is_over]

    def pulled_queues(self) -> list[str]:
        """Queues on which somebody waits for jobs."""
        return list(self._pulls)

    def serve(self, waiter: Waiter, value: Any) -> None:
        """Give a parked pull what it waited for."""
        self._discard(waiter)
        waiter.finish(value)

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    def awaited_jobs(self) -> list[str]:
        """Jobs for whose end somebody waits."""
        return [key for key in self._jobs if not key.startswith(_FLOW_KEYS)]

    def finish_job(self, job_id: str, outcome: Any) -> None:
        """A job has ended, here or at another broker: whoever waits for it is told how."""
        for waiter in self._jobs.pop(job_id, ()):
            waiter.finish(outcome)

    def finish_flow(self, flow_id: str, is_ended: bool) -> None:
        """A workflow was changed, here or at another broker: whoever waits for that continues."""
        if is_ended:
            self.finish_job(_flow_key(flow_id), None)
        self.finish_job(_change_key(flow_id), None)

    def next_due(self) -> int | None:
        while self._deadlines and self._deadlines[0][2].is_over:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def expired(self, now_mono: int) -> list[Waiter]:
        """Those whose time is up, taken out."""
        gone = []
        while self._deadlines and self._deadlines[0][0] <= now_mono:
            waiter = heapq.heappop(self._deadlines)[2]
            if not waiter.is_over:
                self._discard(waiter)
                gone.append(waiter)
        return gone

    def everybody(self) -> list[Waiter]:
        """All that wait, taken out."""
        waiting = [waiter for _, _, waiter in sorted(self._deadlines) if not waiter.is_over]
        self._pulls.clear()
        self._jobs.clear()
        self._deadlines.clear()
        return waiting

    def cancel(self, waiter: Waiter) -> None:
        """Its connection is gone: it must not be given anything any more."""
        waiter.is_over = True
        waiter.resume = None
        self._discard(waiter)

    def _discard(self, waiter: Waiter) -> None:
        registry: dict[str, Any] = self._jobs if waiter.demand is None else self._pulls
        parked = registry.get(waiter.key)
        if parked is not None and waiter in parked:
            parked.remove(waiter)
            if not parked:
                del registry[waiter.key]
