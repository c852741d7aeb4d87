"""The page of workflows: the list, and a compensated run as a picture."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from playwright.sync_api import expect

from headrace.errors import WorkflowCancelledError, WorkflowError
from headrace.propagation import Retry
from headrace.workflows import Workflows, step, workflow
from headrace.workflows.testing import Saga, define
from tests.browser.conftest import PHONE, OpenPage, Site


def run_flow(site: Site, saga: Saga, flow_id: str) -> None:
    """In a thread of its own: the browser has the loop of this one."""

    async def run() -> None:
        flows = Workflows(f"headrace://127.0.0.1:{site.port}", default_retry=Retry(2, backoff="fixed", delay=0.05))
        saga.join(flows)
        async with flows:
            handle = await flows.execute(saga.definition, None, id=flow_id)
            with contextlib.suppress(WorkflowError):
                await handle.result(20)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


class Crew:
    """Workers of a workflow that goes on while the browser looks, in a thread of their own."""

    def __init__(self, site: Site, saga: Saga, *flow_ids: str) -> None:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(site, saga, flow_ids)))
        self.ends: dict[str, Any] = {}

    async def _run(self, site: Site, saga: Saga, flow_ids: tuple[str, ...]) -> None:
        flows = Workflows(f"headrace://127.0.0.1:{site.port}")
        saga.join(flows)
        async with flows:
            for handle in [await flows.execute(saga.definition, None, id=flow_id) for flow_id in flow_ids]:
                try:
                    self.ends[handle.id] = await handle.result(20)
                except WorkflowError as error:
                    self.ends[handle.id] = error

    def __enter__(self) -> Crew:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def test_a_flow_is_signalled_and_another_one_cancelled_from_its_page(site: Site, open_page: OpenPage) -> None:
    definition = workflow("shown-approval").step(step("reserve")).wait("approved").build()
    saga = Saga(definition)
    with Crew(site, saga, "approve-1", "approve-2") as crew:
        page, _ = open_page(site, "#/workflows/approve-1")
        page.get_by_role("button", name="Signal approved").click()
        page.get_by_label("Payload (JSON)").fill("not json")
        page.get_by_role("button", name="Send signal").click()
        expect(page.get_by_text("That is not JSON")).to_be_visible()
        page.get_by_label("Payload (JSON)").fill('{"by": "ada"}')
        page.get_by_role("button", name="Send signal").click()
        expect(page.locator("h1")).to_contain_text("completed")
        expect(page.get_by_role("button", name="Cancel flow")).to_have_count(0)

        page, _ = open_page(site, "#/workflows/approve-2")
        page.get_by_role("button", name="Cancel flow").click()
        page.get_by_role("dialog").get_by_role("button", name="Cancel flow").click()
        expect(page.locator("h1")).to_contain_text("cancelled")
        expect(page.locator(".plan")).to_contain_text("rolled back")
        expect(page.locator(".plan")).to_contain_text("cut short")
        expect(page.locator(".plan")).not_to_contain_text("waits for its signal")
        expect(page.locator(".error-text")).to_contain_text("The flow was cancelled")
    assert crew.ends["approve-1"]["approved"] == {"by": "ada"}
    assert isinstance(crew.ends["approve-2"], WorkflowCancelledError)
    assert saga.calls.count("undo reserve") == 1


def test_a_compensated_flow_is_drawn_with_its_rollbacks(site: Site, open_page: OpenPage) -> None:
    saga = Saga(define("reserve", ["charge", "pack"], "ship", "tell", name="shown-order"), failing={"ship": 9})
    run_flow(site, saga, "shown-1")
    page, _ = open_page(site, "#/workflows")
    expect(page.get_by_role("cell", name="shown-order")).to_be_visible()
    page.get_by_role("link", name="shown-1").click()
    expect(page.get_by_role("heading", name="shown-1")).to_be_visible()
    labels = page.locator(".gantt .name")
    expect(labels).to_have_count(8)
    texts = labels.all_text_contents()
    steps = page.locator(".plan ul > li")
    assert [text.replace("↩", "").replace("✕", "").replace("·", "") for text in steps.all_text_contents()] == [
        "reserverolled back", "chargerolled back", "packrolled back", "shipfailed", "tellnot reached",
    ]  # fmt: skip
    assert texts[0] == "reserve"
    assert texts[3:5] == ["ship", "ship"]
    assert texts[-1] == "↩ reserve"
    assert set(texts[5:7]) == {"↩ charge", "↩ pack"}
    expect(page.locator(".error-text")).to_contain_text("The step ship failed\nTraceback")
    expect(page.get_by_text("headrace flow retry shown-1")).to_be_visible()
    log = page.locator("section").filter(has=page.get_by_role("heading", name="Log"))
    expect(log.get_by_role("row").filter(has_text="reserve").first).to_contain_text("reserve done")
    expect(log.get_by_role("row").filter(has_text="attempt failed").first).to_contain_text("ValueError: ship failed")


def test_long_names_of_steps_fit_a_phone_and_stay_clear_of_the_bars(site: Site, open_page: OpenPage) -> None:
    saga = Saga(define("reserve-" + "x" * 80, "ship", name="lengthy-order"), failing={"ship": 9})
    flow_id = "lengthy-" + "z" * 60
    run_flow(site, saga, flow_id)
    page, _ = open_page(site, f"#/workflows/{flow_id}", viewport=PHONE)
    label, bar = page.locator(".gantt .name").first, page.locator(".gantt rect").first
    expect(label).to_contain_text("…")
    start, end = bar.bounding_box(), label.bounding_box()
    assert start is not None
    assert end is not None
    assert end["x"] + end["width"] <= start["x"]
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
