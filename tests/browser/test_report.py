"""The report of the data pipeline, linked from the dashboard when `headrace serve --report` has one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import OpenPage, Site
from tests.http.webserver import WebServer
from tests.pipeline.test_report import ERRORS, WORKERS, fact, lake_of, report_of, write

PAGE = "<!doctype html><title>r</title><style>h1 { color: rgb(1, 2, 3) }</style><h1>4 queues</h1>"


def test_the_dashboard_links_to_the_report_once_there_is_one(open_page: OpenPage, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    with Site(tmp_path / "shown.db", "--report", str(report)) as site:
        assert isinstance(site, Site)
        page, _ = open_page(site)
        expect(page.get_by_role("link", name="Workers")).to_be_visible()
        expect(page.get_by_role("link", name="Report")).to_have_count(0)
        report.write_text(PAGE)
        page.reload()
        with page.context.expect_page() as opened:
            page.get_by_role("link", name="Report").click()
        heading = opened.value.get_by_role("heading", name="4 queues")
        expect(heading).to_have_css("color", "rgb(1, 2, 3)")
        page.close()


def test_the_report_is_for_those_who_have_a_token(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text(PAGE)
    with WebServer(":memory:", "--auth-tokens", "sesame", "--report", str(report)) as guarded:
        with guarded.http() as stranger:
            assert stranger.get("/report").status == 401
        with guarded.http("sesame") as known:
            answer = known.get("/report")
            assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("width", [1280, 1024, 390])
def test_all_that_the_bar_may_hold_fits_the_screen(open_page: OpenPage, tmp_path: Path, width: int) -> None:
    report = tmp_path / "report.html"
    report.write_text(PAGE)
    with Site(tmp_path / "shown.db", "--auth-tokens", "sesame", "--report", str(report)) as site:
        assert isinstance(site, Site)
        page, watch = open_page(site, viewport={"width": width, "height": 800})
        watch.allow("401")
        page.get_by_label("Token").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="Report")).to_be_visible()
        expect(page.get_by_role("button", name="Sign out")).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_long_names_do_not_make_the_report_wider_than_the_page(browser: Browser, tmp_path: Path, width: int) -> None:
    at, name = datetime(2026, 3, 29, tzinfo=UTC), "x" * 256
    lake = lake_of(tmp_path, [fact(at, name, added=500, started=100, failed_attempts=9, run_n=100, backlog_end=400)])
    seen = {"window_start": at, "count": 1, "first_seen": at, "last_seen": at}
    error = {"queue": name, "signature": "e" * 300, "sample_error": "E", "sample_job_id": "j", **seen}
    write(lake, "gold/error_signature_hour/window_date=2026-03-29", ERRORS, [error])
    worker = {"worker": name, "window_start": at, "busy_ms": 10, "slots": 1}
    write(lake, "gold/worker_minute/window_date=2026-03-29", WORKERS, [worker])
    report_of(lake)
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.close()


def test_a_report_that_is_printed_from_a_dark_screen_is_dark_on_light(browser: Browser, tmp_path: Path) -> None:
    report_of(lake_of(tmp_path, [fact(datetime(2026, 3, 29, tzinfo=UTC), added=1)]))
    page = browser.new_page(color_scheme="dark")
    page.goto((tmp_path / "report.html").as_uri())
    colour = "getComputedStyle(document.body).color"
    assert page.evaluate(colour) == "rgb(236, 234, 230)"
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(colour) == "rgb(27, 28, 30)"
    page.close()
