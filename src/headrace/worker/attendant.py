"""The part of a worker that lives on the line: takes jobs, renews their leases, delivers outcomes.

It never polls by a timer: one PULLB per queue waits on the server, and a slot that becomes free asks for more. Jobs are
leased to this worker by name (`owner`) and not to its connection, so a running handler keeps its job when that
breaks: after reconnecting the worker says which jobs it has, and resends the outcomes that were not confirmed.

Rules: everything here runs on the line's thread, except `take`, `tell` and `end`, which are called where handlers
run; `deliver`, `lose` and `give_up` post to there. At most `concurrency` jobs run. A few more may be held without a
slot: one per queue where there are several queues, and a moment's worth of short ones where there is one
queue and few slots. They are given back when no slot becomes free within a moment, for another worker may be idle.

Outcomes and the next pull go out together, in one write (`_turn`). An outcome that comes alone leaves at once; in a
stream of short jobs that the worker keeps up with, there is at most one turn in a millisecond, so that many jobs share
few commands. Nothing waits where that would leave a slot empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

from msgspec import UNSET, Raw, Struct

from headrace.client.channel import Channel
from headrace.client.client import Client
from headrace.client.job import JobInfo, decode_job
from headrace.client.payloads import batches
from headrace.commands._base import Command
from headrace.commands.control import MoveToWait
from headrace.commands.jobs import Acknowledge, AcknowledgeBatch, Fail, GroupPull, PullBatch
from headrace.commands.monitoring import Heartbeat, JobHeartbeatBatch
from headrace.commands.workers import RegisterWorker, ReleaseLeases, UnregisterWorker
from headrace.errors import (
    ClientClosed,
    ClientError,
    CommandTimeout,
    HeadraceError,
    InvalidCommand,
    NotFound,
    RateLimited,
    StorageUnavailable,
    Unreachable,
)
from headrace.model import NIL

log: Final = logging.getLogger("headrace.worker")

_POLL_SECONDS: Final = 50
_MAX_PULL: Final = 1000
_LINGER: Final = 0.001
"""Seconds from one turn to the next while there is no hurry."""
_SIGN_OF_LIFE: Final = 10.0
_RETRY_AFTER: Final = 1.0
_REFUSED_FOR_NOW: Final = (StorageUnavailable, RateLimited, Unreachable)
"""Nothing was done, and asking again after a moment will help. Unreachable: too many commands wait for the link."""
_DRY_FOR: Final = 0.05
"""Seconds for which a queue that had nothing more is passed over while others have jobs."""
_PATIENCE: Final = 0.1
"""Seconds for which a job that found no free slot waits for one here."""
_AHEAD: Final = 0.002
"""Seconds of work that may be in hand: jobs that are shorter come several at a time."""
_MAX_AHEAD: Final = 8
"""Jobs that may be in hand for it. A worker with as many slots has no need of it."""
_MAX_REPORTS: Final = 1000
"""Progress and log lines in flight at once: a handler that reports in a loop must not crowd out heartbeats."""
_MAX_TOLD: Final = 10_000
"""Those that may wait for that. Beyond it the oldest are dropped: it is the last ones that people look for."""
_PACES: Final = 5
"""Lots of jobs whose pace counts."""


class Holding:
    """A job that is ours: its lease, and its outcome once the handler has ended."""

    __slots__ = ("info", "is_lost", "is_settled", "is_settling", "outcome", "token", "told_before")

    def __init__(self, info: JobInfo, token: str | None) -> None:
        self.info = info
        self.token = token
        self.outcome: Acknowledge | Fail | MoveToWait | None = None
        self.is_settled = False
        """The outcome is the line's now: until then it belongs to the thread of the handler."""
        self.is_lost = False
        """Somebody took the job away: what its handler says counts no more."""
        self.is_settling = False
        """A command of the handler is about to end the job: that it is gone is no news then."""
        self.told_before = 0
        """How many reports of all jobs are sent before its outcome."""

    def completed(self, result: Raw | None) -> None:
        self.outcome = Acknowledge(id=self.info.id, result=UNSET if result is None else result)

    def failed(self, error: str, stack: list[str], *, unrecoverable: bool, retry_after: float | None = None) -> None:
        self.outcome = Fail(
            id=self.info.id, error=error, stack=stack, unrecoverable=unrecoverable, retry_after=retry_after
        )

    def given_back(self) -> None:
        self.outcome = MoveToWait(id=self.info.id)


class Figures(Struct):
    """What a worker has done since it began."""

    pulled: int = 0
    completed: int = 0
    failed: int = 0
    lost: int = 0
    """Jobs whose lease was taken away or ran out while they ran."""


class Attendant:
    def __init__(
        self,
        client: Client,
        queues: Sequence[str],
        *,
        name: str,
        owner: str,
        concurrency: int,
        lease: float,
        group: GroupPull | None,
        deliver: Callable[[], None],
        lose: Callable[[str], None],
        give_up: Callable[[HeadraceError], None],
    ) -> None:
        self.owner = owner
        self.figures = Figures()
        self._client = client
        self._queues = list(queues)
        self._name = name
        self._concurrency = concurrency
        self._lease = lease
        self._group = group
        self._deliver = deliver
        self._lose = lose
        self._give_up = give_up
        self._channel: Channel | None = None
        self._held: dict[str, Holding] = {}
        self._in_hand = 0
        """Jobs that were taken and whose ends are not known here yet: they run, or are ready."""
        self._ready: deque[Holding] = deque()
        """Taken and not begun. Two threads take from it: each job is whose who gets it."""
        self._ended: deque[Holding] = deque()
        """Whose handlers have ended: they are the line's when it looks."""
        self._told: deque[Command[Any]] = deque()
        """Progress and log lines of jobs. What a job told is here before the job is among those that have ended."""
        self._reporting = 0
        """Those that were sent and not answered yet."""
        self._reported = 0
        """Those that were sent or dropped since the beginning."""
        self._returning: set[str] = set()
        """Given back and not confirmed yet. Nothing is asked for meanwhile: what is after them must not come first."""
        self._taken_at = 0.0
        self._taken = 0
        self._paces: deque[float] = deque(maxlen=_PACES)
        """Seconds per job, from the taking to the end, of the last few lots that were taken."""
        self._forget_pace()
        self._will_look = False
        """Whether the line looks by itself, in a moment, for ends: they need not be told meanwhile."""
        self._asked: set[str] = set()
        self._dry: dict[str, float] = {}
        """Queues that had nothing more, and until when that counts."""
        self._rotation = deque(self._queues)
        self._settled: list[Holding] = []
        self._is_held_back = False
        """Whether some of these wait until what their jobs reported is sent."""
        self._is_connected = False
        self._has_reclaimed = False
        """Whether the server has heard, on this connection, which jobs are ours."""
        self._reclaiming: asyncio.TimerHandle | None = None
        self._is_stopping = False
        self._turn_timer: asyncio.TimerHandle | None = None
        self._turn_due = float("inf")
        """When outcomes leave and more is asked for."""
        self._last_turn = 0.0
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._empty: asyncio.Event = asyncio.Event()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        home = await self._client.channel()
        self._channel = home.open_own(changed=self._changed)
        try:
            await self._channel.start()
            if self._is_stopping or self._client.is_closed:
                raise ClientClosed("the worker was stopped before it could begin")
        except BaseException:
            await self._channel.close()  # else it would go on trying beside the next one
            raise
        self._client.at_end.add(self._end_with_client)
        self._every(self._lease / 3, self._renew_leases)
        self._every(_SIGN_OF_LIFE, self._give_sign_of_life)

    def _end_with_client(self) -> None:
        if not self._is_stopping:
            self._give_up(ClientClosed())

    async def stop(self) -> None:
        self.stop_pulling()

    def stop_pulling(self) -> None:
        """Take no more jobs; those that come all the same, or were not begun, go back."""
        self._is_stopping = True
        self._return_unbegun()
        self._settle()

    async def finish(self, timeout: float) -> None:
        """Deliver the outcomes that are left, give back what is still held, and leave."""
        self.stop_pulling()
        for holding in [holding for holding in self._held.values() if not holding.is_settled]:
            # Its handler does not heed that it was cancelled, and nobody shall wait for it.
            self._drop(holding)
            self._submit(MoveToWait(id=holding.info.id, token=holding.token), _note)
        self._check_empty()
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            log.warning("the outcomes of %d jobs could not be delivered", len(self._held))
        await self._leave()

    async def _leave(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._client.at_end.discard(self._end_with_client)
        if self._channel is None:
            return  # it never came to ask for anything
        was_connected, self._is_connected = self._is_connected, False
        if was_connected:
            await self._tell(self._channel, UnregisterWorker(worker_id=self.owner))
        await self._channel.close()
        # A pull that was still waiting may have been served in its last moment: its jobs go back, too.
        if was_connected:
            await self._tell(self._client, ReleaseLeases(owner=self.owner, queues=self._queues))

    async def _tell(self, where: Channel | Client, command: Command[Any]) -> None:
        done: asyncio.Future[object] = self._loop.create_future()
        where.submit(command, done.set_result, 5.0)
        outcome = await done
        if isinstance(outcome, HeadraceError):
            log.debug("%s: %s", type(command).__name__, outcome)

    def _every(self, interval: float, duty: Callable[[], None]) -> None:
        def ring() -> None:
            duty()
            self._timers[duty] = self._loop.call_later(interval, ring)

        self._timers[duty] = self._loop.call_later(interval, ring)

    # -- the connection ------------------------------------------------------------------------------------------------

    def _changed(self, is_connected: bool) -> None:
        self._is_connected = is_connected
        self._has_reclaimed = False
        if self._reclaiming is not None:
            self._reclaiming.cancel()
        self._asked.clear()
        self._dry.clear()
        if not is_connected:
            log.warning("connection lost; running jobs (%d) continue", len(self._held))
            return
        self._register()
        self._reclaim()
        # Whether they were applied before the link broke is unknown, and a batch is refused as a whole: one by one.
        for holding in list(self._held.values()):
            if holding.is_settled and holding not in self._settled:
                self._send(holding)

    def _reclaim(self) -> None:
        """Say which jobs are still ours: the server releases the others, and one that was restarted learns of them.

        Nothing is asked for before it has answered: where commands are under way together a pull might overtake this,
        and what it brought would be released while it runs here.
        """

        def heard(outcome: object) -> None:
            _note(outcome)
            if isinstance(outcome, (*_REFUSED_FOR_NOW, CommandTimeout)):
                self._reclaiming = self._loop.call_later(_RETRY_AFTER, self._reclaim)
            elif not isinstance(outcome, ClientError):  # a broken link reconnects and resends it
                self._has_reclaimed = True
                self._plan_turn()

        held = [holding for holding in self._held.values() if holding.token is not None]
        self._submit(
            ReleaseLeases(
                owner=self.owner,
                queues=self._queues,
                keep=tuple([holding.info.id for holding in held]),
                tokens=[holding.token or "" for holding in held],
                lock_ttl=self._lease * 1000,
            ),
            heard,
        )

    def _register(self) -> None:
        self._submit(
            RegisterWorker(
                name=self._name,
                queues=self._queues,
                concurrency=self._concurrency,
                worker_id=self.owner,
                hostname=socket.gethostname(),
                pid=os.getpid(),
            ),
            _note,
        )

    def _give_sign_of_life(self) -> None:
        def heard(outcome: object) -> None:
            if isinstance(outcome, NotFound):
                self._register()

        self._pump()  # whatever was missed: a worker with a free slot has a question out
        if self._is_connected:
            done = self.figures
            self._submit(
                Heartbeat(
                    id=self.owner,
                    active_jobs=self._in_hand - len(self._ready),
                    processed=done.completed,
                    failed=done.failed,
                ),
                heard,
            )

    def _submit(self, command: Command[Any], done: Callable[[Any], None], extra: float = 0.0) -> None:
        assert self._channel is not None
        self._channel.submit(command, done, self._client.timeout + extra)

    def _pass_on(self) -> None:
        while len(self._told) > _MAX_TOLD:
            self._told.popleft()
            self._reported += 1
        while self._told and self._reporting < _MAX_REPORTS:
            command = self._told.popleft()
            self._reported += 1
            if self._is_connected:
                self._reporting += 1
                self._submit(command, self._passed_on)
        if self._is_held_back:
            self._plan_turn(is_urgent=True)

    def _passed_on(self, outcome: object) -> None:
        _note_refusal(outcome)
        self._reporting -= 1
        if self._told or self._is_held_back:
            self._loop.call_soon(self._pass_on)

    # -- taking jobs ---------------------------------------------------------------------------------------------------

    @property
    def _free(self) -> int:
        return self._concurrency - self._in_hand

    @property
    def _ahead(self) -> int:
        """How many jobs to take beyond the free slots: short ones, for a moment of work."""
        if len(self._queues) > 1 or self._group is not None:
            return 0
        pace = sorted(self._paces)[_PACES // 2]  # one odd lot says nothing of the next one
        return max(0, min(_MAX_AHEAD, int(_AHEAD / pace)) - self._concurrency)

    def _forget_pace(self) -> None:
        """Jobs may take long: until a few lots have shown otherwise, none is taken ahead."""
        self._paces.extend([float("inf")] * _PACES)

    def _plan_turn(self, *, is_early: bool = False, is_urgent: bool = False) -> None:
        """Send outcomes and ask for more. A question that is early waits a moment: the outcome of a short job can go
        with it."""
        now = self._loop.time()
        due = now + _LINGER if is_early else now
        if not is_urgent and not is_early and self._has_time(now):
            due = max(now, self._last_turn + _LINGER)
        if due >= self._turn_due:
            return
        if self._turn_timer is not None:
            self._turn_timer.cancel()
            self._turn_timer = None
        self._turn_due = due
        if due > now:
            self._turn_timer = self._loop.call_at(due, self._turn)
        else:
            self._client.line.mailbox.at_end(self._turn)

    def _has_time(self, now: float) -> bool:
        """Whether no slot stays empty for want of a question: there is nothing to be had, or most of them are busy."""
        is_few = 0 < self._free * 4 < self._concurrency and self._in_hand > 0
        return is_few or all(self._dry.get(queue, 0.0) > now for queue in self._queues)

    def _turn(self) -> None:
        if self._turn_due == float("inf"):
            return  # it was made early
        self._turn_timer, self._turn_due = None, float("inf")
        self._last_turn = self._loop.time()
        if self._settled:
            self._flush()
        self._pump()

    def _pump(self) -> None:
        if self._is_stopping or not self._has_reclaimed or self._returning or self._free <= 0:
            return
        if len(self._queues) == 1:
            if not self._asked:
                self._pull(self._queues[0], self._free + self._ahead, _POLL_SECONDS)
            return
        self._pump_many()

    def _pump_many(self) -> None:
        """Queues that may have jobs are asked in turn; when none has, one question waits at each of them."""
        now = self._loop.time()
        for _ in self._queues:
            self._rotation.rotate(-1)
            queue = self._rotation[0]
            if queue not in self._asked and self._dry.get(queue, 0.0) <= now:
                self._pull(queue, self._free, 0)
                return
        share = max(1, self._free // len(self._queues))
        for queue in self._queues:
            if queue not in self._asked:
                self._pull(queue, share, _POLL_SECONDS)

    def _pull(self, queue: str, count: int, wait: int) -> None:
        self._asked.add(queue)
        count = min(count, _MAX_PULL)
        pull = PullBatch(
            queue=queue,
            count=count,
            timeout=wait * 1000,
            owner=self.owner,
            lock_ttl=self._lease * 1000,
            detach=True,
            group=self._group,
        )

        def pulled(outcome: Any) -> None:
            self._asked.discard(queue)
            if isinstance(outcome, HeadraceError):
                self._pull_failed(queue, outcome)
                return
            tokens = outcome.tokens or [None] * len(outcome.jobs)
            self._take([Holding(decode_job(job), token) for job, token in zip(outcome.jobs, tokens, strict=True)])
            # Fewer than asked for: that was all it had.
            is_dry = len(outcome.jobs) < count
            self._dry[queue] = self._loop.time() + _DRY_FOR if is_dry else 0.0
            self._plan_turn(is_early=is_dry and bool(outcome.jobs))

        self._submit(pull, pulled, wait)

    def _pull_failed(self, queue: str, error: HeadraceError) -> None:
        """A broken link comes back by itself (`_changed`); anything else is asked again after a moment. An engine that
        was closed with its app does not come back, and a name that no queue can have stays one."""
        if isinstance(error, ClientClosed | InvalidCommand):
            if not self._is_stopping:
                self._give_up(error)
            return
        if not isinstance(error, ClientError):
            log.error("cannot pull from %s: %s", queue, error)
        if self._is_connected:
            self._loop.call_later(_RETRY_AFTER, self._plan_turn)

    def _take(self, holdings: list[Holding]) -> None:
        self.figures.pulled += len(holdings)
        new = [holding for holding in holdings if not self._is_held_already(holding)]
        for holding in new:
            self._held[holding.info.id] = holding
        if self._is_stopping:  # where handlers run nobody may see them: what begins now would not get its time to end
            self._give_back(new)
        elif new:
            self._make_ready(new)

    def _make_ready(self, new: list[Holding]) -> None:
        self._taken_at, self._taken = perf_counter(), len(new)  # the time of the loop goes by milliseconds
        self._in_hand += len(new)
        if self._in_hand > self._concurrency:
            self._will_look = True
            self._loop.call_later(_LINGER, self._look, new[-1])
        self._ready.extend(new)
        self._deliver()

    def _is_held_already(self, holding: Holding) -> bool:
        """Whether the server forgot our lease and handed us the job again: it already runs here."""
        mine = self._held.get(holding.info.id)
        if mine is not None:
            mine.token = holding.token
            if mine.is_settled:
                self._send(mine)
        return mine is not None

    def _look(self, last: Holding) -> None:
        self._will_look = False
        self._settle()
        if last in self._ready:  # short jobs are not so short any more
            self._forget_pace()
            self._loop.call_later(_PATIENCE, self._return_unbegun, last)

    def _return_unbegun(self, last: Holding | None = None) -> None:
        """Give back jobs that found no slot: those up to `last`, or all of them."""
        if last is not None and last not in self._ready:
            return
        while (holding := self._next_ready()) is not None:
            self._in_hand -= 1
            self._give_back([holding])
            if holding is last:
                return

    def _give_back(self, holdings: list[Holding]) -> None:
        for holding in holdings:
            self._returning.add(holding.info.id)
            holding.given_back()
            holding.is_settled = True
            self._send(holding)

    def _next_ready(self) -> Holding | None:
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    # -- where handlers run --------------------------------------------------------------------------------------------

    def take(self, most: int) -> list[Holding]:
        """Jobs to begin now."""
        taken: list[Holding] = []
        while len(taken) < most and (holding := self._next_ready()) is not None:
            taken.append(holding)
        return taken

    def tell(self, command: Command[Any]) -> None:
        """Send progress or a log line: before the outcome, and nobody waits for it."""
        self._told.append(command)
        self._client.line.post(self._pass_on)

    def end(self, holdings: list[Holding]) -> None:
        """Handlers have ended. While there are more jobs to begin, the line need not hear of it at once."""
        self._ended.extend(holdings)
        if not (self._will_look and self._ready):
            self._client.line.post(self._settle)

    # -- leases --------------------------------------------------------------------------------------------------------

    def _renew_leases(self) -> None:
        held = [holding for holding in self._held.values() if holding.token is not None]
        if not held or not self._has_reclaimed:
            return  # a server that was restarted knows of no leases before it has heard of them

        def renewed(outcome: Any) -> None:
            lost = [] if isinstance(outcome, HeadraceError) else outcome.data.lost or []
            for job_id in lost:
                self._lost(job_id)

        ids, tokens = [holding.info.id for holding in held], [holding.token for holding in held]
        self._submit(JobHeartbeatBatch(ids=ids, tokens=tokens), renewed)

    def _lost(self, job_id: str) -> None:
        """The job was cancelled, timed out or given to somebody else: the handler should stop."""
        holding = self._held.get(job_id)
        if holding is not None and not holding.is_settled and not holding.is_settling:
            self.figures.lost += 1
            log.warning("lost job %s: it was cancelled, timed out or given to another worker", job_id)
            self._drop(holding)
            self._lose(job_id)

    def _drop(self, holding: Holding) -> None:
        """Its outcome counts no more, and the job may even come again as another one."""
        holding.is_lost = True
        del self._held[holding.info.id]
        with contextlib.suppress(ValueError):  # it runs
            self._ready.remove(holding)
            self._in_hand -= 1
        self._check_empty()

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Handlers have ended: their slots are free, their outcomes go out with the next turn."""
        if not self._ended:
            return
        has_ended_alone = False
        while self._ended:
            holding = self._ended.popleft()
            holding.told_before = self._reported + len(self._told)
            self._in_hand -= 1
            holding.is_settled = True
            if holding.outcome is None and not holding.is_lost:
                has_ended_alone = True
                self._settled_elsewhere(holding)
            elif not holding.is_lost:
                self._settled.append(holding)
        self._pass_on()  # what they told goes out before their outcomes, whoever was posted first
        if self._in_hand == 0:
            self._paces.append((perf_counter() - self._taken_at) / self._taken)
        # A command that ended a job may well have pushed the next one: there is nothing to wait for.
        self._plan_turn(is_urgent=has_ended_alone)

    def _settled_elsewhere(self, holding: Holding) -> None:
        """The handler had another command end its job: there is nothing to send and nothing to hold."""
        self._held.pop(holding.info.id, None)
        self.figures.completed += 1
        self._check_empty()

    def _flush(self) -> None:
        settled, self._settled = self._settled, []
        self._is_held_back = settled[-1].told_before > self._reported
        if self._is_held_back:
            self._settled = [holding for holding in settled if holding.told_before > self._reported]
            settled = [holding for holding in settled if holding.told_before <= self._reported]
        acks = [holding for holding in settled if isinstance(holding.outcome, Acknowledge)]
        for batch in batches(acks, _result_size) if self._is_connected else ():
            if len(batch) > 1:
                self._send_batch(batch)
            else:
                self._send(batch[0])
        for holding in settled:
            if not isinstance(holding.outcome, Acknowledge):
                self._send(holding)

    def _send_batch(self, holdings: list[Holding]) -> None:
        results = [holding.outcome.result or Raw(NIL) for holding in holdings]  # type: ignore[union-attr]
        batch = AcknowledgeBatch(
            ids=[holding.info.id for holding in holdings],
            tokens=[holding.token for holding in holdings],
            results=results if any(result != NIL for result in results) else None,
        )

        def answered(outcome: Any) -> None:
            for holding in holdings:
                if isinstance(outcome, HeadraceError) and not isinstance(outcome, ClientError):
                    self._send(holding)  # one of them is not ours any more
                else:
                    self._answered(holding, outcome)

        self._submit(batch, answered)

    def _send(self, holding: Holding) -> None:
        if not self._is_connected or not self._holds(holding):
            return  # the next connection does, or an answer came meanwhile
        assert holding.outcome is not None
        holding.outcome.token = holding.token
        self._submit(holding.outcome, lambda outcome: self._answered(holding, outcome))

    def _holds(self, holding: Holding) -> bool:
        """Whether it is the one that is held under its id: the job may have come again as another one."""
        return self._held.get(holding.info.id) is holding

    def _answered(self, holding: Holding, outcome: Any) -> None:
        if not self._holds(holding):
            return  # it was sent twice, and this is the answer that came later
        if isinstance(outcome, _REFUSED_FOR_NOW):
            self._loop.call_later(_RETRY_AFTER, self._send, holding)
        elif isinstance(outcome, CommandTimeout):
            self._send(holding)  # no answer in time on a link that lives
        elif isinstance(outcome, ClientError):
            pass  # the link broke: the next connection sends it again
        elif isinstance(outcome, InvalidCommand) and isinstance(holding.outcome, Acknowledge):
            holding.failed(f"its result was refused: {outcome}", [], unrecoverable=True)
            self._send(holding)
        else:
            if isinstance(outcome, HeadraceError):
                log.warning("the outcome of job %s was too late: %s", holding.info.id, outcome)
            self._confirmed(holding, outcome)

    def _confirmed(self, holding: Holding, outcome: object) -> None:
        del self._held[holding.info.id]
        if holding.info.id in self._returning:
            self._returning.discard(holding.info.id)
            self._plan_turn()
        if not isinstance(outcome, HeadraceError):
            self.figures.completed += isinstance(holding.outcome, Acknowledge)
            self.figures.failed += isinstance(holding.outcome, Fail)
        self._check_empty()

    def _check_empty(self) -> None:
        if not self._held:
            self._empty.set()
        else:
            self._empty.clear()


def _note(outcome: object) -> None:
    if isinstance(outcome, HeadraceError):
        log.debug("%s", outcome)


def _note_refusal(outcome: object) -> None:
    """Nobody waits for progress and log lines: their errors are logged here or lost."""
    if isinstance(outcome, InvalidCommand):
        log.warning("progress or a log line of a job was refused: %s", outcome)
    else:
        _note(outcome)


def _result_size(holding: Holding) -> int:
    result = holding.outcome.result if isinstance(holding.outcome, Acknowledge) else UNSET
    return 0 if result is UNSET else len(result)
