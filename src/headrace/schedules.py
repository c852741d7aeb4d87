"""When things run again: cron expressions, fixed intervals and repeating jobs.

Rules: times are milliseconds since the epoch, every result lies strictly after the given time, and
nothing here reads a clock. Expressions have 5 fields, or 6 with leading seconds, or are one of MACROS.

Daylight saving follows Debian's cron. A schedule whose minute and hour are both fixed (`30 2 * * *`) runs
once a day: when clocks skip its time it runs at the end of the gap, when they repeat it the first pass
counts. Every other schedule (`*/30 * * * *`) runs in every real hour.

cronsim knows the calendar and is only used for wall-clock time; the conversion between wall clock and UTC is
done here. To add a macro add it to MACROS.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from msgspec import Struct

from headrace.errors import InvalidCommand
from headrace.model import LAST_MOMENT_MS, MAX_SAFE_INTEGER, Repeat

MAX_EXPRESSION_LENGTH: Final = 256
MACROS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_EPOCH: Final = datetime(1970, 1, 1)
_DAY_S: Final = 86_400
_LAST_S: Final = 250_000_000_000  # in the year 9892: room for one search before Python's calendar ends
_NO_RUNS: Final = "Cron expression has no future occurrences"
_FIELD_COUNT: Final = "Cron expression must have 5 fields, or 6 fields with leading seconds"
# Names may be written in full; cronsim knows their first three letters.
_LONG_NAME: Final = re.compile(
    r"\b(?:(?:SUN|MON|TUES|WEDNES|THURS|FRI|SATUR)DAY|JANUARY|FEBRUARY|MARCH|APRIL|JUNE|JULY|AUGUST"
    r"|SEPTEMBER|OCTOBER|NOVEMBER|DECEMBER)\b"
)


class _Unusable(Exception):
    """Why an expression cannot be scheduled; callers put their own words in front."""


class Schedule(Struct, frozen=True):
    """A checked cron expression in its time zone. Made by `parse_schedule`."""

    expression: str
    calendar: str
    zone: ZoneInfo
    is_fixed: bool

    def next_after(self, ms: float) -> int:
        """The first run strictly after `ms`."""
        after = max(math.floor(ms / 1000), 0)
        try:
            if after > _LAST_S:
                raise OverflowError
            seconds = self._next_fixed(after) if self.is_fixed else self._next_wild(after)
        except (StopIteration, OverflowError):
            raise InvalidCommand(f"Invalid cron expression: {_NO_RUNS}") from None
        return seconds * 1000

    def _next_fixed(self, after: int) -> int:
        wall = after + self._offset(after)
        if datetime.fromtimestamp(after, self.zone).fold:
            # Second pass of a repeated hour: all of it ran in the first.
            change = self._change_between(after - _DAY_S, after)
            wall = change - 1 + self._offset(change - 1)
        return self._instant(self._next_wall(wall))

    def _next_wild(self, after: int) -> int:
        """Walk from one stretch of constant UTC offset to the next until a run falls inside one."""
        at, offset = after, self._offset(after)
        wall = at + offset
        while True:
            due = self._next_wall(wall) - offset
            horizon = min(due, at + _DAY_S)
            if self._offset(horizon) != offset:
                at = self._change_between(at, horizon)
                offset = self._offset(at)
                wall = at + offset - 1
            elif due == horizon:
                return due
            else:  # far away, and no clock change near: nothing can run before the last half day
                at = due - _DAY_S // 2
                offset = self._offset(at)
                wall = at + offset

    def _next_wall(self, wall: int) -> int:
        run = next(CronSim(self.calendar, _EPOCH + timedelta(seconds=wall)))
        return _whole_seconds(run - _EPOCH)

    def _offset(self, at: int) -> int:
        offset = datetime.fromtimestamp(at, self.zone).utcoffset()
        return _whole_seconds(offset) if offset else 0

    def _instant(self, wall: int) -> int:
        """When clocks first show `wall`; if they never do, when they jump over it."""
        shown = (_EPOCH + timedelta(seconds=wall)).replace(tzinfo=self.zone)
        offset = _whole_seconds(shown.utcoffset() or timedelta())
        instant = wall - offset
        if self._offset(instant) == offset:
            return instant
        return self._change_between(instant - _DAY_S, instant)

    def _change_between(self, low: int, high: int) -> int:
        """The first second with another UTC offset than `low` has; `high` is known to have another."""
        before = self._offset(low)
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(middle) == before:
                low = middle
            else:
                high = middle
        return high


def parse_schedule(expression: str, timezone: str | None = None) -> Schedule:
    """Check an expression; `timezone` is an IANA name, by default the zone of this machine."""
    try:
        return _parse(expression, _zone(timezone))
    except _Unusable as reason:
        raise InvalidCommand(f"Invalid cron expression: {reason}") from None


def check_cron(schedule: str | None, repeat_every: float | None, timezone: str | None) -> Schedule | None:
    """Check the timing of a Cron command. The expression wins when both ways are given."""
    if schedule:
        return parse_schedule(schedule, timezone)
    if repeat_every is None:
        raise InvalidCommand("Cron job must have either schedule or repeatEvery")
    if not (0 < repeat_every <= MAX_SAFE_INTEGER and float(repeat_every).is_integer()):
        raise InvalidCommand("Cron repeatEvery must be a positive safe integer number of milliseconds")
    return None


def check_repeat(repeat: Repeat, *, has_job_id: bool = False, has_relatives: bool = False) -> None:
    """Refuse a `repeat` that could not produce a clear chain of jobs."""
    has_pattern = bool(repeat.pattern and repeat.pattern.strip())
    if (repeat.every is not None) == has_pattern:
        raise InvalidCommand("repeat requires exactly one of every or pattern")
    if repeat.every is not None and not (0 < repeat.every < math.inf):
        raise InvalidCommand("repeat.every must be a positive finite number")
    if repeat.pattern and has_pattern:
        try:
            _parse(repeat.pattern, _zone(repeat.tz))
        except _Unusable as reason:
            raise InvalidCommand(f"Invalid repeat pattern: {reason}") from None
    _check_repeat_times(repeat)
    if has_job_id:
        raise InvalidCommand("repeat jobs cannot use JobOptions.jobId; use repeat.jobId instead")
    if has_relatives:
        raise InvalidCommand("repeat jobs cannot participate in parent or dependency relationships")


def _check_repeat_times(repeat: Repeat) -> None:
    times = {
        "startDate": repeat.start_date,
        "endDate": repeat.end_date,
        "prevMillis": repeat.prev_millis,
        "offset": repeat.offset,
    }
    for name, value in times.items():
        if value is not None and not math.isfinite(value):
            raise InvalidCommand(f"repeat.{name} must be a finite timestamp")


def next_every(prev_ms: float, every_ms: float, now_ms: float) -> int:
    """The next run of an interval that last ran (or was due) at `prev_ms`: in phase, missed runs skipped."""
    every_ms = max(every_ms, 1)
    due = prev_ms + every_ms
    if due <= now_ms:
        due += (math.floor((now_ms - due) / every_ms) + 1) * every_ms
    return math.ceil(due)


def next_repeat(repeat: Repeat, now_ms: int) -> int | None:
    """When the successor of a repeating job runs that completed at `now_ms`; None when the chain ends.

    `limit` counts repetitions after the first run; `prev_millis` is when the run that just ended was planned.
    """
    if repeat.limit is not None and repeat.count >= repeat.limit:
        return None
    due = _next_in_pattern(repeat, now_ms) if repeat.every is None else _next_in_interval(repeat, now_ms)
    end_ms = LAST_MOMENT_MS if repeat.end_date is None else repeat.end_date
    return due if due is not None and due <= min(end_ms, LAST_MOMENT_MS) else None


def _next_in_interval(repeat: Repeat, now_ms: int) -> int:
    assert repeat.every is not None
    start_ms = -math.inf if repeat.start_date is None else repeat.start_date
    offset_ms = repeat.offset or 0
    if repeat.prev_millis is not None:
        prev_ms = repeat.prev_millis
    elif start_ms > now_ms:
        prev_ms = start_ms + offset_ms - repeat.every
    else:
        prev_ms = now_ms + offset_ms
    return next_every(prev_ms, repeat.every, max(now_ms, start_ms - 1))


def _next_in_pattern(repeat: Repeat, now_ms: int) -> int | None:
    offset_ms = repeat.offset or 0
    after_ms: float = now_ms
    if repeat.start_date is not None:
        after_ms = max(after_ms, repeat.start_date - 1)
    if repeat.prev_millis is not None:
        after_ms = max(after_ms, repeat.prev_millis)
    try:
        slot = parse_schedule(repeat.pattern or "", repeat.tz).next_after(after_ms - offset_ms)
    except InvalidCommand:  # no run left before the calendar ends, or a zone that this machine has lost
        return None
    return math.ceil(slot + offset_ms)


@lru_cache(maxsize=1024)
def _parse(expression: str, zone: ZoneInfo) -> Schedule:
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise _Unusable(f"Cron expression too long (max {MAX_EXPRESSION_LENGTH} characters)")
    fields = MACROS.get(expression.strip().lower(), expression).upper().split()
    if len(fields) not in (5, 6):
        raise _Unusable(_FIELD_COUNT)
    calendar = _LONG_NAME.sub(lambda name: name[0][:3], " ".join(fields))
    _check_calendar(calendar)
    minute, hour = fields[-5:-3]
    return Schedule(expression, calendar, zone, not minute.startswith("*") and not hour.startswith("*"))


def _check_calendar(calendar: str) -> None:
    """Refuse what cannot be read, and what never happens: cronsim gives up after 50 years, about 15 ms."""
    try:
        next(CronSim(calendar, _EPOCH))
    except StopIteration:
        raise _Unusable(_NO_RUNS) from None
    except CronSimError as error:
        raise _Unusable(_reason(calendar, str(error))) from None


def _reason(calendar: str, complaint: str) -> str:
    # cronsim blames the day field for a day that no chosen month has, e.g. 30 February.
    *others, _month, weekday = calendar.split()
    with suppress(CronSimError):
        CronSim(" ".join([*others, "*", weekday]), _EPOCH)
        if complaint == "Bad day-of-month":
            return _NO_RUNS
    return complaint.replace("Bad", "invalid") + " field"


def _zone(name: str | None) -> ZoneInfo:
    if not name:
        return _local_zone(os.environ.get("TZ"))
    for spelling in (name, _zone_spellings().get(name.lower())):
        # Besides unknown names: directories, files that are no zones, names too long or with odd characters.
        with suppress(ZoneInfoNotFoundError, ValueError, OSError):
            if spelling:
                return ZoneInfo(spelling)
    raise _Unusable(f"unknown time zone '{name[:64]}'")


@cache
def _zone_spellings() -> dict[str, str]:
    """Zone names by their lower case: JavaScript runtimes take them in any case."""
    names = resources.files("tzdata").joinpath("zones").read_text(encoding="utf-8").split()
    return {name.lower(): name for name in names}


@lru_cache(maxsize=8)
def _local_zone(tz: str | None) -> ZoneInfo:
    """The zone of this machine: TZ if set, else /etc/localtime, else UTC."""
    if tz:
        with suppress(ZoneInfoNotFoundError, ValueError, OSError):
            return ZoneInfo(tz.removeprefix(":").rpartition("zoneinfo/")[2])
        return ZoneInfo("UTC")  # as the C library does with a name it does not know
    with suppress(ZoneInfoNotFoundError, ValueError, OSError):
        place = Path("/etc/localtime").resolve(strict=True)
        if "zoneinfo/" in str(place):
            return ZoneInfo(str(place).rpartition("zoneinfo/")[2])
        with place.open("rb") as file:
            return ZoneInfo.from_file(file)
    return ZoneInfo("UTC")


def _whole_seconds(span: timedelta) -> int:
    return span.days * _DAY_S + span.seconds
