"""EventProvider: events by name and encoded payload, built from queues, tracker, groups, receipts and schedules.

`emit` is a plain call that returns at once with a subscription; what it needs from the store is done in the background.
An event for one group is one push. For several groups it is one atomic push to all their queues, unless it has an
idempotency key: then each queue is pushed to in turn and every push can be repeated without harm.

The answer comes from the default group, else from the group that joined first. Stopping: emissions in flight are
rejected, then workers drain, then the tracker fails those who still wait, then schedules; every subscription settles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final
from uuid import uuid4

from msgspec import UNSET, Raw

from headrace.client.client import Client
from headrace.client.options import Options
from headrace.client.patience import reached
from headrace.client.queue import Queue
from headrace.commands.monitoring import Ping
from headrace.durations import Duration, positive_seconds, seconds
from headrace.errors import HeadraceError, NotFound, PayloadError, ProviderStoppedError
from headrace.events.completion import CompletionTracker
from headrace.events.groups import GroupRegistry, Subscriber, subscriber
from headrace.events.message import EmitOptions, EventMessage, check_key, encode_message, message_of
from headrace.events.queues import EventWorker, QueueManager
from headrace.events.receipts import Receipts
from headrace.events.schedules import ScheduledEventManager, ScheduleInfo
from headrace.events.subscription import EventSubscription
from headrace.propagation import PropagationMeta, Retry, carried
from headrace.worker.context import JobContext
from headrace.worker.failures import JobCancelled

NOT_STARTED: Final = "events are not started: use `async with events:` or `await events.start()`"
DEFAULT_TIMEOUT_MS: Final = 30_000
SWEEP_SECONDS: Final = 60.0
SWEEP_LIMIT: Final = 1000
_EMIT_CHUNK: Final = 1000
_NO_OPTIONS: Final = EmitOptions()

MessageHandler = Callable[[EventMessage, JobContext, EventWorker], Awaitable[Any]]


class EventProvider:
    """Events by name and encoded payload: what `Events` stands on, with parts that can be replaced."""

    def __init__(
        self,
        client: Client,
        *,
        default_timeout: Duration = DEFAULT_TIMEOUT_MS / 1000,
        queue_prefix: str = "event",
        default_retry: Retry | None = None,
        default_job_options: Options | None = None,
        default_worker_options: dict[str, Any] | None = None,
        metrics: Any = None,
        sweep_interval: Duration = SWEEP_SECONDS,
        queue_manager: QueueManager | None = None,
        completion_tracker: CompletionTracker | None = None,
        scheduled_event_manager: ScheduledEventManager | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.default_timeout = seconds(default_timeout, "default_timeout")
        self.queues = queue_manager or QueueManager(
            client,
            queue_prefix=queue_prefix,
            default_retry=default_retry,
            default_job_options=default_job_options,
            default_worker_options=default_worker_options,
            metrics=metrics,
            logger=logger,
        )
        self.tracker = completion_tracker or CompletionTracker(
            client, default_timeout=self.default_timeout, logger=logger
        )
        self.schedules = scheduled_event_manager or ScheduledEventManager(self.queues)
        self.groups = GroupRegistry(client, f"{queue_prefix}s.groups")
        self.receipts = Receipts(client, f"{queue_prefix}s.receipts")
        self.client = client
        self._log = logger or logging.getLogger("headrace.events")
        self._ttls: dict[str, float] = {}
        self._sweep_interval = seconds(sweep_interval, "sweep_interval")
        self._sweeper: asyncio.Task[None] | None = None
        self._enqueuing: dict[asyncio.Task[None], Callable[[BaseException], None]] = {}
        self.is_started = False

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def configure_event(self, event_name: str, *, ttl: Duration) -> None:
        """Drop what waited or lay failed for longer than this."""
        self._ttls[event_name] = seconds(ttl, "ttl")
        if self.is_started:
            self._begin_sweeping()

    def _begin_sweeping(self) -> None:
        if self._ttls and self._sweeper is None:
            self._sweeper = asyncio.ensure_future(self._sweep())

    async def start(self) -> None:
        if self.is_started:
            return
        await reached(self.client, self._log, self._connect)
        self._begin_sweeping()
        self.is_started = True

    async def _connect(self) -> None:
        await asyncio.wrap_future(self.client.connect())
        await self.groups.start()

    async def stop(self) -> None:
        if not self.is_started:
            return
        self.is_started = False
        self.queues.stop_pulling()
        await self._abort_enqueuing()
        await self.queues.stop()
        await self.tracker.stop()
        await self.schedules.stop()
        await self.groups.stop()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    async def _abort_enqueuing(self) -> None:
        under_way, self._enqueuing = self._enqueuing, {}
        for task, reject in under_way.items():
            if task.cancel():  # else it has ended already, and its own outcome is told in a moment
                reject(ProviderStoppedError("EventProvider is stopping"))
        await asyncio.gather(*under_way, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            for name, ttl in list(self._ttls.items()):
                for group in self._all_groups(name):
                    queue = self.queues.get_queue(name, group)
                    with contextlib.suppress(HeadraceError):
                        await self._drop_overdue(queue, ttl)
                        await queue.clean(ttl, "failed", SWEEP_LIMIT)
            await asyncio.sleep(self._sweep_interval)

    async def _drop_overdue(self, queue: Queue, ttl: float) -> None:
        """Drop what should have begun long ago. A delay does not count: `clean` would count from the emission."""
        before = (await self.client.ask(Ping())).data.time - ttl * 1000  # our clock may differ from the store's
        for job in await queue.get_jobs("waiting", limit=SWEEP_LIMIT):
            if job.run_at <= before:
                with contextlib.suppress(NotFound):  # it is gone already
                    await queue.job(job.id).cancel()

    # -- emitting ------------------------------------------------------------------------------------------------------

    def emit(
        self, event_name: str, payload: Raw, meta: PropagationMeta | None = None, options: EmitOptions = _NO_OPTIONS
    ) -> EventSubscription[Any]:
        """Emit an event; the subscription settles with the reply, or with None when it is stored."""
        if not self.is_started:
            raise ProviderStoppedError(NOT_STARTED)
        message = _message(event_name, payload, meta, options)
        subscription: EventSubscription[Any] = EventSubscription(message.subscription_id, message.event_id)
        if options.expects_result:
            self._ask(message, options, subscription)
        else:
            self._enqueue(self._tell(message, options, subscription), subscription.reject)
        return subscription

    def _ask(self, message: EventMessage, options: EmitOptions, subscription: EventSubscription[Any]) -> None:
        timeout = self.default_timeout if options.timeout is None else seconds(options.timeout, "timeout")
        targets = self._targets(message.event_name)
        queue = self.queues.get_queue_name(message.event_name, targets[0].group)
        self.tracker.register(queue, subscription.id, subscription.resolve, subscription.reject, timeout)

        def reject(error: BaseException) -> None:
            self.tracker.fail(queue, subscription.id, error)

        expires = options.expires if options.expires is not None or not timeout else timeout
        self._enqueue(self._ask_in_queue(queue, message, options, expires, timeout, targets), reject)

    async def _ask_in_queue(
        self,
        queue: str,
        message: EventMessage,
        options: EmitOptions,
        expires: Duration | None,
        timeout: float,
        targets: tuple[Subscriber, ...],
    ) -> None:
        ttl = self._ttl(message.event_name, options, expires)
        await self.tracker.listening(queue)
        expected = self._job_id(message, options, targets[0].group)
        self.tracker.map_job_id(queue, expected, message.subscription_id, is_added=False)
        job_id = await self._push(message, options, ttl, targets)
        self.tracker.map_job_id(queue, job_id, message.subscription_id)
        if options.idempotency_key is not None:
            self.tracker.look_at(queue, job_id)
        elif ttl is not None and not 0 < timeout <= ttl:
            self.tracker.expect_begin(queue, job_id, ttl)

    async def _tell(self, message: EventMessage, options: EmitOptions, subscription: EventSubscription[Any]) -> None:
        key = options.idempotency_key
        if key is not None and await self.receipts.has(self._key_id(message.event_name, key)):
            subscription.resolve(None)
            return
        ttl = self._ttl(message.event_name, options, options.expires)
        await self._push(message, options, ttl, self._targets(message.event_name))
        subscription.resolve(None)

    def _enqueue(self, work: Coroutine[Any, Any, None], reject: Callable[[BaseException], None]) -> None:
        """Do it in the background; whoever waits gets the error if it fails."""
        task = asyncio.ensure_future(work)
        self._enqueuing[task] = reject

        def ended(done: asyncio.Task[None]) -> None:
            self._enqueuing.pop(done, None)
            if not done.cancelled() and (error := done.exception()) is not None:
                reject(error)

        task.add_done_callback(ended)

    async def emit_many(
        self, event_name: str, payloads: Iterable[tuple[Raw, str | None]], meta: PropagationMeta | None = None
    ) -> int:
        """Emit many fire-and-forget events (payload and key each) in few commands; how many."""
        count = 0
        chunk: list[tuple[EventMessage, EmitOptions]] = []
        for payload, key in payloads:
            options = EmitOptions(idempotency_key=key, expects_result=False)
            chunk.append((_message(event_name, payload, meta, options), options))
            if len(chunk) >= _EMIT_CHUNK:
                await self._push_many(event_name, chunk)
                chunk, count = [], count + len(chunk)
        await self._push_many(event_name, chunk)
        return count + len(chunk)

    async def _push_many(self, event_name: str, chunk: list[tuple[EventMessage, EmitOptions]]) -> None:
        chunk = await self._without_receipt(event_name, chunk)
        ttl = self._ttls.get(event_name)
        for target in self._targets(event_name) if chunk else ():
            jobs = [
                (encode_message(message), self._job_options(message, options, ttl, target))
                for message, options in chunk
            ]
            await self.queues.add_jobs(event_name, target.group, jobs)

    async def _without_receipt(
        self, event_name: str, chunk: list[tuple[EventMessage, EmitOptions]]
    ) -> list[tuple[EventMessage, EmitOptions]]:
        """Those whose key was not handled yet."""
        keys = {key for _, options in chunk if (key := options.idempotency_key) is not None}
        found = await asyncio.gather(*(self.receipts.has(self._key_id(event_name, key)) for key in keys))
        handled = {key for key, is_handled in zip(keys, found, strict=True) if is_handled}
        return [one for one in chunk if one[1].idempotency_key not in handled]

    # -- pushing -------------------------------------------------------------------------------------------------------

    def _targets(self, event_name: str) -> tuple[Subscriber, ...]:
        """The groups that get an event; one that nobody asked for yet waits in the default queue."""
        return self.groups.of(event_name) or (Subscriber(event_name),)

    async def _push(
        self, message: EventMessage, options: EmitOptions, ttl: float | None, targets: tuple[Subscriber, ...]
    ) -> str:
        """Store the event for all groups; the id of the job that answers."""
        name = message.event_name
        data = encode_message(message)
        jobs = [(target.group, self._job_options(message, options, ttl, target)) for target in targets]
        if len(jobs) > 1 and options.idempotency_key is None:
            await self.queues.add_to_groups(name, data, jobs)
            return str(jobs[0][1]["job_id"])
        # The one that answers comes last: when it is there, all others are.
        for group, given in reversed(jobs):
            job_id = await self.queues.add_job(name, data, group, **given)
        return job_id

    def _job_id(self, message: EventMessage, options: EmitOptions, group: str | None) -> str:
        key = options.idempotency_key
        if key is None and group is None:
            return message.event_id
        return self.queues.job_id(message.event_name, group, message.event_id if key is None else key)

    def _job_options(
        self, message: EventMessage, options: EmitOptions, ttl: float | None, target: Subscriber
    ) -> dict[str, Any]:
        given: dict[str, Any] = {**target.options(), "job_id": self._job_id(message, options, target.group)}
        if options.idempotency_key is not None:
            given["once"] = True
        if delay := positive_seconds(options.delay):
            given["delay"] = delay
        if ttl is not None:
            given["ttl"] = ttl
        return given

    def _ttl(self, event_name: str, options: EmitOptions, expires: Duration | None) -> float | None:
        """Seconds from now after which it is too late to begin."""
        ttl = min(filter(None, (positive_seconds(expires), self._ttls.get(event_name))), default=None)
        return None if ttl is None else positive_seconds(options.delay) + ttl

    def _key_id(self, event_name: str, key: str) -> str:
        return self.queues.job_id(event_name, None, key)

    async def cancel(self, event_name: str, key: str) -> bool:
        """Withdraw an event by its key, with all that is remembered of it. False: unknown, or delivered already."""
        removed = [
            await self.queues.remove(event_name, self.queues.job_id(event_name, target.group, key), target.group)
            for target in self._targets(event_name)
        ]
        # What was delivered keeps its receipt: the key would be handled once more.
        if removed[0]:
            await self.receipts.forget(self._key_id(event_name, key))
        return any(removed)

    # -- receipts ------------------------------------------------------------------------------------------------------

    async def has_receipt(self, event_name: str, key: str) -> bool:
        """Whether an event of this key was handled with success."""
        return await self.receipts.has(self._key_id(event_name, key), "receipt")

    async def prepare_retirement(self, event_name: str, key: str) -> None:
        """Block the key: the first step of forgetting it."""
        await self.receipts.prepare_retirement(self._key_id(event_name, key))

    async def finalize_retirement(self, event_name: str, key: str) -> None:
        """Forget the key."""
        await self.receipts.finalize_retirement(self._key_id(event_name, key))

    async def has_retained_event(self, event_name: str, key: str) -> bool:
        """Whether the store has the event of this key, however it stands."""
        return await self._retained_state(event_name, key) != "unknown"

    async def is_retained_event_retryable(self, event_name: str, key: str) -> bool:
        """Whether the event of this key failed for good and is kept: it can be tried again."""
        return await self._retained_state(event_name, key) == "failed"

    async def _retained_state(self, event_name: str, key: str) -> str:
        group = self._targets(event_name)[0].group
        return await self.queues.get_queue(event_name, group).job(self.queues.job_id(event_name, group, key)).state()

    # -- handling ------------------------------------------------------------------------------------------------------

    async def subscribe(
        self,
        event_name: str,
        handler: MessageHandler,
        *,
        group: str | None = None,
        retry: Retry | None = None,
        **worker_options: Any,
    ) -> None:
        """Handle the events of a group; returns when they can come and emitters know of the group."""

        async def unwrapped(context: JobContext, worker: EventWorker) -> Any:
            message = message_of(context.info)
            if message.event_name != event_name:  # `a.b` and the group `b` of `a` have one queue
                what = f"job {context.id} of {context.queue}"
                raise PayloadError(what, "$.eventName", f"{message.event_name!r} is not {event_name!r}")
            try:
                result = await handler(message, context, worker)
            except ProviderStoppedError:
                if self.is_started:
                    raise
                # It could not go on because we stop. Somebody else does, and it costs the event no attempt.
                context.cancel()
                raise JobCancelled from None
            if message.idempotency_key is not UNSET and self._targets(event_name)[0].group == group:
                await self.receipts.write(self._key_id(event_name, message.idempotency_key))
            return result

        await self.queues.register_worker(event_name, unwrapped, group, **worker_options)
        try:
            await reached(self.client, self._log, partial(self.groups.join, subscriber(event_name, group, retry)))
        except BaseException:
            await self.queues.close_worker(event_name, group)
            raise

    async def leave_group(self, event_name: str, group: str | None = None) -> bool:
        """Emit no more events for a group, scheduled ones included; what waits for it stays in its queue."""
        has_left = await self.groups.leave(event_name, group)
        for info in await self.schedules.get_schedules(event_name, group):
            await self.schedules.unschedule(event_name, info.schedule_id, group)
        return has_left

    # -- schedules -----------------------------------------------------------------------------------------------------

    async def schedule_event(self, event_name: str, schedule_id: str, **schedule: Any) -> ScheduleInfo:
        """Emit an event on a schedule, for the groups there are now; `unschedule_event` ends it."""
        infos = [
            await self.schedules.schedule(
                event_name, schedule_id, group=target.group, retry=target.options(), **schedule
            )
            for target in self._targets(event_name)
        ]
        return infos[0]

    async def unschedule_event(self, event_name: str, schedule_id: str) -> bool:
        """False when there was no such schedule."""
        removed = [
            await self.schedules.unschedule(event_name, schedule_id, group) for group in self._all_groups(event_name)
        ]
        return any(removed)

    async def get_schedules(self, event_name: str) -> list[ScheduleInfo]:
        found: dict[str, ScheduleInfo] = {}
        for group in self._all_groups(event_name):
            for info in await self.schedules.get_schedules(event_name, group):
                found.setdefault(info.schedule_id, info)
        return list(found.values())

    def _all_groups(self, event_name: str) -> list[str | None]:
        return [None, *(known.group for known in self.groups.of(event_name) if known.group is not None)]


def _message(event_name: str, payload: Raw, meta: PropagationMeta | None, options: EmitOptions) -> EventMessage:
    key = options.idempotency_key
    check_key(key)
    return EventMessage(
        event_id=str(uuid4()),
        event_name=event_name,
        payload=payload,
        meta=carried(meta, "an event"),
        subscription_id=str(uuid4()),
        causation_id=options.causation_id or UNSET,
        timestamp=float(int(time.time() * 1000)),
        idempotency_key=key if key is not None and not options.expects_result else UNSET,
    )
