"""headrace.notation: numbers and times read the same in the terminal and on the dashboard."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from headrace import notation
from headrace.durations import milliseconds, written

ROOT = Path(__file__).resolve().parents[2]
COUNTS = [0, 1, 7, 999, 1000, 1234, 9999, 10_000, 12_345, 99_949, 99_951, 123_456, 999_499, 999_500, 4_100_000, 2e9]
SPANS = [0, 0.4, 0.96, 1, 850, 999, 1000, 1234, 9949, 9951, 12_000, 59_400, 59_600, 90_000, 3_569_000, 3_580_000]
SPANS += [
    2.5,
    10_500,
    150_000,
    43_200_000 * 1.25,
    5_000_000,
    35_000_000,
    36_100_000,
    100_000_000,
    172_000_000,
    864_000_000,
]
AGES = [0, 1500, 2500, 59_400, 61_000, 7_300_000, -1000, -61_000, -90_000_000]
RATES = [0, 0.004, 0.1, 0.9, 5, 9.94, 9.96, 10, 120, 12_345]


def of_the_dashboard() -> dict[str, list[str]]:
    """The same values, written by the browser's code."""
    module = json.dumps(str(ROOT / "src/headrace/server/dashboard/format.js"))
    given = json.dumps({"counts": COUNTS, "spans": SPANS, "ages": AGES, "rates": RATES})
    program = f"""
        const f = await import({module}); const g = {given};
        console.log(JSON.stringify({{counts: g.counts.map(f.count), spans: g.spans.map(f.duration),
          ages: g.ages.map((gone) => f.age(1e12 - gone, 1e12)),
          rates: g.rates.flatMap((r) => [f.rateNumber(r, "s"), f.rateNumber(r, "min")])}}));"""
    bun = subprocess.check_output([str(ROOT / "tools/bun.sh")], text=True).strip()
    shown: dict[str, list[str]] = json.loads(subprocess.check_output([bun, "-e", program], text=True, timeout=30))
    return shown


def test_terminal_and_dashboard_write_the_same() -> None:
    assert of_the_dashboard() == {
        "counts": [notation.count(value) for value in COUNTS],
        "spans": [notation.duration(value) for value in SPANS],
        "ages": [notation.age(1e12 - gone, 1e12) for gone in AGES],
        "rates": [notation.rate(value, unit) for value in RATES for unit in ("s", "min")],
    }


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (notation.jobs(1), "1 job"),
        (notation.jobs(41_300), "41,300 jobs"),
        (notation.count(None), "\u2013"),
        (notation.sparkline([0, 1, 2, 4], 6), "  ▁▃▅█"),
        (notation.sparkline([9, 0, 7], 2), "▁█"),
        (notation.sparkline([], 3), "   "),
        (notation.one_line("a\nb\x1b[31m\x07"), "a b\\x1b[31m\\x07"),
        (notation.one_line("abcdef", 4), "abc…"),
        (notation.harmless("two\nlines\x1b[2J"), "two\nlines\\x1b[2J"),
        (notation.excerpt({"to": "ada", "n": 2, "name": "hidden", "__meta": 1}), "to: ada, n: 2"),
        (notation.excerpt(["a", 1]), '["a", 1]'),
        (notation.excerpt(None), ""),
        (notation.first_line(" first\nsecond"), "first"),
        (notation.place("headrace://host:6789?token=secret"), "headrace://host:6789"),
        (notation.place("valkey://me:p@ss/word@host:6379/0?prefix=glide"), "valkey://host:6379/0"),
        (notation.place("valkey://me:p?ss@host:6379"), "valkey://..."),
    ],
)
def test_what_is_written(shown: str, wanted: str) -> None:
    assert shown == wanted


@pytest.mark.parametrize("ms", [0, 1, 999, 1000, 90_000, 3_600_000, 90_061_001, 604_800_000])
def test_a_span_is_written_as_it_is_read(ms: int) -> None:
    assert milliseconds(written(ms)) == ms
