"""ScheduledEventManager: recurring events, on a cron expression with a time zone or at an interval.

Schedules live in the store and are listed from there, whoever created them; the store fires each due time once, however
many processes know the schedule. Each run is an event of its own: its id is `{schedule}@{due time in ms}`, so a handler
that runs twice for one due time can tell.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Raw, Struct

from headrace.client.options import Options
from headrace.client.payloads import encode_payload
from headrace.commands.cron import CronView
from headrace.durations import Duration, milliseconds
from headrace.errors import InvalidCommand
from headrace.events.message import JOB_NAME, ScheduledMessage, encode_message
from headrace.events.queues import QueueManager
from headrace.propagation import carried

_FIELDS: Final = (5, 6)


class ScheduleInfo(Struct, kw_only=True, frozen=True):
    """A schedule as it is stored. Times are ms since the epoch."""

    schedule_id: str
    event_name: str
    cron: str | None
    every_ms: float | None
    tz: str | None
    next_run: float
    runs: int


class ScheduledEventManager:
    """Events by cron or interval, kept in the store."""

    def __init__(self, queues: QueueManager) -> None:
        self._queues = queues

    async def schedule(
        self,
        event_name: str,
        schedule_id: str,
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str | None = None,
        payload: Raw | None = None,
        meta: dict[str, Any] | None = None,
        catch_up: bool = False,
        group: str | None = None,
        retry: Options | None = None,
    ) -> ScheduleInfo:
        """Create a schedule, or replace the one of this id. `retry` is what its group wants of attempts and backoff."""
        check_schedule(schedule_id, cron, every)
        data = ScheduledMessage(
            event_name=event_name,
            payload=encode_payload(None) if payload is None else payload,
            meta=carried(meta, "an event"),
            schedule_id=schedule_id,
        )
        queue = self._queues.get_queue(event_name, group)
        name = f"{schedule_id}@{queue.name}"
        options: Options = {**self._queues.defaults, **(retry or {})}
        # Every run is an event of its own: a slow handler must not swallow the next one.
        view = await queue.schedule(
            name,
            encode_message(data),
            cron=cron,
            every=every,
            tz=tz,
            job_name=JOB_NAME,
            overlap=True,
            catch_up=catch_up,
            attempts=options["attempts"],
            backoff=options["backoff"],
        )
        return _info(view, event_name)

    async def unschedule(self, event_name: str, schedule_id: str, group: str | None = None) -> bool:
        """False when there was no such schedule."""
        queue = self._queues.get_queue(event_name, group)
        return await queue.unschedule(f"{schedule_id}@{queue.name}")

    async def get_schedules(self, event_name: str, group: str | None = None) -> list[ScheduleInfo]:
        views = await self._queues.get_queue(event_name, group).schedules()
        return [_info(view, event_name) for view in views if "@" in view.name]

    async def stop(self) -> None:
        """Nothing is kept here: the schedules go on in the store."""


def check_schedule(schedule_id: str, cron: str | None, every: Duration | None) -> None:
    """Refuse what cannot be scheduled, before anything is asked."""
    if not schedule_id or ":" in schedule_id or "@" in schedule_id:
        raise InvalidCommand(f"schedule id {schedule_id!r}: give one without ':' and '@'")
    if (cron is None) == (every is None):
        raise InvalidCommand("a schedule has either cron=... or every=..., not both and not neither")
    if cron is not None and len(cron.split()) not in _FIELDS:
        raise InvalidCommand(f"cron expression {cron!r} has {len(cron.split())} fields; 5 or 6 are wanted")
    if every is not None:
        span = milliseconds(every, "every")
        if span <= 0 or span != int(span):
            raise InvalidCommand(f"every={every!r} must be a positive whole number of milliseconds")


def _info(view: CronView, event_name: str) -> ScheduleInfo:
    return ScheduleInfo(
        schedule_id=view.name.rsplit("@", 1)[0],
        event_name=event_name,
        cron=view.schedule,
        every_ms=view.repeat_every,
        tz=None if view.timezone is UNSET else view.timezone,
        next_run=view.next_run,
        runs=view.executions,
    )
