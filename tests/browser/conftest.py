"""A real Chromium in front of a real server.

Every page is watched while a test runs: errors on the console, exceptions, breaches of the content security policy and
requests to other hosts fail the test at its end (`Watch`). Tests that break the server on purpose say what they expect.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.ports import free_port
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

DESKTOP = {"width": 1280, "height": 900}
TABLET = {"width": 1024, "height": 768}
PHONE = {"width": 390, "height": 844}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]

START_LIMIT_MS = 90_000
"""A browser that was never read from this disk takes its time, at the very beginning of the suite."""

expect.set_options(timeout=15_000)


class Site(ServerProcess):
    """A server with its dashboard."""

    def __init__(self, data_path: Path, *flags: str) -> None:
        self.http_port = free_port()
        super().__init__(data_path, "--http-port", str(self.http_port), *flags)

    def url(self, place: str = "#/") -> str:
        return f"http://127.0.0.1:{self.http_port}/{place}"


class Watch:
    """What went wrong in a page."""

    def __init__(self, page: Page, origin: str) -> None:
        self.problems: list[str] = []
        self.bytes = 0
        self._origin = origin
        self._is_allowed: Callable[[str], bool] = lambda _: False
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("request", self._request)

    def allow(self, *parts: str) -> None:
        """Console errors with one of these texts are part of the test."""
        self._is_allowed = lambda text: any(part in text for part in parts)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not self._is_allowed(message.text):
            self.problems.append(f"{message.type}: {message.text}")

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self._origin, "data:", "blob:")):
            self.problems.append(f"request to another host: {request.url}")


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    # Ends with the package: while it lives, no other event loop can run in this thread.
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "Chromium is missing: `make setup` installs it, or install the package chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=START_LIMIT_MS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(Path(tmp_path_factory.mktemp("site")) / "headrace.db") as running:
        assert isinstance(running, Site)
        yield running


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with site.client() as connected:
        yield connected


@pytest.fixture
def queue(site: Site, client: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A queue of the test's own with a name of usual length; gone afterwards, so that tables stay short."""
    name = f"q{zlib.crc32(request.node.nodeid.encode()):08x}"
    yield name
    client.ok("Obliterate", queue=name)


OpenPage = Callable[..., tuple[Page, Watch]]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """open_page(site, place, **options of the browser context) -> page and its watch."""
    with watched_pages(browser) as open_it:
        yield open_it


@contextmanager
def watched_pages(browser: Browser) -> Iterator[OpenPage]:
    """Pages that are closed at the end, when nothing may have gone wrong in them."""
    opened: list[tuple[Page, Watch]] = []

    def open_it(site: Site, place: str = "#/", **options: Any) -> tuple[Page, Watch]:
        page = browser.new_page(**({"viewport": DESKTOP} | options))
        watch = Watch(page, f"http://127.0.0.1:{site.http_port}/")
        opened.append((page, watch))
        page.goto(site.url(place))
        return page, watch

    yield open_it
    for page, _ in opened:
        page.close()
    assert [problem for _, watch in opened for problem in watch.problems] == []
