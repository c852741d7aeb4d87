"""The report of the data pipeline, linked from the dashboard when `headrace serve --report` has one."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import OpenPage, Site
from tests.http.webserver import WebServer

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
