"""Formatting numbers, times and payloads for people: in the terminal and in reports as on the dashboard.

1,234 · 12.3 k · 4.1 M; 850 ms · 12 s · 3 min · 2 h; rates in one unit per page. `server/dashboard/format.js` is the
same in the browser: change both. Untrusted text is sanitized here: control characters that a terminal would obey
(escape sequences, line breaks) are shown instead.
"""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, tzinfo
from typing import Any, Final

NOTHING: Final = "\u2013"
SECOND: Final = 1000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
_SPARKS: Final = "▁▂▃▄▅▆▇█"


def _whole(value: float) -> str:
    """Halves go up, as in the browser; Python's own rounding goes to the even number."""
    return f"{math.floor(value + 0.5):,}"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 100 else _whole(value)


def count(value: float | None) -> str:
    if value is None:
        return NOTHING
    if abs(value) < 9999.5:
        return _whole(value)
    if abs(value) < 999_500:
        return f"{_short(value / 1e3)} k"
    return f"{_short(value / 1e6)} M" if value < 999.5e6 else f"{_short(value / 1e9)} G"


def counted(number: int, what: str, many: str | None = None) -> str:
    """The full number, for sentences that must say exactly how many."""
    return f"{number:,} {what if number == 1 else many or f'{what}s'}"


def jobs(number: int) -> str:
    return counted(number, "job")


def duration(ms: float | None) -> str:
    if ms is None:
        return NOTHING
    if ms < 0.95:
        return "0 ms"
    if ms < 999.5:
        return f"{_whole(ms)} ms"
    if ms < 59.5 * SECOND:
        return f"{_short(ms / SECOND)} s" if ms < 9950 else f"{_whole(ms / SECOND)} s"
    if ms < 59.5 * MINUTE:
        return f"{_whole(ms / MINUTE)} min"
    if ms < 47.5 * HOUR:
        return f"{_short(ms / HOUR)} h" if ms < 10 * HOUR else f"{_whole(ms / HOUR)} h"
    return f"{_whole(ms / DAY)} d"


def age(time_ms: float | None, now_ms: float) -> str:
    if time_ms is None:
        return NOTHING
    gone = now_ms - time_ms
    if abs(gone) < 2 * SECOND:
        return "now"
    whole = math.floor(abs(gone) / SECOND + 0.5) * SECOND if abs(gone) < MINUTE else abs(gone)
    return f"{duration(whole)} ago" if gone >= 0 else f"in {duration(whole)}"


def moment(time_ms: float, zone: tzinfo | None = None) -> str:
    """The exact time with its zone; without one, that of this machine."""
    return datetime.fromtimestamp(time_ms / 1000, zone).astimezone(zone).strftime("%a %Y-%m-%d %H:%M:%S %Z")


def clock_time(time_ms: float) -> str:
    """Hours to milliseconds, for lists of what happened within a day."""
    return datetime.fromtimestamp(time_ms / 1000).strftime("%H:%M:%S.%f")[:-3]


def rate_unit(fastest_per_second: float) -> str:
    """One unit for a whole page: per second when anything is fast, else per minute."""
    return "s" if fastest_per_second >= 10 else "min"


def rate(per_second: float | None, unit: str) -> str:
    if per_second is None:
        return NOTHING
    value = per_second if unit == "s" else per_second * 60
    return f"{value:.1f}".removesuffix(".0") if 0 < value < 9.95 else count(value)


def sparkline(values: list[float], width: int) -> str:
    """The newest values as a line of bars, scaled to the highest of them; flat when there is nothing."""
    shown = values[-width:]
    top = max(shown, default=0) or 1
    bars = "".join(_SPARKS[min(7, round(7 * max(0.0, value) / top))] for value in shown)
    return bars.rjust(width)


def one_line(text: str, length: int | None = None) -> str:
    """Text from outside in one harmless line: no control character reaches the terminal."""
    safe = text if text.isprintable() else "".join(c if c.isprintable() else _shown(c) for c in text)
    return safe if length is None or len(safe) <= length else f"{safe[: max(0, length - 1)]}…"


def _shown(character: str) -> str:
    return " " if character in "\n\r\t" else f"\\x{ord(character):02x}"


def place(url: str) -> str:
    """A URL as messages may show it: without a user, a password, or the query in which a token may stand."""
    shown, _, query = url.partition("?")
    if "@" in query:  # a password with a question mark, or a token with an @
        return f"{url.partition('://')[0]}://..."
    return re.sub(r"//.*@", "//", shown)


def harmless(text: str) -> str:
    """Text of several lines that keeps its lines and tabs and loses everything else a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else _shown(c) for c in text)


def excerpt(data: Any, length: int = 200) -> str:
    """A payload in one line, without the braces."""
    if data is None:
        return ""
    if not isinstance(data, dict):
        return one_line(data if isinstance(data, str) else _brief(data), length)
    shown = [(key, value) for key, value in data.items() if key != "name" and not str(key).startswith("__")][:8]
    text = ", ".join(f"{key}: {value if isinstance(value, str) else _brief(value)}" for key, value in shown)
    return one_line(text, length)


def _brief(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def first_line(text: str | None) -> str:
    return one_line((text or "").strip().split("\n", 1)[0])
