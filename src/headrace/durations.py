"""Durations and times as people write them: seconds, timedelta, "30s", aware datetimes. Internally all is ms."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final

from headrace.errors import InvalidCommand

Duration = float | str | timedelta
"""Seconds, or text with a unit ("250ms", "30s", "5m", "2h", "7d"), or a timedelta."""

_UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*")


def milliseconds(span: Duration, what: str = "duration") -> float:
    """The span in ms; a whole number of them when it is one."""
    if isinstance(span, timedelta):
        return _plain(span / timedelta(milliseconds=1), span, what)
    if isinstance(span, str):
        return _plain(_parsed(span, what), span, what)
    if isinstance(span, bool) or not isinstance(span, int | float):
        raise InvalidCommand(f'{what} must be seconds, a timedelta or text such as "30s", not {span!r}')
    return _plain(span * 1000, span, what)


def seconds(span: Duration, what: str = "duration") -> float:
    return milliseconds(span, what) / 1000


def positive_seconds(span: Duration | None, what: str = "duration") -> float:
    """The span in seconds, where None, 0 and less all mean 0."""
    if span is None or (isinstance(span, int | float) and span <= 0):
        return 0.0
    if isinstance(span, timedelta) and span <= timedelta():
        return 0.0
    return seconds(span, what)


def written(ms: float) -> str:
    """The span in the same notation, exactly: 1m30s."""
    parts, left = [], int(ms)
    for unit, length in sorted(_UNITS.items(), key=lambda unit: -unit[1]):
        number, left = divmod(left, length)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"


def moment_ms(moment: datetime) -> int:
    """Wall time in ms. A datetime without a zone could mean two moments, so it is refused."""
    if not isinstance(moment, datetime):
        raise InvalidCommand(f"a datetime with a time zone is wanted, not {moment!r}")
    if moment.tzinfo is None:
        raise InvalidCommand("a datetime needs a time zone: use datetime.now(UTC) or .astimezone()")
    return int(moment.timestamp() * 1000)


def _parsed(text: str, what: str) -> float:
    total, at = 0.0, 0
    text = text.strip()
    while match := _PART.match(text, at):
        total += float(match[1]) * _UNITS[match[2]]
        at = match.end()
    if at == 0 or at != len(text):
        raise InvalidCommand(f'{what} {text!r} is not understood: write for example "250ms", "30s", "5m" or "1h30m"')
    return total


def _plain(ms: float, given: object, what: str) -> float:
    if not 0 <= ms < 1e15:
        raise InvalidCommand(f"{what} must not be negative, infinite or beyond all bounds: {given!r}")
    return int(ms) if ms == int(ms) else ms
