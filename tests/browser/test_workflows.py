"""The page of workflows: the list, and a compensated run as a picture."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from playwright.sync_api import expect

from headrace.errors import WorkflowError
from headrace.propagation import Retry
from headrace.workflows import Workflows
from headrace.workflows.testing import Saga, define
from tests.browser.conftest import OpenPage, Site


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
    expect(page.locator(".error-text")).to_contain_text("ship failed")
