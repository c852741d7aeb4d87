"""Charts as inline SVG: time series, heat maps, sparklines. No script, so a report works offline, prints and diffs.

Every chart prints its unit on the axis. A value of None leaves a gap in a line: nothing is drawn where nothing is
known. Numbers are written as the dashboard writes them: 1,234 · 12.3 k · 850 ms · 12 s · 3 min · 2 h.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final, NamedTuple

WIDTH: Final = 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 8, 8, 22
_MINUTE_MS: Final = 60_000
_HOUR_MS: Final = 3_600_000

_LOG_TICKS_MS: Final = (1, 10, 100, 1_000, 10_000, 60_000, 600_000, _HOUR_MS, 10 * _HOUR_MS, 100 * _HOUR_MS)
"""Scales by decades show durations: their ticks are round in the units that people use."""

Point = tuple[float, float | None]
Format = Callable[[float], str]


class Series(NamedTuple):
    """A line: its name, its colour class, its points in order of time."""

    name: str
    kind: str
    points: Sequence[Point]
    is_area: bool = False


def percent(share: float) -> str:
    if 0 < share < 0.001:
        return "under 0.1 %"
    return f"{share * 100:.0f} %" if share >= 0.1 or share == 0 else f"{share * 100:.1f} %"


def moment(ms: float, *, with_day: bool = True) -> str:
    """A time to the minute, or to the second where it is between minutes."""
    clock = "%H:%M:%S" if ms % _MINUTE_MS else "%H:%M"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime(f"%a %d %b {clock}" if with_day else clock)


def span(start: float, end: float) -> str:
    """From one time to another, with the year: reports are kept."""
    days = [datetime.fromtimestamp(ms / 1000, UTC).strftime("%a %d %b %Y, ") for ms in (start, end)]
    until = moment(end, with_day=False)
    return f"{days[0]}{moment(start, with_day=False)} to {until if days[0] == days[1] else days[1] + until}"


# -- scales ---------------------------------------------------------------------------------------------------------


class Scale:
    """Values to pixels, upwards: counts linearly from zero, or milliseconds by decades."""

    def __init__(self, values: Sequence[float], height: float, *, is_log: bool) -> None:
        self.is_log = is_log
        self._height = height
        top = max(values, default=1) or 1
        self._low, self._high = 0.0, 1.0
        if is_log:
            low = min((value for value in values if value > 0), default=1)
            self._low = float(math.floor(math.log10(max(low, 1))))
            self._high = max(float(math.ceil(math.log10(max(top, 10)))), self._low + 1)
        else:
            self._step = _nice_step(top / 3)
            self._high = self._step * math.ceil(top / self._step)

    def y(self, value: float) -> float:
        place = math.log10(max(value, 10**self._low)) if self.is_log else value
        return _TOP + self._height * (1 - (place - self._low) / (self._high - self._low))

    def ticks(self) -> list[float]:
        if self.is_log:
            return [ms for ms in _LOG_TICKS_MS if self._low <= math.log10(ms) <= self._high]
        return [self._step * n for n in range(round(self._high / self._step) + 1)]


def _nice_step(rough: float) -> float:
    """A round number of jobs: there are no halves of them."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1)))
    nices = (1, 2, 2.5, 5, 10) if power > 1 else (1, 2, 5, 10)
    return next(nice * power for nice in nices if nice * power >= rough * 0.999)


def _time_ticks(start: float, end: float) -> list[float]:
    span = end - start
    minutes = (1 / 12, 1 / 6, 0.25, 0.5, 1, 2, 5, 15, 30)
    hours = (1, 2, 3, 6, 12, *(24 * days for days in (1, 2, 7, 14, 30, 90, 365)))
    steps = [*(n * _MINUTE_MS for n in minutes), *(n * _HOUR_MS for n in hours)]
    step = next((step for step in steps if span / step <= 6), steps[-1])
    first = math.ceil(start / step) * step
    return [first + step * n for n in range(int((end - first) // step) + 1)]


# -- charts ---------------------------------------------------------------------------------------------------------


def time_chart(
    series: Sequence[Series],
    span: tuple[float, float],
    write: Format,
    *,
    height: int = 120,
    is_log: bool = False,
    rule: tuple[float, str] | None = None,
) -> str:
    """Lines over one time axis; `rule` is a horizontal line with a name, such as an SLA."""
    values = [value for one in series for _, value in one.points if value is not None]
    scale = Scale([*values, *([rule[0]] if rule else [])], height, is_log=is_log)
    start, end = span

    def x(at: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (at - start) / max(1.0, end - start)

    parts = [_frame(scale, span, x, write, height)]
    parts += [_drawn(one, x, scale, height) for one in series]
    if rule:
        y = scale.y(rule[0])
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="rule-name" x="{_LEFT + 4}" y="{y - 3:.1f}">{escape(rule[1])}</text>')
    names = ", ".join(one.name for one in series)
    return _svg(WIDTH, _TOP + height + _BOTTOM, "".join(parts), names)


def _frame(scale: Scale, span: tuple[float, float], x: Callable[[float], float], write: Format, height: int) -> str:
    parts = []
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 6}" y="{y + 3.5:.1f}">{write(tick)}</text>')
    return "".join(parts) + _time_axis(span, x, _TOP + height + 15)


def _time_axis(span: tuple[float, float], x: Callable[[float], float], y: float) -> str:
    has_days = span[1] - span[0] > 24 * _HOUR_MS
    parts = []
    for at in _time_ticks(*span):
        is_midnight = has_days and at % (24 * _HOUR_MS) == 0
        label = moment(at).rsplit(" ", 1)[0] if is_midnight else moment(at, with_day=False)
        parts.append(f'<text class="tick x" x="{x(at):.1f}" y="{y:.0f}">{label}</text>')
    return "".join(parts)


def _drawn(one: Series, x: Callable[[float], float], scale: Scale, height: int) -> str:
    parts = []
    for stretch in _stretches(one.points):
        path = " ".join(f"{x(at):.1f},{scale.y(value):.1f}" for at, value in stretch)
        if one.is_area:
            floor = _TOP + height
            ends = f"{x(stretch[-1][0]):.1f},{floor} {x(stretch[0][0]):.1f},{floor}"
            parts.append(f'<polygon class="area {one.kind}" points="{path} {ends}"/>')
        if len(stretch) == 1:
            at, value = stretch[0]
            parts.append(f'<circle class="dot {one.kind}" cx="{x(at):.1f}" cy="{scale.y(value):.1f}" r="2"/>')
        else:
            parts.append(f'<polyline class="line {one.kind}" points="{path}"/>')
    return "".join(parts)


def _stretches(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The parts of a line between its gaps."""
    found: list[list[tuple[float, float]]] = []
    is_on = False
    for at, value in points:
        if value is None:
            is_on = False
            continue
        if not is_on:
            found.append([])
        found[-1].append((at, value))
        is_on = True
    return found


def sparkline(values: Sequence[float], kind: str) -> str:
    """A small line without axes, from zero to its highest value."""
    width, height = 120, 22
    top = max(values, default=0) or 1
    step = width / max(1, len(values) - 1)
    points = " ".join(f"{n * step:.1f},{height - 1 - (height - 2) * v / top:.1f}" for n, v in enumerate(values))
    return _svg(width, height, f'<polyline class="line {kind}" points="{points}"/>', "course", css="spark")


def heat_map(rows: Sequence[tuple[str, Sequence[float | None]]], windows: range, write: Format) -> str:
    """A row of windows per name, darker for more, on a log scale; None stays empty. Values are in the tooltips."""
    values = [value for _, cells in rows for value in cells if value]
    low, high = math.log10(max(1, min(values, default=1))), math.log10(max(10, max(values, default=10)))
    left, cell_height = 120, 22
    width = (2 * WIDTH - left) / len(windows)
    parts = []
    for r, (name, cells) in enumerate(rows):
        y = r * cell_height
        shown = name if len(name) <= 17 else name[:16] + "…"
        parts.append(f'<text class="tick y" x="{left - 8}" y="{y + 15}">{escape(shown)}</text>')
        for c, value in enumerate(cells):
            if value is None:
                continue
            heat = (math.log10(max(value, 1)) - low) / (high - low or 1)
            parts.append(
                f'<rect class="heat" x="{left + c * width:.1f}" y="{y + 1}" width="{max(1.0, width - 1):.1f}" '
                f'height="{cell_height - 2}" fill-opacity="{0.08 + 0.92 * heat:.2f}">'
                f"<title>{escape(name)}, {moment(windows[c])}: {write(value)}</title></rect>"
            )
    bottom = len(rows) * cell_height
    span = windows.start, windows.start + len(windows) * windows.step

    def x(at: float) -> float:
        return left + (at - span[0]) / windows.step * width

    return _svg(2 * WIDTH, bottom + _BOTTOM, "".join(parts) + _time_axis(span, x, bottom + 15), "heat map")


def _svg(width: float, height: float, inside: str, title: str, css: str = "chart") -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg class="{css}" {size} role="img" aria-label="{escape(title)}">{inside}</svg>'
