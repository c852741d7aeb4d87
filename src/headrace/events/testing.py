"""Events without a store, for tests of applications: everything is recorded, and time passes when the test says so.

    provider = TestEventProvider()
    events = Events(provider=provider.for_client)

Handlers run as in production (validation, context, hooks), in the background and once: no retries. Emitters hear what
they would hear there, except that a question without a handler is answered with None. Delayed events wait for
`advance`.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from uuid import uuid4

from msgspec import UNSET, Raw

from headrace.client.client import Client
from headrace.client.job import JobInfo
from headrace.client.payloads import decode_payload, encode_payload
from headrace.durations import Duration, milliseconds, positive_seconds, seconds
from headrace.errors import EventCancelledError, EventTimeoutError, ProviderStoppedError
from headrace.events.definitions import AnyEvent
from headrace.events.message import EmitOptions, EventMessage, ScheduledMessage, check_key
from headrace.events.provider import NOT_STARTED, MessageHandler
from headrace.events.schedules import ScheduleInfo, check_schedule
from headrace.events.subscription import EventSubscription
from headrace.propagation import ErrorReport, PropagationMeta, carried
from headrace.schedules import parse_schedule
from headrace.worker.context import JobContext, RunIn

log: Final = logging.getLogger("headrace.events")
_EPOCH_MS: Final = 1_700_000_000_000.0
_ANYTHING: Final = object()


@dataclass(frozen=True)
class Emitted:
    """One emission as it was recorded."""

    event_name: str
    data: Any
    meta: PropagationMeta
    options: EmitOptions


class _Place:
    """Stands for the worker of a handler."""

    async def run_in_place(self, run_in: RunIn, call: Callable[[], Any]) -> Any:
        found = await asyncio.to_thread(call) if run_in == "thread" else call()
        return await found if inspect.isawaitable(found) else found

    def has_failed(self, context: JobContext, error: BaseException) -> bool:
        return isinstance(error, Exception)


class TestEventProvider:
    __test__ = False  # its name is no test of pytest's

    def __init__(self) -> None:
        self.emitted: list[Emitted] = []
        self.now_ms = _EPOCH_MS
        self.client: Client
        self.is_started = False
        self._handlers: dict[str, dict[str | None, MessageHandler]] = {}
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._unhandled: dict[EventSubscription[Any], tuple[str, str | None]] = {}
        self._keys: dict[tuple[str, str], EventSubscription[Any]] = {}
        self._schedules: dict[tuple[str, str], ScheduleInfo] = {}
        self._running: dict[asyncio.Task[None], EventSubscription[Any] | None] = {}

    def for_client(self, client: Client) -> Any:
        """What `Events(provider=...)` calls."""
        self.client = client
        return self

    # -- looking -------------------------------------------------------------------------------------------------------

    def emitted_of(self, event: AnyEvent | str) -> list[Any]:
        """The data of all emissions of an event, in order."""
        name = event if isinstance(event, str) else event.name
        return [one.data for one in self.emitted if one.event_name == name]

    def assert_emitted(self, event: AnyEvent | str, data: Any = _ANYTHING, *, times: int | None = None) -> None:
        """Fail unless the event was emitted: with this data, so many times."""
        found = self.emitted_of(event)
        wanted = decode_payload(encode_payload(data)) if data is not _ANYTHING else _ANYTHING
        matching = [one for one in found if wanted is _ANYTHING or one == wanted]
        name = event if isinstance(event, str) else event.name
        if (times is None and not matching) or (times is not None and len(matching) != times):
            what = "" if data is _ANYTHING else f" with {wanted!r}"
            raise AssertionError(f"{name}{what} was emitted {len(matching)} times; all of its data: {found!r}")

    @property
    def pending_count(self) -> int:
        """Events that were emitted and have not been handled."""
        return len(self._unhandled)

    # -- time ----------------------------------------------------------------------------------------------------------

    async def advance(self, span: Duration) -> None:
        """Advance time: what is due runs, in order, to completion."""
        until = self.now_ms + milliseconds(span, "span")
        while self._due and self._due[0][0] <= until:
            self.now_ms, _, run = heapq.heappop(self._due)
            run()
            await self.settle()
        self.now_ms = until
        await self.settle()

    async def settle(self) -> None:
        """Wait for the handlers that run."""
        while self._running:
            await asyncio.wait(set(self._running))

    def _at(self, when_ms: float, run: Callable[[], object]) -> None:
        heapq.heappush(self._due, (when_ms, next(self._order), run))

    # -- what Events asks of a provider --------------------------------------------------------------------------------

    async def start(self) -> None:
        self.is_started = True

    async def stop(self) -> None:
        self.is_started = False
        # Those whose events are not due yet come first: a handler may be waiting for one, and would never end.
        handled = set(self._running.values())
        for subscription, (name, key) in list(self._unhandled.items()):
            if self._keys.get((name, key or ""), subscription) not in handled:
                self._settle(subscription, ProviderStoppedError("TestEventProvider is stopping"))
        await self.settle()
        self._due.clear()
        self._keys.clear()
        self._handlers.clear()

    def configure_event(self, event_name: str, *, ttl: Duration) -> None:
        """Nothing expires here by itself."""

    def emit(
        self, event_name: str, payload: Raw, meta: PropagationMeta | None = None, options: EmitOptions | None = None
    ) -> EventSubscription[Any]:
        if not self.is_started:
            raise ProviderStoppedError(NOT_STARTED)
        given = options or EmitOptions()
        check_key(given.idempotency_key)
        self.emitted.append(Emitted(event_name, decode_payload(payload), dict(meta or {}), given))
        message = EventMessage(
            event_id=str(uuid4()),
            event_name=event_name,
            payload=payload,
            meta=carried(meta, "an event"),
            subscription_id=str(uuid4()),
            causation_id=given.causation_id or UNSET,
            timestamp=self.now_ms,
        )
        subscription: EventSubscription[Any] = EventSubscription(message.subscription_id, message.event_id)
        key = given.idempotency_key
        self._unhandled[subscription] = (event_name, key)
        soon = asyncio.get_running_loop().call_soon
        if not given.expects_result:
            soon(subscription.resolve, None)  # it is stored, so to speak
        first = subscription if key is None else self._keys.setdefault((event_name, key), subscription)
        if first is subscription:
            self._plan(message, given, subscription)
        else:
            first.add_done_callback(lambda done: soon(self._settle, subscription, _outcome(done)))
        return subscription

    def _plan(self, message: EventMessage, options: EmitOptions, subscription: EventSubscription[Any]) -> None:
        wait = positive_seconds(options.delay, "delay") * 1000
        deliver = partial(self._spawn_delivery, message, subscription)
        if wait:
            self._at(self.now_ms + wait, deliver)
        else:
            deliver()
        if options.timeout is not None and (limit := seconds(options.timeout, "timeout")):
            late = EventTimeoutError(f"Request timeout after {limit * 1000:g}ms")
            self._at(self.now_ms + limit * 1000, partial(self._settle, subscription, late))

    def _spawn_delivery(self, message: EventMessage, subscription: EventSubscription[Any] | None) -> None:
        task = asyncio.ensure_future(self._deliver(message, subscription))
        self._running[task] = subscription
        task.add_done_callback(self._running.pop)

    async def _deliver(self, message: EventMessage, subscription: EventSubscription[Any] | None) -> None:
        """Call all handlers in order; the default group, else the first, answers."""
        await asyncio.sleep(0)
        if subscription is not None and subscription not in self._unhandled:
            return  # cancelled meanwhile
        groups = sorted(self._handlers.get(message.event_name, {}).items(), key=lambda known: known[0] is not None)
        answers: list[Any] = []
        for _, handler in groups:
            context = JobContext(JobInfo(id=message.event_id, state="active"), lambda command: None)
            try:
                place: Any = _Place()
                answers.append(await handler(message, context, place))
            except Exception as error:
                if answers or subscription is None or subscription.is_settled:  # nobody else is told of it
                    log.exception("a handler of %s failed (event %s)", message.event_name, message.event_id)
                answers.append(ErrorReport.of(error, attempt=1).rebuild())
        if subscription is not None:
            self._settle(subscription, answers[0] if answers else None)

    def _settle(self, subscription: EventSubscription[Any], outcome: Any) -> None:
        if self._unhandled.pop(subscription, None) is None:
            return
        if isinstance(outcome, Exception):
            subscription.reject(outcome)
        else:
            subscription.resolve(outcome)

    async def emit_many(
        self, event_name: str, payloads: Iterable[tuple[Raw, str | None]], meta: PropagationMeta | None = None
    ) -> int:
        emitted = [
            self.emit(event_name, payload, meta, EmitOptions(idempotency_key=key, expects_result=False))
            for payload, key in payloads
        ]
        return len(emitted)

    async def cancel(self, event_name: str, key: str) -> bool:
        found = [one for one, of in self._unhandled.items() if of == (event_name, key)]
        for subscription in found:
            self._settle(subscription, EventCancelledError("Event cancelled"))
        if found:
            self._keys.pop((event_name, key), None)
        return bool(found)

    async def subscribe(self, event_name: str, handler: MessageHandler, *, group: str | None = None, **_: Any) -> None:
        self._handlers.setdefault(event_name, {})[group] = handler

    # -- schedules -----------------------------------------------------------------------------------------------------

    async def schedule_event(self, event_name: str, schedule_id: str, **schedule: Any) -> ScheduleInfo:
        check_schedule(schedule_id, schedule.get("cron"), schedule.get("every"))
        every = None if schedule.get("every") is None else milliseconds(schedule["every"], "every")
        info = ScheduleInfo(
            schedule_id=schedule_id,
            event_name=event_name,
            cron=schedule.get("cron"),
            every_ms=every,
            tz=schedule.get("tz"),
            next_run=0,
            runs=0,
        )
        self._schedules[event_name, schedule_id] = info
        message = ScheduledMessage(
            event_name=event_name,
            payload=schedule["payload"],
            meta=carried(schedule.get("meta"), "an event"),
            schedule_id=schedule_id,
        )
        self._plan_run(info, message)
        return info

    def _plan_run(self, info: ScheduleInfo, message: ScheduledMessage) -> None:
        cron, every = info.cron, info.every_ms or 0
        due = float(parse_schedule(cron, info.tz).next_after(self.now_ms)) if cron else self.now_ms + every

        def fire() -> None:
            if self._schedules.get((info.event_name, info.schedule_id)) is info:
                self._spawn_delivery(message.at(due), None)
                self._plan_run(info, message)

        self._at(due, fire)

    async def unschedule_event(self, event_name: str, schedule_id: str) -> bool:
        return self._schedules.pop((event_name, schedule_id), None) is not None

    async def get_schedules(self, event_name: str) -> list[ScheduleInfo]:
        return [info for (name, _), info in self._schedules.items() if name == event_name]


def _outcome(done: EventSubscription[Any]) -> Any:
    try:
        return done.result()
    except Exception as error:
        return error
