"""The sections of a report as PNG files, for chats and slides: taken by a headless Chromium, through playwright."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from headrace.errors import HeadraceError

_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")
_WIDTH: Final = 1280


def take_pictures(report: Path, folder: Path) -> list[Path]:
    """One picture per section of the report, named after its heading."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise HeadraceError("pictures need playwright: pip install playwright, and the program chromium") from None
    browser_path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser_path is None:
        raise HeadraceError("pictures need the program chromium (or google-chrome): install it, or leave out --png")
    folder.mkdir(parents=True, exist_ok=True)
    taken = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": 900}, device_scale_factor=2)
        page.goto(report.absolute().as_uri())
        for number, section in enumerate(page.locator("main > section").all(), 1):
            path = folder / f"{number:02}-{_file_name(section.locator('h2').inner_text())}.png"
            section.screenshot(path=path)
            taken.append(path)
        browser.close()
    return taken


def _file_name(heading: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
