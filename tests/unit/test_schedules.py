"""Cron expressions, intervals and repeating jobs: when the next run is, and what is refused."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidCommand
from headrace.model import LAST_MOMENT_MS, Repeat
from headrace.schedules import (
    MACROS,
    Schedule,
    check_cron,
    check_repeat,
    next_every,
    next_repeat,
    parse_schedule,
)

BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
FIELDS = "Cron expression must have 5 fields, or 6 fields with leading seconds"
NO_RUNS = "Cron expression has no future occurrences"


def ms(text: str) -> int:
    """`2026-03-29T02:00+01:00` (UTC when no offset is given) in milliseconds."""
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def runs(schedule: Schedule, start: str, count: int) -> list[str]:
    """The next runs as local times with their offset."""
    found, at = [], ms(start)
    for _ in range(count):
        at = schedule.next_after(at)
        found.append(datetime.fromtimestamp(at / 1000, schedule.zone).isoformat(timespec="minutes"))
    return found


# Clocks in Berlin skip 02:00-03:00 on 29 March 2026 and repeat it on 25 October; those in New York skip it on
# 8 March and repeat 01:00-02:00 on 1 November.
DAYLIGHT_SAVING = {
    "Berlin: a daily run in the gap moves to its end, once": (
        ("30 2 * * *", BERLIN, "2026-03-28T12:00"),
        ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"],
    ),
    "New York: a daily run in the gap moves to its end, once": (
        ("30 2 * * *", NEW_YORK, "2026-03-07T12:00"),
        ["2026-03-08T03:00-04:00", "2026-03-09T02:30-04:00"],
    ),
    "Berlin: a daily run in the repeated hour happens once": (
        ("30 2 * * *", BERLIN, "2026-10-24T12:00"),
        ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"],
    ),
    "New York: a daily run in the repeated hour happens once": (
        ("30 1 * * *", NEW_YORK, "2026-10-31T12:00"),
        ["2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"],
    ),
    "Berlin: hourly runs pass over the gap": (
        ("0 * * * *", BERLIN, "2026-03-29T00:00"),
        ["2026-03-29T03:00+02:00", "2026-03-29T04:00+02:00"],
    ),
    "New York: hourly runs pass over the gap": (
        ("0 * * * *", NEW_YORK, "2026-03-08T06:00"),
        ["2026-03-08T03:00-04:00", "2026-03-08T04:00-04:00"],
    ),
    "Berlin: hourly runs happen in both passes": (
        ("0 * * * *", BERLIN, "2026-10-24T23:00"),
        ["2026-10-25T02:00+02:00", "2026-10-25T02:00+01:00", "2026-10-25T03:00+01:00"],
    ),
    "New York: hourly runs happen in both passes": (
        ("0 * * * *", NEW_YORK, "2026-11-01T04:00"),
        ["2026-11-01T01:00-04:00", "2026-11-01T01:00-05:00", "2026-11-01T02:00-05:00"],
    ),
    "Berlin: half-hourly runs happen in both passes": (
        ("*/30 * * * *", BERLIN, "2026-10-25T00:00"),
        [
            "2026-10-25T02:30+02:00",
            "2026-10-25T02:00+01:00",
            "2026-10-25T02:30+01:00",
            "2026-10-25T03:00+01:00",
        ],
    ),
    "New York: half-hourly runs happen in both passes": (
        ("*/30 * * * *", NEW_YORK, "2026-11-01T05:00"),
        [
            "2026-11-01T01:30-04:00",
            "2026-11-01T01:00-05:00",
            "2026-11-01T01:30-05:00",
            "2026-11-01T02:00-05:00",
        ],
    ),
    "a fixed run is not repeated for a server that starts between the passes": (
        ("30 2 * * *", BERLIN, "2026-10-25T00:45"),
        ["2026-10-26T02:30+01:00"],
    ),
    "a fixed run is not repeated for a server that starts in the second pass": (
        ("30 2 * * *", BERLIN, "2026-10-25T01:10"),
        ["2026-10-26T02:30+01:00"],
    ),
    "several fixed runs in the gap become one": (
        ("0,15,30,45 2 * * *", BERLIN, "2026-03-29T00:00"),
        ["2026-03-29T03:00+02:00", "2026-03-30T02:00+02:00"],
    ),
    "a leading seconds field changes nothing of this": (
        ("0 30 2 * * *", BERLIN, "2026-03-28T12:00"),
        ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"],
    ),
    "a wildcard run that happens once a year still happens in both passes": (
        ("*/30 2 25 10 *", BERLIN, "2026-10-25T00:40"),
        ["2026-10-25T02:00+01:00", "2026-10-25T02:30+01:00", "2027-10-25T02:00+02:00"],
    ),
    "a day that begins in a gap begins at its end": (
        ("0 0 * * *", "Africa/Cairo", "2026-04-23T12:00"),
        ["2026-04-24T01:00+03:00", "2026-04-25T00:00+03:00"],
    ),
    "a shift of half an hour is handled alike": (
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00"),
        ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"],
    ),
}


@pytest.mark.parametrize(("asked", "expected"), list(DAYLIGHT_SAVING.values()), ids=list(DAYLIGHT_SAVING))
def test_daylight_saving(asked: tuple[str, str, str], expected: list[str]) -> None:
    expression, zone, start = asked
    assert runs(parse_schedule(expression, zone), start, len(expected)) == expected


@pytest.mark.parametrize(
    ("expression", "start", "expected"),
    [
        ("0 0 29 2 *", "2026-01-01T00:00", ["2028-02-29T00:00+00:00", "2032-02-29T00:00+00:00"]),
        ("0 0 29 2 *", "2096-03-01T00:00", ["2104-02-29T00:00+00:00"]),
        ("59 23 31 12 *", "2026-12-31T23:58", ["2026-12-31T23:59+00:00", "2027-12-31T23:59+00:00"]),
        ("0 0 31 * *", "2026-01-31T00:00", ["2026-03-31T00:00+00:00", "2026-05-31T00:00+00:00"]),
        ("0 0 L * *", "2026-01-31T00:00", ["2026-02-28T00:00+00:00", "2026-03-31T00:00+00:00"]),
        ("0 0 L 2 *", "2027-03-01T00:00", ["2028-02-29T00:00+00:00"]),
        ("0 12 * * 5L", "2026-01-01T00:00", ["2026-01-30T12:00+00:00", "2026-02-27T12:00+00:00"]),
        ("0 12 * * MON#1", "2026-01-01T00:00", ["2026-01-05T12:00+00:00", "2026-02-02T12:00+00:00"]),
        ("0 9 * * 1-5", "2026-01-02T09:00", ["2026-01-05T09:00+00:00"]),
        ("0 9 * * Monday", "2026-01-01T00:00", ["2026-01-05T09:00+00:00"]),
        ("0 0 1 february,JUL *", "2026-01-01T00:00", ["2026-02-01T00:00+00:00", "2026-07-01T00:00+00:00"]),
        ("0 0 * * 7", "2026-01-01T00:00", ["2026-01-04T00:00+00:00"]),
        ("0 0 13 * 5", "2026-01-01T00:00", ["2026-01-02T00:00+00:00", "2026-01-09T00:00+00:00"]),
        ("5/20 * * * *", "2026-01-01T00:00", ["2026-01-01T00:05+00:00", "2026-01-01T00:25+00:00"]),
        ("  */15   *  * * *  ", "2026-01-01T00:00", ["2026-01-01T00:15+00:00"]),
    ],
)
def test_calendar_fields(expression: str, start: str, expected: list[str]) -> None:
    assert runs(parse_schedule(expression, "UTC"), start, len(expected)) == expected


def test_schedules_below_a_minute_lose_no_run() -> None:
    schedule, at, found = parse_schedule("*/2 * * * * *", "UTC"), ms("2026-01-01T00:00"), []
    for _ in range(60):
        at = schedule.next_after(at)
        found.append(at)
    assert found == [ms("2026-01-01T00:00") + 2000 * i for i in range(1, 61)]


def test_seconds_combine_with_the_other_fields() -> None:
    schedule = parse_schedule("15,45 59 23 * * *", BERLIN)
    first = schedule.next_after(ms("2026-06-01T00:00"))
    assert first == ms("2026-06-01T21:59:15")
    assert schedule.next_after(first) == ms("2026-06-01T21:59:45")


def test_the_next_run_is_strictly_later_to_the_millisecond() -> None:
    schedule = parse_schedule("* * * * *", "UTC")
    minute = ms("2026-01-01T00:01")
    assert schedule.next_after(minute - 1) == minute
    assert schedule.next_after(minute) == minute + 60_000
    assert schedule.next_after(minute + 0.5) == minute + 60_000
    assert schedule.next_after(-(10**15)) == 60_000


@pytest.mark.parametrize(
    ("macro", "expected"),
    [
        ("@yearly", "2027-01-01T00:00+00:00"),
        ("@annually", "2027-01-01T00:00+00:00"),
        ("@monthly", "2026-06-01T00:00+00:00"),
        ("@weekly", "2026-05-17T00:00+00:00"),
        ("@daily", "2026-05-16T00:00+00:00"),
        ("@midnight", "2026-05-16T00:00+00:00"),
        ("@hourly", "2026-05-15T11:00+00:00"),
        (" @Hourly ", "2026-05-15T11:00+00:00"),
    ],
)
def test_macros(macro: str, expected: str) -> None:
    assert runs(parse_schedule(macro, "UTC"), "2026-05-15T10:30", 1) == [expected]


def test_every_macro_is_tested() -> None:
    assert set(MACROS) == {"@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"}


def test_the_zone_decides_the_hour() -> None:
    assert parse_schedule("0 9 * * *", "Asia/Tokyo").next_after(ms("2026-01-01T00:00")) == ms("2026-01-02T00:00")
    assert parse_schedule("0 9 * * *", "asia/tokyo").zone == ZoneInfo("Asia/Tokyo")


@pytest.mark.parametrize("absent", [None, ""])
def test_without_a_zone_the_machine_decides(monkeypatch: pytest.MonkeyPatch, absent: str | None) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    assert parse_schedule("0 0 * * *", absent).next_after(ms("2026-01-01T00:00")) == ms("2026-01-01T18:30")
    monkeypatch.setenv("TZ", ":America/New_York")
    assert parse_schedule("0 0 * * *", absent).next_after(ms("2026-01-01T00:00")) == ms("2026-01-01T05:00")
    monkeypatch.setenv("TZ", "Nowhere/Land")
    assert parse_schedule("0 0 * * *", absent).zone == ZoneInfo("UTC")
    monkeypatch.delenv("TZ")
    offset = timedelta(seconds=-time.timezone)
    assert datetime(2026, 1, 1, tzinfo=parse_schedule("0 0 * * *", absent).zone).utcoffset() == offset


@pytest.mark.parametrize(
    ("expression", "detail"),
    [
        ("", FIELDS),
        ("   ", FIELDS),
        ("* * * *", FIELDS),
        ("* * * * * * *", FIELDS),
        ("@reboot", FIELDS),
        ("x" * 257, "Cron expression too long (max 256 characters)"),
        ("0 0 30 2 *", NO_RUNS),
        ("0 0 31 4,6,9,11 *", NO_RUNS),
        ("0 0 */31 * 1#5", NO_RUNS),
        ("61 * * * *", "invalid minute field"),
        ("60 * * * * *", "invalid second field"),
        ("* 24 * * *", "invalid hour field"),
        ("* * 0 * *", "invalid day-of-month field"),
        ("* * 15W * *", "invalid day-of-month field"),
        ("* * 32 2 *", "invalid day-of-month field"),
        ("* * * 13 *", "invalid month field"),
        ("* * * JANDAY *", "invalid month field"),
        ("* * * * 8", "invalid day-of-week field"),
        ("*/0 * * * *", "invalid minute field"),
        ("5-1 * * * *", "invalid minute field"),
        ("-1 * * * *", "invalid minute field"),
        ("1.5 * * * *", "invalid minute field"),
        (", * * * *", "invalid minute field"),
        ("٣ * * * *", "invalid minute field"),
    ],
)
def test_a_wrong_expression_is_refused_with_its_reason(expression: str, detail: str) -> None:
    with pytest.raises(InvalidCommand) as caught:
        parse_schedule(expression, "UTC")
    assert str(caught.value) == f"Invalid cron expression: {detail}"


@pytest.mark.parametrize(
    "zone", ["Mars/Base", "Europe", "../../etc/passwd", "/etc/localtime", "a\0b", "+02:00", "zone.tab", " "]
)
def test_an_unknown_zone_is_named(zone: str) -> None:
    with pytest.raises(InvalidCommand) as caught:
        parse_schedule("* * * * *", zone)
    assert str(caught.value) == f"Invalid cron expression: unknown time zone '{zone}'"


def test_a_huge_zone_name_is_cut_in_the_error() -> None:
    with pytest.raises(InvalidCommand) as caught:
        parse_schedule("* * * * *", "Z" * 5000)
    assert len(str(caught.value)) < 150


def test_hostile_expressions_are_cheap() -> None:
    hostile = [
        "0 0 */31 * 1#5",
        "0 0 LW * */7",
        "0-59," * 48 + "0 * * * *",
        "*/59 */59 */23 */30 */11 */6",
        "9" * 240 + " * * * *",
        "0 0 29 2 */7",
    ]
    for expression in hostile:
        started = time.process_time()
        with suppress(InvalidCommand):
            parse_schedule(expression, BERLIN).next_after(ms("2026-01-01T00:00"))
        assert time.process_time() - started < 0.25, expression


def test_the_end_of_the_calendar_is_an_error_not_a_crash() -> None:
    schedule = parse_schedule("0 0 29 2 *", BERLIN)
    late = schedule.next_after(ms("9800-01-01T00:00"))
    assert late == int(datetime(9804, 2, 29, tzinfo=ZoneInfo(BERLIN)).timestamp() * 1000)
    for moment in (LAST_MOMENT_MS, 10**300, 251_000_000_000_000):
        with pytest.raises(InvalidCommand, match=NO_RUNS):
            schedule.next_after(moment)
    assert next_repeat(Repeat(pattern="@daily"), LAST_MOMENT_MS) is None


def test_equal_expressions_share_one_parsed_schedule() -> None:
    assert parse_schedule("*/5 * * * *", BERLIN) is parse_schedule("*/5 * * * *", BERLIN)


# Properties against stepping through time

number_lists = {
    "minute": st.lists(st.integers(0, 59), min_size=1, max_size=4).map(lambda v: ",".join(map(str, v))),
    "hour": st.lists(st.integers(0, 23), min_size=1, max_size=4).map(lambda v: ",".join(map(str, v))),
}
minutes = st.one_of(st.just("*"), st.integers(1, 59).map("*/{}".format), number_lists["minute"])
hours = st.one_of(st.just("*"), st.integers(1, 23).map("*/{}".format), number_lists["hour"])
weekdays = st.one_of(st.just("*"), st.integers(0, 6).map(str), st.just("1-5"))
# Within two days around the clock changes of 2026, and an ordinary time.
starts = st.sampled_from(
    ["2026-03-28T00:00", "2026-10-24T00:00", "2026-03-07T00:00", "2026-10-31T00:00", "2026-02-27T22:00"]
)
zones = st.sampled_from(["UTC", BERLIN, NEW_YORK, "Australia/Lord_Howe", "Asia/Kolkata", "Africa/Cairo"])


def values(field: str, size: int) -> set[int]:
    if field.startswith("*"):
        return set(range(0, size, int(field[2:] or 1)))
    if "-" in field:
        low, high = map(int, field.split("-"))
        return set(range(low, high + 1))
    return set(map(int, field.split(",")))


def stepped(minute: str, hour: str, weekday: str, zone: str, start_ms: int, days: int) -> list[int]:
    """Every minute of real time in which the local clock matches."""
    found = []
    wanted = values(minute, 60), values(hour, 24), values(weekday, 7)
    for at in range(start_ms + 60_000, start_ms + days * 86_400_000 + 1, 60_000):
        local = datetime.fromtimestamp(at / 1000, ZoneInfo(zone))
        shown = local.minute, local.hour, local.isoweekday() % 7
        if all(value in allowed for value, allowed in zip(shown, wanted, strict=True)):
            found.append(at)
    return found


def collected(schedule: Schedule, start_ms: int, days: int) -> list[int]:
    found, end_ms = [], start_ms + days * 86_400_000
    at = schedule.next_after(start_ms)
    while at <= end_ms:
        found.append(at)
        at = schedule.next_after(at)
    return found


@settings(max_examples=40)
@given(minute=minutes, hour=hours, weekday=weekdays, start=starts)
def test_in_utc_no_run_is_skipped_or_invented(minute: str, hour: str, weekday: str, start: str) -> None:
    schedule = parse_schedule(f"{minute} {hour} * * {weekday}", "UTC")
    assert collected(schedule, ms(start), 2) == stepped(minute, hour, weekday, "UTC", ms(start), 2)


@settings(max_examples=60)
@given(minute=minutes, hour=hours, weekday=weekdays, start=starts, zone=zones)
def test_a_wildcard_runs_in_every_matching_minute_of_real_time(
    minute: str, hour: str, weekday: str, start: str, zone: str
) -> None:
    if not (minute.startswith("*") or hour.startswith("*")):
        hour = "*"
    schedule = parse_schedule(f"{minute} {hour} * * {weekday}", zone)
    assert collected(schedule, ms(start), 3) == stepped(minute, hour, weekday, zone, ms(start), 3)


@settings(max_examples=60)
@given(minute=number_lists["minute"], hour=number_lists["hour"], start=starts, zone=zones)
def test_a_fixed_time_runs_exactly_once_for_each_local_date(minute: str, hour: str, start: str, zone: str) -> None:
    schedule = parse_schedule(f"{minute} {hour} * * *", zone)
    found = collected(schedule, ms(start), 4)
    shown = [datetime.fromtimestamp(at / 1000, schedule.zone).replace(tzinfo=None) for at in found]
    assert len(set(shown)) == len(shown)
    wanted = len(values(minute, 60)) * len(values(hour, 24))
    whole_days = {at.date() for at in shown} - {shown[0].date(), shown[-1].date()}
    for day in whole_days:
        times = [at for at in shown if at.date() == day]
        real = [at for at in times if at.minute in values(minute, 60) and at.hour in values(hour, 24)]
        # Times in a gap are merged into one run at its end; every other time runs as written.
        assert len(times) <= wanted
        assert len(times) - len(real) <= 1
        shown_by_clocks = itertools.product(values(minute, 60), values(hour, 24))
        skipped = sum(is_skipped(day, m, h, zone) for m, h in shown_by_clocks)
        assert len(real) >= wanted - skipped


def is_skipped(day: object, minute: int, hour: int, zone: str) -> bool:
    local = datetime.fromisoformat(f"{day}T{hour:02}:{minute:02}").replace(tzinfo=ZoneInfo(zone))
    return local.astimezone(UTC).astimezone(local.tzinfo).replace(tzinfo=None) != local.replace(tzinfo=None)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), zone=zones)
def test_runs_are_strictly_increasing_from_any_moment(seed: int, zone: str) -> None:
    rng = random.Random(seed)
    fields = [rng.choice(["*", "*/7", "3", "10-40"]), rng.choice(["*", "*/5", "2", "1-3"])]
    seconds = rng.choice(["", "*/20 ", "30 "])
    schedule = parse_schedule(f"{seconds}{' '.join(fields)} * * *", zone)
    at = ms("2026-01-01T00:00") + rng.randrange(365 * 86_400_000)
    times = [at]
    for _ in range(50):
        times.append(schedule.next_after(times[-1]))
    assert all(earlier < later for earlier, later in itertools.pairwise(times))
    # Asking from just before a run finds that very run: none hides behind the one before.
    assert all(schedule.next_after(later - 1) == later for later in times[1:])


@given(st.text(alphabet="0123456789*/,-#LW ?ABCJANMOSUN@", max_size=40))
def test_no_text_gets_more_than_a_refusal(text: str) -> None:
    try:
        schedule = parse_schedule(text, "UTC")
    except InvalidCommand:
        return
    assert schedule.next_after(0) > 0


# Intervals and repeating jobs


@pytest.mark.parametrize(
    ("prev", "every", "now", "expected"),
    [
        (1000, 500, 1000, 1500),
        (1000, 500, 1499, 1500),
        (1000, 500, 1500, 2000),
        (1000, 500, 9999, 10_000),
        (1000, 500, 10_000, 10_500),
        (1000, 1000.5, 2000.5, 3001),
        (1000, 0.001, 5000, 5001),
    ],
)
def test_intervals_keep_their_phase_and_skip_what_was_missed(
    prev: float, every: float, now: float, expected: int
) -> None:
    assert next_every(prev, every, now) == expected


@given(st.integers(0, 10**13), st.integers(1, 10**9), st.integers(0, 10**13))
def test_an_interval_is_always_next_and_in_phase(prev: int, every: int, now: int) -> None:
    due = next_every(prev, every, now)
    assert due > now
    assert (due - prev) % every == 0
    assert due > prev
    assert due - every <= max(now, prev)


@pytest.mark.parametrize(("limit", "successors"), [(0, 0), (1, 1), (2, 2), (5, 5)])
def test_limit_counts_repetitions_after_the_first_run(limit: int, successors: int) -> None:
    count, now, made = 0, 1000, 0
    while made < 10:
        due = next_repeat(Repeat(every=100, limit=limit, count=count, prev_millis=now), now)
        if due is None:
            break
        count, now, made = count + 1, due, made + 1
    assert made == successors


def test_without_a_limit_a_chain_goes_on() -> None:
    assert next_repeat(Repeat(every=100, count=10**6, prev_millis=5000), 5050) == 5100


@pytest.mark.parametrize(
    ("repeat", "now", "expected"),
    [
        (Repeat(every=1000), 500, 1500),
        (Repeat(every=1000, offset=50), 500, 1550),
        (Repeat(every=1000, prev_millis=400), 500, 1400),
        (Repeat(every=1000, prev_millis=400), 7000, 7400),
        (Repeat(every=1000, start_date=9000), 500, 9000),
        (Repeat(every=1000, start_date=9000, offset=-300), 500, 9700),
        (Repeat(every=1000, start_date=9000, prev_millis=400), 500, 9400),
        (Repeat(every=1000, start_date=100), 500, 1500),
        (Repeat(every=1000, end_date=1500), 500, 1500),
        (Repeat(every=1000, end_date=1499), 500, None),
        (Repeat(every=1e300), 500, None),
        (Repeat(every=1000, immediately=True, prev_millis=400), 500, 1400),
    ],
)
def test_the_next_run_of_an_interval(repeat: Repeat, now: int, expected: int | None) -> None:
    assert next_repeat(repeat, now) == expected


@pytest.mark.parametrize(
    ("repeat", "expected"),
    [
        (Repeat(pattern="0 * * * *", tz="UTC"), "2026-01-01T11:00"),
        (Repeat(pattern="@daily", tz="Asia/Tokyo"), "2026-01-01T15:00"),
        (Repeat(pattern="0 * * * *", tz="UTC", offset=90_000), "2026-01-01T11:01:30"),
        (Repeat(pattern="0 * * * *", tz="UTC", offset=-90_000), "2026-01-01T10:58:30"),
        (Repeat(pattern="0 * * * *", tz="UTC", prev_millis=ms("2026-01-01T11:00")), "2026-01-01T12:00"),
        (Repeat(pattern="0 * * * *", tz="UTC", start_date=ms("2026-02-01T00:00")), "2026-02-01T00:00"),
        (Repeat(pattern="0 * * * *", tz="UTC", end_date=ms("2026-01-01T11:00")), "2026-01-01T11:00"),
        (Repeat(pattern="0 * * * *", tz="UTC", end_date=ms("2026-01-01T10:59")), None),
        (Repeat(pattern="0 * * * *", tz="UTC", limit=3, count=3), None),
        (Repeat(pattern="*/10 * * * * *", tz="UTC"), "2026-01-01T10:30:10"),
    ],
)
def test_the_next_run_of_a_pattern(repeat: Repeat, expected: str | None) -> None:
    assert next_repeat(repeat, ms("2026-01-01T10:30")) == (None if expected is None else ms(expected))


@pytest.mark.parametrize(
    ("repeat", "error"),
    [
        (Repeat(), "repeat requires exactly one of every or pattern"),
        (Repeat(pattern=" "), "repeat requires exactly one of every or pattern"),
        (Repeat(every=5, pattern="* * * * *"), "repeat requires exactly one of every or pattern"),
        (Repeat(every=0), "repeat.every must be a positive finite number"),
        (Repeat(every=-5), "repeat.every must be a positive finite number"),
        (Repeat(every=float("nan")), "repeat.every must be a positive finite number"),
        (Repeat(every=float("inf")), "repeat.every must be a positive finite number"),
        (Repeat(pattern="* * *"), f"Invalid repeat pattern: {FIELDS}"),
        (Repeat(pattern="0 0 30 2 *"), f"Invalid repeat pattern: {NO_RUNS}"),
        (
            Repeat(pattern="* * * * *", tz="Mars/Base"),
            "Invalid repeat pattern: unknown time zone 'Mars/Base'",
        ),
        (Repeat(every=5, start_date=float("inf")), "repeat.startDate must be a finite timestamp"),
        (Repeat(every=5, end_date=float("nan")), "repeat.endDate must be a finite timestamp"),
        (Repeat(every=5, prev_millis=float("nan")), "repeat.prevMillis must be a finite timestamp"),
        (Repeat(every=5, offset=float("-inf")), "repeat.offset must be a finite timestamp"),
    ],
)
def test_a_repeat_that_makes_no_chain_is_refused(repeat: Repeat, error: str) -> None:
    with pytest.raises(InvalidCommand) as caught:
        check_repeat(repeat)
    assert str(caught.value) == error


def test_a_repeating_job_stands_alone() -> None:
    repeat = Repeat(every=1000)
    check_repeat(repeat)
    check_repeat(Repeat(pattern="@daily", tz=BERLIN))
    with pytest.raises(InvalidCommand, match=r"^repeat jobs cannot use JobOptions\.jobId; use repeat\.jobId instead$"):
        check_repeat(repeat, has_job_id=True, has_relatives=True)
    with pytest.raises(InvalidCommand, match=r"^repeat jobs cannot participate in parent or dependency relationships$"):
        check_repeat(repeat, has_relatives=True)


def test_a_cron_command_needs_one_way_to_be_timed() -> None:
    assert check_cron(None, 1000, None) is None
    expression = check_cron("* * * * *", -5, "UTC")
    assert expression is not None
    assert expression.next_after(0) == 60_000
    for schedule in (None, ""):
        with pytest.raises(InvalidCommand, match=r"^Cron job must have either schedule or repeatEvery$"):
            check_cron(schedule, None, None)


@pytest.mark.parametrize("every", [0, -1, 1.5, float("nan"), float("inf"), 2**53])
def test_a_cron_interval_is_a_positive_safe_integer(every: float) -> None:
    with pytest.raises(
        InvalidCommand, match=r"^Cron repeatEvery must be a positive safe integer number of milliseconds$"
    ):
        check_cron(None, every, None)
