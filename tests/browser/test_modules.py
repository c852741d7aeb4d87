"""The pure modules of the dashboard, asked inside the browser: formats, signatures, the table of buttons, timelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from headrace.cli.judgement import judge
from headrace.commands.dashboard import (
    HistoryRates,
    HistorySeries,
    HistoryView,
    QueueRow,
    QueueSeries,
    first_line,
    signature_of,
)
from headrace.states import NEXT, WORDS, State, Verb
from tests.browser.conftest import Site, watched_pages

MINUTE = 60_000
HOUR = 60 * MINUTE


@pytest.fixture(scope="module")
def page(site: Site, browser: Browser) -> Iterator[Page]:
    """One for all: what is asked here changes nothing in it."""
    with watched_pages(browser) as open_page:
        yield open_page(site, "#/workflows")[0]


def ask(page: Page, module: str, name: str, *arguments: Any) -> Any:
    """Call an exported function, or read an exported value when there are no arguments."""
    script = """async ([module, name, given]) => {
      const found = (await import(`/assets/${module}.js`))[name];
      return typeof found === "function" ? found(...given) : found;
    }"""
    return page.evaluate(script, [module, name, list(arguments)])


def test_counts_rates_and_durations_are_written_in_one_way(page: Page) -> None:
    counts = {0: "0", 1234: "1,234", 9999: "9,999", 12_345: "12.3 k", 4_100_000: "4.1 M"}
    assert {n: ask(page, "format", "count", n) for n in counts} == counts
    durations = {0: "0 ms", 850: "850 ms", 1200: "1.2 s", 12_000: "12 s", 3 * MINUTE: "3 min", 2 * HOUR: "2 h"}
    durations |= {59_700: "1 min", 72 * HOUR: "3 d"}
    assert {ms: ask(page, "format", "duration", ms) for ms in durations} == durations
    assert ask(page, "format", "age", 1_000_000, 1_000_000 + 3 * MINUTE) == "3 min ago"
    assert ask(page, "format", "age", 1_000_000 + 2 * HOUR, 1_000_000) == "in 2 h"
    assert ask(page, "format", "rate", 5.5, "min") == "330/min"
    assert ask(page, "format", "rate", 0.25, "s") == "0.3/s"
    assert ask(page, "format", "count", None) == "\N{EN DASH}"


@pytest.mark.parametrize(
    ("top", "write"), [("roundUpCount", "count"), ("roundUp", "rateNumber"), ("roundUpTime", "duration")]
)
def test_the_marks_of_an_axis_are_where_they_say(top: str, write: str, page: Page) -> None:
    for value in (0, 0.004, 0.3, 0.7, 1, 1.2, 1.5, 2.6, 3, 5, 13, 47, 130):
        end = ask(page, "charts", top, value)
        assert value * 0.999 <= end <= max(value * 50, 2), value
        written = ask(page, "format", write, end / 2, "s")
        assert float(written.removesuffix(" ms")) == pytest.approx(end / 2), (value, written)


# What a queue looks like, its last minute in three steps (jobs in, completed and failed per second), the verdict.
JUDGED = [
    ({}, [(1, 1, 0)] * 3, ""),
    ({"waiting": 9, "oldest": 30_000}, [(1, 1, 0)] * 3, ""),
    ({"waiting": 9, "oldest": 90_000}, [(0, 0, 0)] * 3, "stuck"),
    ({"waiting": 9, "oldest": 90_000, "active": 2}, [(2, 1, 0)] * 3, "behind"),
    ({"waiting": 9, "oldest": 90_000, "active": 2}, [(1, 2, 0)] * 3, "late"),
    ({"waiting": 9, "oldest": 90_000, "paused": True}, [(1, 0, 1)] * 3, "paused"),
    ({}, [(3, 0, 3)] * 3, "failing"),
    ({}, [(3, 2, 1)] * 3, ""),
    ({}, [(0.05, 0, 0.05), (0, 0, 0), (0.05, 0, 0.05)], ""),  # two jobs in all
    ({}, [(0, 0, 0), (0, 0, 0), (0.15, 0.05, 0.15)], "failing"),
    ({"waiting": 9, "oldest": 90_000, "active": 1}, [(3, 0, 3)] * 3, "failing"),
    ({}, [(3, 0, 3)] * 3 + [(1, 1, 0)] * 3, ""),  # over
]


@pytest.mark.parametrize(("state", "steps", "trouble"), JUDGED)
def test_page_and_terminal_judge_queues_by_the_same_rules(
    state: dict[str, Any], steps: list[tuple[float, float, float]], trouble: str, page: Page
) -> None:
    pushed, out, failed = (list(values) for values in zip(*steps, strict=True))
    shown = {"name": "q", "waiting": 0, "active": 0, "paused": False, "oldest": None, "in": 0, "out": 0} | state
    script = """async ([row, series]) => {
      const { judge } = await import("/assets/health.js");
      return judge(row, { step: 20_000, queues: new Map([["q", series]]) }).trouble ?? "";
    }"""
    assert page.evaluate(script, [shown, {"in": pushed, "out": out, "failed": failed, "waiting": []}]) == trouble
    row = QueueRow(
        "q", shown["waiting"], 0, 0, shown["active"], 0, 0, shown["paused"], None, shown["oldest"], 0, 0, 0, None
    )
    series = HistorySeries(pushed, out, failed, [], [], [], [], [])
    queues = {"q": QueueSeries(pushed, out, failed, [])}
    history = HistoryView("1h", 20_000, 0, series, queues, {}, HistoryRates(0, 0, 0), 0)
    assert judge(row, history).trouble == trouble


ERRORS = [
    "",
    "host 12 timed out after 30.5 s",
    "no user 'ada' in \"eu-1\" or `us`",
    "job 0198f3c2-7b1a-7000-8e2b-3a5f6c7d8e9f is gone",
    "bad frame 0xDEADBEEF at 1,024:12",
    "commit 1a2b3c4d5e6f failed\nsecond line",
    "x" * 300,
]


@pytest.mark.parametrize("error", ERRORS)
def test_page_and_server_group_failures_by_the_same_signature(error: str, page: Page) -> None:
    assert ask(page, "format", "signature", error) == signature_of(first_line(error))


BUTTONS = {
    "remove": Verb.REMOVE,
    "stop": Verb.CANCEL,
    "cancel": Verb.CANCEL,
    "discard": Verb.BURY,
    "promote": Verb.PROMOTE,
    "retry": Verb.REVIVE,
    "again": Verb.REVIVE,
}


def test_buttons_offer_only_what_the_state_table_allows(page: Page) -> None:
    offered = ask(page, "job", "ALLOWED")
    states = {word: state for state, word in WORDS.items()} | {"prioritized": State.WAITING}
    assert set(offered) == set(states) - {"removed"}
    for word, buttons in offered.items():
        assert {BUTTONS[button] for button in buttons} <= set(NEXT[states[word]]), word


def bars(page: Page, **job: Any) -> list[tuple[str, str, float]]:
    usual = {"runAt": 0, "backoff": 1000, "backoffConfig": None}
    return [(row["label"], row["kind"], row["to"] - row["from"]) for row in ask(page, "job", "life", usual | job)]


def test_a_timeline_has_one_bar_per_wait_and_attempt(page: Page) -> None:
    timeline = [
        {"state": "waiting", "timestamp": 1000},
        {"state": "active", "timestamp": 1500},
        {"state": "failed", "timestamp": 1700, "error": "x", "attempt": 1},
        {"state": "waiting", "timestamp": 1700, "attempt": 2},
        {"state": "active", "timestamp": 9000},
        {"state": "completed", "timestamp": 9100},
    ]
    assert bars(page, state="completed", timeline=timeline, runAt=3900) == [
        ("waiting", "waiting", 500),
        ("attempt 1", "failed", 200),
        ("backoff", "delayed", 2200),
        ("waiting", "waiting", 5100),
        ("attempt 2", "completed", 100),
    ]


def test_a_backoff_whose_end_is_forgotten_is_shown_as_an_estimate(page: Page) -> None:
    timeline = [
        {"state": "waiting", "timestamp": 0},
        {"state": "active", "timestamp": 10},
        {"state": "failed", "timestamp": 20, "error": "x", "attempt": 1},
        {"state": "waiting", "timestamp": 20, "attempt": 2},
        {"state": "active", "timestamp": 10_020},
        {"state": "failed", "timestamp": 10_030, "error": "x", "attempt": 2},
    ]
    shown = bars(page, state="failed", timeline=timeline, runAt=99_999)
    assert shown[2:4] == [("backoff, about", "delayed", 2000), ("waiting", "waiting", 8000)]
    fixed = bars(page, state="failed", timeline=timeline, runAt=99_999, backoffConfig={"type": "fixed", "delay": 700})
    assert fixed[2] == ("backoff, about", "delayed", 700)


def test_a_stalled_attempt_and_the_wait_after_it_are_told_apart(page: Page) -> None:
    timeline = [
        {"state": "waiting", "timestamp": 0},
        {"state": "active", "timestamp": 10},
        {"state": "waiting", "timestamp": 5010, "error": "lock expired", "attempt": 2},
        {"state": "active", "timestamp": 5020},
        {"state": "completed", "timestamp": 5030},
    ]
    assert bars(page, state="completed", timeline=timeline)[1:3] == [
        ("attempt 1", "failed", 5000),
        ("after a stall", "waiting", 10),
    ]
