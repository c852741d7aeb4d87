"""Events: the object that applications hold. Typed emissions, handlers by decorator, one lifetime.

    events = Events("sqlite:///jobs.db")

    @events.on(fraud_check)
    async def check(ctx: EventContext[Order]) -> Verdict: ...

    async with events:
        verdict = await events.emit(fraud_check, order, timeout=5)

The URL decides where events live: memory://, sqlite:///file.db or headrace://host. Each handler of an event is a group
of its own: every group gets every event, and workers of one group, in however many processes, share them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, Unpack, overload

from headrace.client.patience import Starting
from headrace.client.payloads import decode_payload
from headrace.connect import open_client, release_client
from headrace.durations import Duration
from headrace.errors import InvalidCommand
from headrace.events.context import EventContext, context_of, current_cause, set_cause
from headrace.events.definitions import AnyEvent, EventCatalogue, EventDefinition
from headrace.events.message import Emission, EmitOptions, EventMessage
from headrace.events.provider import DEFAULT_TIMEOUT_MS, EventProvider
from headrace.events.queues import EventWorker
from headrace.events.schedules import ScheduleInfo
from headrace.events.subscription import EventSubscription
from headrace.facade import SyncFacade
from headrace.propagation import PropagationMeta, Retry, capture, restored
from headrace.worker.context import JobContext, place_of

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

D = TypeVar("D")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H", bound=Callable[..., Any])
log: Final = logging.getLogger("headrace.events")


class Emitter(Protocol):
    """What a service needs to emit: no lifetime, no handlers."""

    def emit(self, definition: EventDefinition[D, R], data: D, **options: Unpack[Emission]) -> EventSubscription[R]: ...


@dataclass(frozen=True)
class Consumer:
    """One handler of an event and how it is run."""

    definition: AnyEvent
    handler: Callable[..., Any]
    group: str | None
    retry: Retry | None
    is_sync: bool
    on_success: Callable[[EventContext[Any], Any], Any] | None
    on_error: Callable[[EventContext[Any] | None, BaseException], Any] | None
    logger_name: str | None
    worker_options: dict[str, Any]


class Events:
    """Typed events behind one URL: emit, handle, schedule."""

    def __init__(
        self,
        url: str = "memory://",
        *,
        registry: EventCatalogue | None = None,
        default_timeout: Duration = DEFAULT_TIMEOUT_MS / 1000,
        default_meta: PropagationMeta | None = None,
        provider: Callable[[Any], EventProvider] | None = None,
        on_registration_error: Callable[[BaseException], object] | None = None,
        **provider_options: Any,
    ) -> None:
        """With a registry only its events are known. `provider` makes another one for a client."""
        self.url = url
        self.registry = registry
        self.default_meta: PropagationMeta = dict(default_meta or {})
        self._make_provider = provider or partial(EventProvider, default_timeout=default_timeout, **provider_options)
        self._on_registration_error = on_registration_error
        self._consumers: dict[tuple[str, str | None], Consumer] = {}
        self._begun: set[tuple[str, str | None]] = set()
        self._definitions: dict[str, AnyEvent] = dict(registry or {})
        self._provider: EventProvider | None = None
        self._starting = Starting("events")
        self._stopping: asyncio.Future[None] | None = None
        self._late: set[asyncio.Task[None]] = set()
        self.loop: asyncio.AbstractEventLoop | None = None

    # -- lifetime ------------------------------------------------------------------------------------------------------

    @property
    def provider(self) -> EventProvider:
        if self._provider is None:
            self._provider = self._make_provider(open_client(self.url))
        return self._provider

    async def __aenter__(self) -> Events:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Connect and ready all handlers, as soon as the server is there: waiting for it is logged, and ends with your
        cancellation or with `stop`. Failures are raised together; starting again tries what failed."""
        if self._stopping is not None:
            await asyncio.shield(self._stopping)
        await self._starting.join(self._start)

    async def _start(self) -> None:
        self.loop = asyncio.get_running_loop()
        for definition in self._definitions.values():
            if definition.ttl is not None:
                self.provider.configure_event(definition.name, ttl=definition.ttl)
        await self.provider.start()
        waiting = [consumer for key, consumer in self._consumers.items() if key not in self._begun]
        outcomes = await asyncio.gather(*map(self._subscribe, waiting), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures:
            raise ExceptionGroup(f"{len(failures)} event handler(s) could not begin", failures)

    async def stop(self) -> None:
        """Let running handlers finish, then close; whoever still waits for an answer gets ProviderStoppedError."""
        if self._provider is None:
            return
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(self._provider))
        await asyncio.shield(self._stopping)

    async def _stop(self, provider: EventProvider) -> None:
        """The provider is ours until its end: handlers that emit meanwhile must not make another one."""
        try:
            await self._starting.stop()
            late = list(self._late)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            await provider.stop()
            if (closing := release_client(provider.client)) is not None:
                await asyncio.wrap_future(closing)
        finally:
            self._begun.clear()
            self._provider = self._stopping = self.loop = None

    # -- handling ------------------------------------------------------------------------------------------------------

    def on(
        self,
        definition: AnyEvent | str,
        *,
        group: str | None = None,
        retry: Retry | None = None,
        sync: bool | None = None,
        on_success: Callable[[EventContext[Any], Any], Any] | None = None,
        on_error: Callable[[EventContext[Any] | None, BaseException], Any] | None = None,
        logger_name: str | None = None,
        **worker_options: Any,
    ) -> Callable[[H], H]:
        """Handle an event; plain functions run in threads. `concurrency`, `lease` and `drain` go to its worker.

        `on_success` and `on_error` are called at the end of an attempt; what they raise is logged and changes nothing.
        """
        known = self._known(definition)
        Retry.check(retry)
        if group is not None and (not group or not group.replace("-", "").replace("_", "").isalnum()):
            raise InvalidCommand(f"group {group!r}: use letters, digits, dashes and underscores")

        def register(handler: H) -> H:
            place = place_of(handler, None)
            is_sync = place == "thread" if sync is None else sync
            key = (known.name, group)
            if key in self._consumers:
                raise InvalidCommand(f"event {known.name!r} has a handler of group {group or 'default'} here already")
            consumer = Consumer(
                known, handler, group, retry, is_sync, on_success, on_error, logger_name, worker_options
            )
            self._consumers[key] = consumer
            if self._provider is not None and self._provider.is_started:
                self._begin_late(consumer)
            return handler

        return register

    def handlers(self, definition: AnyEvent) -> int:
        """How many handlers an event has here."""
        return sum(name == definition.name for name, _ in self._consumers)

    def _begin_late(self, consumer: Consumer) -> None:
        """A handler that came after the start: its failure goes to the callback or the log."""

        def ended(task: asyncio.Task[None]) -> None:
            self._late.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is None:
                return
            log.error("the handler of %s could not begin: %s", consumer.definition.name, error)
            if self._on_registration_error is not None:
                try:
                    self._on_registration_error(error)
                except Exception:
                    log.exception("on_registration_error failed")

        task = asyncio.ensure_future(self._subscribe(consumer))
        self._late.add(task)
        task.add_done_callback(ended)

    async def _subscribe(self, consumer: Consumer) -> None:
        await self.provider.subscribe(
            consumer.definition.name,
            partial(self._handle, consumer),
            group=consumer.group,
            retry=consumer.retry,
            **consumer.worker_options,
        )
        self._begun.add((consumer.definition.name, consumer.group))

    async def _handle(self, consumer: Consumer, message: EventMessage, job: JobContext, worker: EventWorker) -> Any:
        set_cause(message.event_id)
        with restored(message.meta):
            context: EventContext[Any] | None = None
            try:
                data = consumer.definition.read_data(decode_payload(message.payload))
                context = context_of(message, data, job, self, consumer.logger_name)
                run_in: Any = "thread" if consumer.is_sync else "loop"
                found = await worker.run_in_place(run_in, partial(consumer.handler, context))
                result = consumer.definition.check_result(found)
            except BaseException as error:
                if worker.has_failed(job, error):
                    await _run_hook(consumer.on_error, context, error)
                raise
            await _run_hook(consumer.on_success, context, result)
            return result

    # -- emitting ------------------------------------------------------------------------------------------------------

    @overload
    def emit(self, definition: EventDefinition[D, R], data: D, **options: Unpack[Emission]) -> EventSubscription[R]: ...
    @overload
    def emit(
        self, definition: AnyEvent | str, data: Any = ..., **options: Unpack[Emission]
    ) -> EventSubscription[Any]: ...
    def emit(
        self,
        definition: Any,
        data: Any = None,
        *,
        delay: Duration | None = None,
        timeout: Duration | None = None,
        expires: Duration | None = None,
        key: str | None = None,
        causation_id: str | None = None,
        meta: PropagationMeta | None = None,
        expects_result: bool | None = None,
    ) -> EventSubscription[Any]:
        """Emit an event. Awaiting it gives the answer or, without a result type, confirms that it is stored."""
        known = self._known(definition)
        self._check_loop()
        payload = known.encode_data(data)
        if key is None and known.key is not None:
            key = known.key(data)
        options = EmitOptions(
            delay=delay,
            causation_id=causation_id or current_cause(),
            timeout=timeout,
            idempotency_key=key,
            expects_result=known.expects_result if expects_result is None else expects_result,
            expires=expires,
        )
        subscription = self.provider.emit(known.name, payload, self._meta(meta), options)
        return _typed(subscription, known) if known.expects_result else subscription

    async def emit_many(self, definition: EventDefinition[D, Any], data: Iterable[D]) -> int:
        """Emit many events in few commands, without answers; returns how many."""
        known = self._known(definition)
        key = known.key
        entries = ((known.encode_data(one), None if key is None else key(one)) for one in data)
        return await self.provider.emit_many(known.name, entries, self._meta(None))

    def _meta(self, given: PropagationMeta | None) -> dict[str, Any]:
        return {**self.default_meta, **capture(), **(given or {})}

    async def cancel(self, definition: AnyEvent | str, key: str) -> bool:
        """Withdraw an event by its key. False: it is unknown, or was already delivered."""
        return await self.provider.cancel(self._known(definition).name, key)

    # -- schedules -----------------------------------------------------------------------------------------------------

    async def schedule_event(
        self,
        definition: EventDefinition[D, Any],
        schedule_id: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str | ZoneInfo | None = None,
        payload: D | None = None,
        catch_up: bool = False,
    ) -> ScheduleInfo:
        """Emit an event on a schedule; an existing schedule of this id is replaced."""
        known = self._known(definition)
        return await self.provider.schedule_event(
            known.name,
            schedule_id,
            cron=cron,
            every=every,
            tz=None if tz is None else str(tz),
            payload=known.encode_data(payload),
            meta=self._meta(None),
            catch_up=catch_up,
        )

    async def unschedule_event(self, definition: AnyEvent | str, schedule_id: str) -> bool:
        """False when there was no such schedule."""
        return await self.provider.unschedule_event(self._known(definition).name, schedule_id)

    async def get_schedules(self, definition: AnyEvent | str) -> list[ScheduleInfo]:
        """The schedules of an event, as the store has them."""
        return await self.provider.get_schedules(self._known(definition).name)

    # -- the rest ------------------------------------------------------------------------------------------------------

    def sync(self) -> SyncEvents:
        """The same for threads: `with events.sync() as e: e.emit(...)`."""
        return SyncEvents(self)

    def _check_loop(self) -> None:
        """What waits for an answer is woken on the loop where events were started: elsewhere it would not wake up."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("emit was called where no loop runs; in threads use events.sync().emit(...)") from None
        if self.loop is not None and self.loop is not loop:
            raise RuntimeError("events were started on another loop; from here use events.sync().emit(...) in a thread")

    def _known(self, definition: AnyEvent | str) -> AnyEvent:
        if not isinstance(definition, str | EventDefinition):
            raise InvalidCommand(f"{definition!r} is no event: define one with event(...), and write @events.on(it)")
        name = definition if isinstance(definition, str) else definition.name
        if self.registry is not None:
            return self.registry[name]
        if isinstance(definition, str):
            raise InvalidCommand(f"event {name!r} by its name alone needs a registry: Events(url, registry=...)")
        if name not in self._definitions and self._provider is not None and definition.ttl is not None:
            self._provider.configure_event(name, ttl=definition.ttl)
        return self._definitions.setdefault(name, definition)


def _typed(subscription: EventSubscription[Any], definition: AnyEvent) -> EventSubscription[Any]:
    """A subscription that settles with the answer as the type that was declared."""
    typed: EventSubscription[Any] = EventSubscription(subscription.id, subscription.event_id)

    def resolved(value: Any) -> None:
        try:
            typed.resolve(None if value is None else definition.read_result(value))
        except Exception as error:
            typed.reject(error)

    subscription.subscribe(resolved).on_error(typed.reject)
    return typed


async def _run_hook(hook: Callable[..., Any] | None, *told: Any) -> None:
    """What a hook raises changes nothing: the handler is done, and must not run again because of it."""
    if hook is None:
        return
    try:
        found = hook(*told)
        if inspect.isawaitable(found):
            await found
    except Exception:
        log.exception("a hook of an event handler failed")


class SyncEvents(SyncFacade[Events]):
    """The blocking form of Events."""

    def emit(self, definition: EventDefinition[D, R], data: D, **options: Unpack[Emission]) -> R:
        """Emit an event and wait for its answer, or until it is stored."""

        async def emitted() -> R:
            subscription: EventSubscription[R] = self._hosted.emit(definition, data, **options)
            return await subscription

        return self._run(emitted())

    def emit_many(self, definition: EventDefinition[D, Any], data: Iterable[D]) -> int:
        """Emit many events in few commands, without answers; returns how many."""
        return self._run(self._hosted.emit_many(definition, data))

    def cancel(self, definition: AnyEvent, key: str) -> bool:
        """Withdraw an event by its key. False: it is unknown, or was already delivered."""
        return self._run(self._hosted.cancel(definition, key))

    def schedule_event(self, definition: AnyEvent, schedule_id: str, **schedule: Any) -> ScheduleInfo:
        """Emit an event on a schedule; an existing schedule of this id is replaced."""
        return self._run(self._hosted.schedule_event(definition, schedule_id, **schedule))

    def unschedule_event(self, definition: AnyEvent, schedule_id: str) -> bool:
        """False when there was no such schedule."""
        return self._run(self._hosted.unschedule_event(definition, schedule_id))

    def get_schedules(self, definition: AnyEvent) -> list[ScheduleInfo]:
        """The schedules of an event, as the store has them."""
        return self._run(self._hosted.get_schedules(definition))
