"""Schedules that Node processes wrote (`P:schedulers`): when they run and what they add.

Times follow glide-mq: an interval skips the slots that passed, a pattern runs in UTC unless it has a zone. Where a
pattern names both a day of the month and a day of the week classic cron wants either and glide-mq both; we run those on
days that satisfy both, as Node does on the same queue.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headrace.backends.valkey.arguments import Text
from headrace.errors import InvalidCommand
from headrace.schedules import next_every, parse_schedule

_MAX_STEPS: Final = 1000
_NO_JOB: Final[tuple[Text, ...]] = ("", "", "", "0", "0", "0", "0", "")


def firing(name: bytes, text: bytes, now: int) -> list[Text] | None:
    """The arguments of `fireScheduler` for a schedule that is due; None if it is not, or is unreadable."""
    try:
        entry = msgspec.json.decode(text)
        next_run = float(entry.get("nextRun") or 0)
        if not 0 < next_run <= now:
            return None
        if _is_over(entry, next_run):
            return [name, text, b"", *_NO_JOB]
        return [name, text, *_advanced(entry, next_run, now), *_job(entry, name)]
    except (msgspec.DecodeError, AttributeError, TypeError, ValueError, InvalidCommand):
        return None


def _is_over(entry: dict[str, Any], next_run: float) -> bool:
    """Whether not even this run is wanted: the end of a job may have planned it beyond the end of the schedule."""
    limit, end = entry.get("limit"), entry.get("endDate")
    return bool((limit and int(entry.get("iterationCount") or 0) >= int(limit)) or (end and next_run > float(end)))


def _advanced(entry: dict[str, Any], next_run: float, now: int) -> list[Text]:
    """The entry after this run, or nothing when it was the last one."""
    runs = int(entry.get("iterationCount") or 0) + 1
    following = _following(entry, next_run, now)
    limit, end = entry.get("limit"), entry.get("endDate")
    if following is None or (limit and runs >= int(limit)) or (end and following > float(end)):
        return [b""]
    return [msgspec.json.encode({**entry, "lastRun": now, "iterationCount": runs, "nextRun": following})]


def _following(entry: dict[str, Any], next_run: float, now: int) -> int | None:
    if entry.get("repeatAfterComplete"):
        return 0  # planned when the job has ended
    if entry.get("every"):
        return next_every(next_run, float(entry["every"]), now)
    return _next_match(str(entry["pattern"]), entry.get("tz") or "UTC", now)


def _next_match(pattern: str, zone: str, now: int) -> int | None:
    minute, hour, day, month, weekday = pattern.split()
    if day == "*" or weekday == "*":
        return parse_schedule(pattern, zone).next_after(now)
    by_day = parse_schedule(f"{minute} {hour} {day} {month} *", zone)
    by_weekday = parse_schedule(f"{minute} {hour} * {month} {weekday}", zone)
    one, other = by_day.next_after(now), by_weekday.next_after(now)
    for _ in range(_MAX_STEPS):
        if one == other:
            return one
        if one < other:
            one = by_day.next_after(other - 1)
        else:
            other = by_weekday.next_after(one - 1)
    return None


def _job(entry: dict[str, Any], name: bytes) -> list[Text]:
    template = entry.get("template") or {}
    opts = template.get("opts") or {}
    return [
        str(template.get("name") or name.decode()),
        msgspec.json.encode(template.get("data", {})),
        msgspec.json.encode(opts),
        str(int(opts.get("attempts") or 0)),
        str(int(opts.get("priority") or 0)),
        str(int(opts.get("ttl") or 0)),
        "1" if opts.get("lifo") else "0",
        name if entry.get("repeatAfterComplete") else "",
    ]
