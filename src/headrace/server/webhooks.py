"""Webhooks: events that are posted to URLs, in order, signed, retried, and counted.

The path of an event: committed -> `_on_tick` puts it into the queue of every hook that wants it -> the hook's own task
posts one after the other -> the outcome goes to the hook's figures, which are stored about once a second.

Rules:
- Nothing leaves before its commit, and no receiver can delay a tick: a full queue drops what comes
  (counted), a server without webhooks pays for one comparison per tick.
- A hook has one delivery in flight at a time, so its events arrive in order. At most MAX_UNDER_WAY requests run at once
  for all hooks; those that failed or were slow last time, or are new, share a part of the slots, so that the others
  always find one.
- A delivery is lost when the process is killed, when its tries are used up, when the hook's queue is full, or when the
  hook is disabled meanwhile. The event log has everything.

To add an event for hooks: add it to WEBHOOK_EVENTS (commands.webhooks), to _WORDS and, if it carries more than
its job and queue, to `message`. How requests are made is in `outgoing`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import operator
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import msgspec
from msgspec import structs

from headrace import __version__
from headrace.addresses import check_webhook_url
from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.errors import InvalidCommand, StorageUnavailable
from headrace.model import Event, Webhook, js_number
from headrace.server.outgoing import DeliveryFailed, Forbidden, Outgoing, Resolve

log: Final = logging.getLogger("headrace.webhooks")

MAX_PENDING: Final = 10_000
MAX_PENDING_BYTES: Final = 16 * 1024 * 1024
MAX_DATA_BYTES: Final = 1024 * 1024
"""Payloads beyond this are left out: converting them to JSON would block the loop."""
MAX_UNDER_WAY: Final = 16

_MAX_DOUBTFUL_UNDER_WAY: Final = 12
_QUICK_BYTES: Final = 16 * 1024
_SLOW: Final = 2.0
_SAVE_EVERY: Final = 1.0
_GLANCE_S: Final = 0.05
"""Between two looks, at a stop, at whether its time is up."""
_WARN_EVERY: Final = 30.0
_STOPPED: Final = "the server stopped before the delivery"
_WORDS: Final = {
    "pushed": "job.pushed",
    "pulled": "job.started",
    "completed": "job.completed",
    "failed": "job.failed",
    "progress": "job.progress",
}
_WITH_BODY: Final = frozenset(("job.completed", "job.failed"))


class Hook:
    """A webhook with its queue and figures. `record` is as stored, the figures here are newer."""

    def __init__(self, record: Webhook) -> None:
        self.record = record
        self.is_on = record.enabled
        self.is_prompt = record.last_triggered is not None and record.last_error is None
        """Whether its last delivery succeeded quickly."""
        self.has_failed = False
        self.is_unsaved = False
        self.pending: deque[tuple[Event, bytes | None]] = deque()
        self.pending_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.last_triggered = record.last_triggered
        self.successes = record.success_count
        self.failures = record.failure_count
        self.dropped = record.dropped_count
        self.last_error = record.last_error
        self.warned_at = -_WARN_EVERY
        self._known = _counts(record)
        """The highest counts that were stored, as far as is known here."""

    def learn(self, record: Webhook) -> None:
        """Take over the stored record. What it counts beyond all that was known, other brokers have delivered."""
        self.record = record
        gained = [max(0, count - known) for count, known in zip(_counts(record), self._known, strict=True)]
        self._known = tuple(map(operator.add, self._known, gained))
        self.successes, self.failures, self.dropped = map(
            operator.add, (self.successes, self.failures, self.dropped), gained
        )

    def offer(self, event: Event, body: bytes | None) -> bool:
        """Put an event into the queue; False when there is no room for it."""
        if body is not None and len(body) > MAX_DATA_BYTES:
            event, body = structs.replace(event, bytes=len(body)), None
        size = _size(event, body)
        if len(self.pending) >= MAX_PENDING or self.pending_bytes + size > MAX_PENDING_BYTES:
            return False
        self.pending.append((event, body))
        self.pending_bytes += size
        return True

    def take(self) -> tuple[Event, bytes | None]:
        event, body = self.pending.popleft()
        self.pending_bytes -= _size(event, body)
        return event, body

    def forget_pending(self) -> int:
        count = len(self.pending)
        self.pending.clear()
        self.pending_bytes = 0
        return count

    def figures(self, stored: Webhook) -> Webhook:
        """The stored webhook with the newest figures."""
        self.learn(stored)
        return structs.replace(
            stored,
            last_triggered=self.last_triggered,
            success_count=self.successes,
            failure_count=self.failures,
            dropped_count=self.dropped,
            last_error=self.last_error,
        )

    def note_stored(self, record: Webhook) -> None:
        """These figures are stored: what a record counts beyond them, other brokers have delivered."""
        self._known = _counts(record)


def _counts(record: Webhook) -> tuple[int, ...]:
    return record.success_count, record.failure_count, record.dropped_count


def _size(event: Event, body: bytes | None) -> int:
    """Memory that a queued event needs: its texts may be as large as payloads."""
    return len(body or b"") + len(event.error or "") + len(event.action or "")


class Webhooks:
    """Delivers to all webhooks of an engine. `schedule` makes the server end a tick soon, to commit the figures."""

    def __init__(
        self, engine: Engine, settings: Settings, *, schedule: Callable[[], None], resolve: Resolve | None = None
    ) -> None:
        self._engine = engine
        self._backend = engine.backend
        self._settings = settings
        self._schedule = schedule
        self._loop = asyncio.get_running_loop()
        self._outgoing = Outgoing(engine.webhook_rules, resolve)
        self._slots = asyncio.Semaphore(MAX_UNDER_WAY)
        self._doubtful_slots = asyncio.Semaphore(_MAX_DOUBTFUL_UNDER_WAY)
        self._stopping = asyncio.Event()
        self._hooks: dict[str, Hook] = {}
        self._routes: dict[tuple[str, str | None], list[Hook]] = {}
        self._seen_changes = -1
        self._reads_bodies = False
        self._save_timer: asyncio.TimerHandle | None = None
        self._saved_at = -_SAVE_EVERY
        self._deliveries = engine.figures.deliveries

    def start(self) -> None:
        self._refresh()
        self._engine.listen(self._on_tick)

    # -- from commits to queues ----------------------------------------------------------------------------------------

    def _on_tick(self, events: list[Event], bodies: dict[int, bytes]) -> None:
        if self._backend.webhook_changes != self._seen_changes:
            known = {hook.record.id for hook in self._hooks.values() if hook.is_on}
            self._refresh()
            # A new hook gets events from the next tick on: those of this one have no bodies.
            self._feed(events, bodies, known)
        elif self._routes and events:
            self._feed(events, bodies, None)

    def _feed(self, events: list[Event], bodies: dict[int, bytes], known: set[str] | None) -> None:
        routes = self._routes
        for event in events:
            for key in ((event.event, None), (event.event, event.queue)):
                for hook in routes.get(key, ()):
                    if known is None or hook.record.id in known:
                        self._offer(hook, event, bodies.get(event.seq))

    def _offer(self, hook: Hook, event: Event, body: bytes | None) -> None:
        if not hook.offer(event, body):
            hook.failures += 1
            hook.dropped += 1
            self._deliveries.dropped += 1
            self._warn(hook, f"its queue is full, events are dropped ({hook.dropped} so far)")
            self._save_soon(hook)
        elif hook.task is None and not self._stopping.is_set():
            hook.task = self._loop.create_task(self._work(hook))

    def _refresh(self) -> None:
        self._seen_changes = self._backend.webhook_changes
        self._engine.run(self._take_over())

    async def _take_over(self) -> None:
        """Take over what was added, changed, switched or removed."""
        records = await self._backend.webhooks()
        before = self._hooks
        self._hooks = {}
        for record in records:
            hook = self._hooks[record.id] = before.get(record.id) or Hook(record)
            hook.learn(record)
            self._switch(hook, record.enabled)
        for gone in before.keys() - self._hooks.keys():
            self._switch(before[gone], False)
        self._route()

    @staticmethod
    def _switch(hook: Hook, is_on: bool) -> None:
        hook.is_on = is_on
        if not is_on:
            hook.forget_pending()

    def _route(self) -> None:
        self._routes = {}
        hooks = [hook for hook in self._hooks.values() if hook.is_on]
        for hook in hooks:
            for word, name in _WORDS.items():
                if name in hook.record.events:
                    self._routes.setdefault((word, hook.record.queue), []).append(hook)
        reads = any(not _WITH_BODY.isdisjoint(hook.record.events) for hook in hooks)
        if reads != self._reads_bodies:
            self._reads_bodies = reads
            self._engine.want_bodies(+1 if reads else -1)

    # -- from queues to receivers --------------------------------------------------------------------------------------

    async def _work(self, hook: Hook) -> None:
        """Deliver what waits for a hook, one after the other, until nothing does."""
        try:
            while hook.pending:
                await self._deliver(hook, *hook.take())
        except Exception:
            log.exception("webhook %s: a delivery failed unexpectedly", hook.record.id)
            self._deliveries.failed += 1
            self._note_failure(hook, "internal error")
        finally:
            hook.task = None
        if hook.pending and not self._stopping.is_set():  # only after an error: continue with the rest
            hook.task = self._loop.create_task(self._work(hook))

    async def _deliver(self, hook: Hook, event: Event, body: bytes | None) -> None:
        if body is not None and len(body) > _QUICK_BYTES:
            content = await asyncio.to_thread(message, event, body)
        else:
            content = message(event, body)
        headers = self._headers(hook.record, event, content)
        for attempt in range(1, self._settings.webhook_max_retries + 1):
            error = await self._try(hook, headers, content)
            if error is None:
                self._note_success(hook)
                return
            is_last = isinstance(error, Forbidden) or attempt == self._settings.webhook_max_retries
            if is_last or not await self._pause(hook, attempt):
                break
            self._deliveries.retried += 1
        if hook.is_on:
            self._deliveries.refused += isinstance(error, Forbidden)
            self._deliveries.failed += not isinstance(error, Forbidden)
            self._note_failure(hook, str(error))
            if self._stopping.is_set():
                self._give_up(hook)  # a receiver that fails now will not recover before the server has stopped

    def _headers(self, record: Webhook, event: Event, content: bytes) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"Headrace/{__version__}",
            "X-Webhook-Event": _WORDS[event.event],
            "X-Webhook-Timestamp": str(event.ts),
            "X-Webhook-Id": self._engine.ids.next(),
        }
        if record.secret:
            headers["X-Webhook-Signature"] = hmac.new(record.secret.encode(), content, hashlib.sha256).hexdigest()
        return headers

    async def _try(self, hook: Hook, headers: dict[str, str], content: bytes) -> DeliveryFailed | None:
        """One request; what went wrong, or None."""
        async with self._slot(hook):
            if hook.has_failed and self._stopping.is_set():
                return DeliveryFailed(_STOPPED)
            began = self._loop.time()
            try:
                to = check_webhook_url(hook.record.url, self._engine.webhook_rules)
                status = await self._outgoing.post(to, headers, content)
                error = None if 200 <= status < 300 else DeliveryFailed(f"answered {status}")
            except InvalidCommand as refusal:  # the rules may be stricter than when the hook was stored
                error = Forbidden(str(refusal))
            except DeliveryFailed as failure:
                error = failure
            hook.has_failed = error is not None
            hook.is_prompt = error is None and self._loop.time() - began < _SLOW
            return error

    @asynccontextmanager
    async def _slot(self, hook: Hook) -> AsyncIterator[None]:
        if hook.is_prompt:
            async with self._slots:
                yield
        else:
            async with self._doubtful_slots, self._slots:
                yield

    async def _pause(self, hook: Hook, attempt: int) -> bool:
        """Wait for the next try; False when there will be none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.webhook_retry_delay_ms * attempt / 1000):
                await self._stopping.wait()
        return hook.is_on and not self._stopping.is_set()

    # -- figures -------------------------------------------------------------------------------------------------------

    def _note_success(self, hook: Hook) -> None:
        self._deliveries.succeeded += 1
        hook.successes += 1
        hook.last_triggered = float(self._engine.clock.now_ms())
        hook.last_error = None
        self._save_soon(hook)

    def _note_failure(self, hook: Hook, error: str, count: int = 1) -> None:
        hook.failures += count
        hook.last_error = error
        self._warn(hook, f"a delivery failed: {error}")
        self._save_soon(hook)

    def _give_up(self, hook: Hook) -> None:
        left = hook.forget_pending()
        if left:
            self._deliveries.failed += left
            self._note_failure(hook, _STOPPED, left)

    def _warn(self, hook: Hook, text: str) -> None:
        """Log it, but not for each of ten thousand events."""
        now = self._loop.time()
        if now - hook.warned_at >= _WARN_EVERY:
            hook.warned_at = now
            log.warning("webhook %s (%s): %s", hook.record.id, _place(hook.record.url), text)

    def _save_soon(self, hook: Hook) -> None:
        hook.is_unsaved = True
        if self._save_timer is None:
            self._save_timer = self._loop.call_at(max(self._loop.time(), self._saved_at + _SAVE_EVERY), self._save)

    def _save(self) -> None:
        """Store the figures that changed. They are totals, so one that a failed commit took back is written later."""
        self._save_timer = None
        self._saved_at = self._loop.time()
        unsaved = [hook for hook in self._hooks.values() if hook.is_unsaved]
        if self._backend.is_degraded:
            for hook in unsaved[:1]:
                self._save_soon(hook)
            return
        self._engine.run(self._save_figures(unsaved))

    async def _save_figures(self, unsaved: list[Hook]) -> None:
        for hook in unsaved:
            hook.is_unsaved = False
            try:
                stored = await self._backend.change_webhook(hook.record.id, hook.figures)
            except StorageUnavailable:
                self._save_soon(hook)  # and with it those that follow
                raise
            if stored is not None:
                hook.note_stored(stored)
        self._schedule()

    # -- the end -------------------------------------------------------------------------------------------------------

    async def stop(self, time_is_up: asyncio.Event) -> None:
        """Finish what is in flight until `time_is_up`; the rest counts as failed. Retries are not awaited."""
        self._stopping.set()
        tasks = [hook.task for hook in self._hooks.values() if hook.task is not None]
        while not time_is_up.is_set() and not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=_GLANCE_S)
        for task in tasks:
            if not task.done():
                task.cancel()
        for hook in self._hooks.values():
            self._give_up(hook)
            if hook.task is not None:
                self._deliveries.failed += 1
                self._note_failure(hook, _STOPPED)
        if self._save_timer is not None:
            self._save_timer.cancel()
            self._save()
        await asyncio.gather(*tasks, return_exceptions=True)


# -- what is sent ------------------------------------------------------------------------------------------------------


def message(event: Event, body: bytes | None) -> bytes:
    """The JSON text of an event. `data` is the result of a completed job and the data of a failed one."""
    shown: dict[str, Any] = {
        "event": _WORDS[event.event],
        "timestamp": event.ts,
        "jobId": event.job,
        "queue": event.queue,
    }
    if event.event == "failed":
        shown["error"] = event.error or ""
        shown["terminal"] = bool(event.terminal)
    elif event.event == "progress":
        shown["progress"] = js_number(event.progress or 0)
        shown["data"] = {"progress": shown["progress"], "message": event.action}
    if body is not None:
        return _with_data(shown, body)
    if _WORDS[event.event] in _WITH_BODY and (event.bytes or 0) > MAX_DATA_BYTES:
        shown["dataOmitted"] = f"{event.bytes} bytes are more than the {MAX_DATA_BYTES} that are sent"
    return _encode_json(shown)


def _with_data(shown: dict[str, Any], body: bytes) -> bytes:
    try:
        return _encode_json(shown | {"data": _decode(body)})
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        # MessagePack can say what JSON cannot: maps as keys, broken texts, nesting without end.
        return _encode_json(shown | {"dataOmitted": "JSON cannot express it"})


def _extension(code: int, content: memoryview) -> bytes | None:
    """JavaScript's undefined is nothing, extensions of others are passed on as binary. Dates msgspec knows itself."""
    return None if code == 0 else bytes(content)


_decode: Final = msgspec.msgpack.Decoder(ext_hook=_extension).decode
_encode_json: Final = msgspec.json.Encoder().encode


def _place(url: str) -> str:
    """Enough of the URL to recognise it in the log; its path, query and password may be secrets."""
    host = url.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]
    return "".join(letter for letter in host if letter.isprintable())
