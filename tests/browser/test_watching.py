"""Watching: numbers move, trouble is on top, failures can be read; on a desk and on a phone, in light and dark."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Response, expect

from tests.browser.conftest import DESKTOP, PHONE, TABLET, OpenPage, Site, Watch
from tests.http.test_asgi import Site as MountedSite
from tests.wireclient import Client

STACK = ["Error: mail server refused", "at send (mailer.js:10:5)", "at handle (worker.js:3:1)"]


def push(client: Client, queue: str, count: int = 1, **fields: Any) -> list[str]:
    fields = {"data": {"to": "ada@example.com"}, "name": "welcome"} | fields
    return [str(client.ok("PUSH", queue=queue, **fields)["id"]) for _ in range(count)]


def fail_one(client: Client, queue: str, error: str = "mail server refused", **fields: Any) -> str:
    """A job that has failed for good."""
    push(client, queue, maxAttempts=1, **fields)
    pulled = client.ok("PULL", queue=queue, timeout=2000)
    job_id = str(pulled["job"]["id"])
    client.ok("FAIL", id=job_id, error=error, stack=STACK, token=pulled.get("token"))
    return job_id


def row(page: Page, text: str) -> Any:
    return page.locator("tr[data-row]").filter(has_text=text)


def test_an_empty_server_shows_the_lines_that_fill_it(open_page: OpenPage, tmp_path: Any) -> None:
    with Site(tmp_path / "empty.db") as empty:
        assert isinstance(empty, Site)
        page, _ = open_page(empty, "#/workers")
        expect(page.locator(".notice pre")).to_have_text("headrace worker shop.jobs:app")
        page.goto(empty.url())
        expect(page.get_by_role("heading", name="No queues yet")).to_be_visible()
        subprocess.run(["bash", "-c", page.locator("pre").inner_text()], check=True, timeout=60)
        expect(row(page, "mail")).to_be_visible()
        page.close()  # a page that outlives its server complains about that


def test_numbers_move_without_a_reload(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    push(client, queue, 3)
    page, _ = open_page(site)
    waiting = row(page, queue).locator("td[data-label=Waiting] .figure")
    expect(waiting).to_have_text("3")
    page.evaluate("window.isTheSamePage = true")
    push(client, queue, 4)
    expect(waiting).to_have_text("7")
    client.ok("PULL", queue=queue, timeout=0)
    expect(row(page, queue).locator("td[data-label=Running]")).to_have_text("1")
    assert page.evaluate("window.isTheSamePage")


def test_events_drive_the_page_faster_than_the_clock(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue)
    page, _ = open_page(site)
    page.clock.install()
    page.reload()
    waiting = row(page, queue).locator("td[data-label=Waiting] .figure")
    expect(waiting).to_have_text("1")
    page.clock.pause_at(datetime.now() + timedelta(hours=1))
    for expected in range(2, 6):
        push(client, queue)
        move_clock_until(page, waiting, str(expected), 4_000)  # by the clock alone it asks every 5 seconds


def move_clock_until(page: Page, figure: Locator, text: str, most_ms: int) -> None:
    """Let time pass in the page, which has a clock of its own, until the text is there, however long that takes."""
    for _ in range(most_ms // 250):
        page.clock.run_for(250)
        with suppress(AssertionError):
            expect(figure).to_have_text(text, timeout=1_000)
            return
    raise AssertionError(f"{text} did not come within {most_ms} ms of the page")


def test_the_sentence_names_the_queue_in_trouble(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    now = client.ok("Ping")["data"]["time"]
    push(client, queue, 2, timestamp=now - 900_000)
    page, _ = open_page(site)
    sentence = page.locator("#state")
    expect(sentence).to_contain_text(queue)
    expect(sentence).to_contain_text("15 min")
    expect(page.locator("tr[data-row]").first).to_contain_text(queue)
    client.ok("Drain", queue=queue)
    expect(sentence).to_contain_text("All queues are keeping up.")


def test_the_sentence_knows_of_a_lone_job_among_very_many_queues(open_page: OpenPage, tmp_path: Path) -> None:
    with Site(tmp_path / "many.db") as many, many.client() as client:
        assert isinstance(many, Site)
        for number in range(105):
            client.ok("PUSHB", queue=f"busy-{number}", jobs=[{"data": 1}] * 2)
        push(client, "forgotten", timestamp=client.ok("Ping")["data"]["time"] - 900_000)
        page, _ = open_page(many)
        sentence = page.locator("#state")
        expect(sentence).to_contain_text("forgotten is stuck: 1 waiting")
        client.ok("Drain", queue="forgotten")
        expect(sentence).to_have_text(re.compile("All queues are keeping up. 210 waiting, 0 running"))
        page.close()  # a page that outlives its server complains about that


def test_charts_share_the_moment_that_is_pointed_at(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue, 5)
    page, _ = open_page(site)
    charts = page.locator("svg.chart")
    expect(charts).to_have_count(3)
    charts.first.hover()
    expect(page.locator(".moment")).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
    expect(page.locator("svg.chart line.pointer")).to_have_count(3)


def test_from_the_overview_to_the_stack_trace_in_one_click_and_the_retry_beside_it(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    job_id = fail_one(client, queue, f"mail server refused in {queue}")
    page, _ = open_page(site)
    row(page, f"mail server refused in {queue}").get_by_role("link").first.click()
    expect(page.locator("h1")).to_contain_text("welcome")
    expect(page.locator(".error-text")).to_contain_text(f"mail server refused in {queue}")
    expect(page.locator(".error-text")).to_contain_text("at send (mailer.js:10:5)")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("h1 .state")).to_have_text(re.compile("waiting"))
    assert client.ok("GetState", id=job_id)["state"] == "waiting"


def test_a_page_remembers_no_failures_but_those_it_shows(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    page, _ = open_page(site, "#/workflows")
    look = """async (total) => {
      const { latestFailures } = await import("/assets/failures.js");
      window.ctx ??= { ui: {} };
      const groups = await latestFailures(window.ctx, total);
      return [groups.map((found) => found.newest.id), [...window.ctx.ui.newest.keys()]];
    }"""
    for total in range(1, 5):
        newest = fail_one(client, queue, f"{queue} failed {total} times")
        shown, remembered = page.evaluate(look, total)
        assert shown[0] == newest
        assert remembered == shown


def test_a_job_page_draws_each_attempt_and_shows_data_result_and_log(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    (job_id,) = push(client, queue, data={"order": {"lines": [1, 2]}}, maxAttempts=2, backoff=1)
    for answer in ("FAIL", "ACK"):
        pulled = client.ok("PULL", queue=queue, timeout=5000, owner="mailer-7")
        said = {"error": "first try failed"} if answer == "FAIL" else {"result": {"sent": True}}
        client.ok("AddLog", id=job_id, message=f"{answer} comes next")
        client.ok(answer, id=job_id, token=pulled.get("token"), **said)
    page, _ = open_page(site, f"#/job/{job_id}")
    expect(page.locator("svg.gantt")).to_contain_text(re.compile("waiting.*attempt 1.*backoff.*attempt 2", re.DOTALL))
    expect(page.locator("svg.gantt title").filter(has_text="by mailer-7")).to_have_count(2)
    expect(page.locator("svg.gantt rect.failed")).to_have_count(1)
    expect(page.locator("svg.gantt rect.completed")).to_have_count(1)
    expect(page.locator(".tree").first).to_contain_text("order")
    expect(page.locator(".tree").nth(1)).to_contain_text("sent: true")
    expect(page.locator(".logs tbody tr")).to_have_count(2)
    client.ok("AddLog", id=job_id, message="a late line", level="warn")
    expect(page.locator(".logs tbody tr").last).to_contain_text("a late line")
    page.get_by_role("button", name="Raw").first.click()
    expect(page.locator("pre.code:not(.error-text)").first).to_contain_text('"lines"')
    expect(page.get_by_role("button", name="Run again")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)


def test_a_family_is_a_tree_with_states(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    children = [f"{queue}-child-{n}" for n in range(2)]
    parent = f"{queue}-parent"
    entries = [
        {"id": c, "queue": queue, "input": {"name": f"step {i}", "data": {"__parentId": parent}, "parentId": parent}}
        for i, c in enumerate(children)
    ]
    entries.append(
        {
            "id": parent,
            "queue": queue,
            "input": {"name": "whole", "data": {}, "childrenIds": children, "dependsOn": children},
        }
    )
    for entry in entries[:2]:
        entry["input"]["data"]["__parentQueue"] = queue  # type: ignore[index]
    entries[2]["input"]["data"] = {"__childrenIds": children}  # type: ignore[index]
    client.ok("PUSHF", jobs=entries)
    page, _ = open_page(site, f"#/job/{children[0]}")
    expect(page.locator(".family > li > .state")).to_contain_text("waiting for children")
    expect(page.locator(".family li li")).to_have_count(2)
    page.locator(".family").get_by_role("link", name="whole").click()
    expect(page.locator("h1")).to_contain_text("whole")


def test_jobs_are_found_by_state_text_and_id(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    for n in range(30):
        push(client, queue, data={"customer": f"customer-{n}"})
    (delayed,) = push(client, queue, name="later", delay=3_600_000)
    page, _ = open_page(site, f"#/queue/{queue}")
    rows = page.locator("tr[data-row]")
    expect(rows).to_have_count(25)
    page.get_by_role("link", name="older →").click()
    expect(rows).to_have_count(6)
    page.get_by_role("link", name=re.compile("^delayed")).click()
    expect(rows).to_contain_text(["later"])
    page.get_by_role("link", name=re.compile("^all")).click()
    page.get_by_label("Search the jobs of this queue").fill("customer-17")
    expect(rows).to_contain_text(["customer: customer-17"])  # a list: these rows and no others
    page.get_by_label("Search the jobs of this queue").fill("customer-")
    expect(page.locator(".pager")).to_contain_text("25 jobs found")
    page.get_by_role("link", name="Search older jobs →").click()
    expect(rows).to_have_count(5)
    expect(rows.last).to_contain_text("customer: customer-0")
    page.get_by_label("Search the jobs of this queue").fill("nobody")
    expect(page.get_by_role("heading", name="Nothing matches")).to_be_visible()
    expect(page.locator(".notice")).to_contain_text("Searched 31 jobs")
    page.get_by_role("search").get_by_role("searchbox").fill(delayed)
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Jobs")
    expect(rows).to_contain_text(["later"])


def test_a_search_in_all_queues_does_not_pass_off_what_it_shows_as_all_there_is(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    client.ok("PUSHB", queue=queue, jobs=[{"data": {"customer": f"{queue}-{n}"}} for n in range(120)])
    page, _ = open_page(site, f"#/jobs?find={queue}-")
    expect(page.locator("tr[data-row]")).to_have_count(50)
    expect(page.locator("main")).to_contain_text("The newest 50 that match")
    page.get_by_label("Search jobs").fill(f"{queue}-11")
    expect(page.locator("main")).to_contain_text("11 found")


def test_schedules_and_workers_are_listed(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    client.ok("Cron", name=f"{queue}-nightly", queue=queue, schedule="0 3 * * *", data={})
    client.ok("RegisterWorker", name="mailer", queues=[queue], concurrency=5, hostname="host-1", pid=7)
    page, _ = open_page(site, "#/schedules")
    expect(row(page, f"{queue}-nightly")).to_contain_text("0 3 * * *")
    expect(row(page, f"{queue}-nightly").locator("td[data-label='Next run']")).to_contain_text(
        re.compile(r"in .*then in .*, in ")
    )
    client.ok("Cron", name=f"{queue}-often", queue=queue, repeatEvery=100, data={"a": 1})
    ran = client.ok("PULL", queue=queue, timeout=5000)["job"]["id"]
    client.ok("CronDelete", name=f"{queue}-nightly")
    client.ok("FAIL", id=ran, error="no luck", unrecoverable=True)
    last_runs = row(page, f"{queue}-often").locator("td[data-label='Last runs']")
    expect(last_runs.get_by_role("link", name=re.compile("failed")).first).to_have_attribute("href", f"#/job/{ran}")
    expect(last_runs).to_contain_text("now")
    client.ok("CronDelete", name=f"{queue}-often")
    page.get_by_role("link", name="Workers").click()
    expect(row(page, queue)).to_contain_text("host-1, pid 7")
    page.get_by_role("link", name="Workflows").click()
    expect(page.get_by_role("heading", name="No workflow has run on this server")).to_be_visible()
    expect(page.locator(".notice pre")).to_contain_text("flows.execute(")


PLACES = ["#/", "#/queues", "#/jobs", "#/failures", "#/schedules", "#/workers", "#/workflows"]


@pytest.mark.parametrize("size", [DESKTOP, TABLET, PHONE], ids=["desktop", "tablet", "phone"])
def test_every_place_fits_the_screen_and_is_readable_in_both_schemes(
    size: dict[str, int], site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    job_id = fail_one(client, queue, "a message " + "that-is-long-and-has-no-place-to-break" * 4)
    client.ok("Pause", queue=queue)
    push(client, queue, 2, data={"text": "x" * 300})
    lengthy = f"{queue}.{'a-name-as-long-as-allowed' * 10}"[:256]
    push(client, lengthy)
    page, _ = open_page(site, viewport=size, reduced_motion="reduce")  # colours change at once
    for place in [*PLACES, f"#/queue/{queue}", f"#/job/{job_id}", f"#/queue/{lengthy}"]:
        page.goto(site.url(place))
        expect(page.locator("h1")).to_be_attached()
        expect(page.locator(".loading")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, place
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(FAINT_TEXTS) == [], (place, scheme)
    page.screenshot()
    page.get_by_role("button", name="Limits").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.get_by_role("dialog").evaluate("box => box.scrollWidth - box.clientWidth") <= 0
    client.ok("Obliterate", queue=lengthy)


def test_the_error_of_a_queue_with_a_long_name_is_readable(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    lengthy = f"{queue}.{'a-name-as-long-as-allowed' * 10}"[:256]
    fail_one(client, lengthy, "the post office is closed today")
    page, _ = open_page(site, "#/failures")
    error = page.locator("summary .error", has_text="the post office is closed")
    expect(error).to_be_visible()
    assert error.evaluate("text => text.scrollWidth <= text.clientWidth")
    client.ok("Obliterate", queue=lengthy)


# Texts whose contrast to their ground is below 4.5 to 1.
FAINT_TEXTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const read = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = read(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const isUnseen = !node.checkVisibility() || node.closest(".hidden, :disabled, noscript, option");
    if (isUnseen || !walker.currentNode.data.trim()) continue;
    const style = getComputedStyle(node);
    const [a, b] = [light(read(node.closest("svg") ? style.fill : style.color)), light(ground(node))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(`${contrast.toFixed(2)}: ${walker.currentNode.data.slice(0, 40)}`);
  }
  return found;
}"""


def test_a_phone_shows_one_chart_at_a_time(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    push(client, queue)
    page, _ = open_page(site, viewport=PHONE)
    expect(page.locator("figure")).to_have_count(1)
    page.get_by_role("button", name="Failures").click()
    expect(page.locator("figcaption")).to_contain_text("Failures")


def test_the_first_paint_is_light_and_an_idle_page_is_quiet(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue)
    page, _ = open_page(site, "#/nowhere-yet")
    sizes: list[int] = []

    def weigh(response: Response) -> None:
        follows_the_first_paint = "/dashboard/" in response.url or "/jobs/" in response.url
        sizes.append(0 if follows_the_first_paint else int(response.headers.get("content-length", 0)))

    page.goto("about:blank")  # nothing of the page before is counted
    page.on("response", weigh)
    page.goto(site.url("#/"))
    expect(page.locator("#state")).to_be_visible()
    assert 40_000 < sum(sizes) < 100_000
    expect(page.locator("svg.spark").first).to_be_attached()
    frames = page.evaluate(CHANGES_IN_THREE_SECONDS)
    assert frames <= 12  # four a second


# How often the page changed its own content, counted per frame.
CHANGES_IN_THREE_SECONDS = """() => new Promise((resolve) => {
  const frames = new Set();
  let frame = 0;
  const next = () => { frame += 1; requestAnimationFrame(next); };
  requestAnimationFrame(next);
  const everything = { subtree: true, childList: true, characterData: true, attributes: true };
  new MutationObserver(() => frames.add(frame)).observe(document.body, everything);
  setTimeout(() => resolve(frames.size), 3000);
})"""


def test_motion_is_left_out_for_those_who_do_not_want_it(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue)
    page, _ = open_page(site, reduced_motion="reduce")
    figure = row(page, queue).locator("td[data-label=Waiting] [data-live]")
    expect(figure).to_have_text("1")
    page.evaluate("() => { window.moves = 0; Element.prototype.animate = () => { window.moves += 1; }; }")
    push(client, queue)
    expect(figure).to_have_text("2")
    assert page.evaluate("window.moves") == 0


def test_a_dashboard_that_an_application_has_mounted_works_below_its_path(browser: Browser) -> None:
    with MountedSite(None, is_apart=False) as mounted, mounted.http() as http:
        http.ok("POST", "/queue/queues/mounted/jobs", {"data": 1})
        page = browser.new_page(viewport=DESKTOP)
        watch = Watch(page, f"http://127.0.0.1:{mounted.http_port}/queue/")
        page.goto(f"http://127.0.0.1:{mounted.http_port}/queue")
        expect(row(page, "mounted").locator("td[data-label='Waiting']")).to_contain_text("1")
        http.ok("POST", "/queue/queues/mounted/jobs", {"data": 2})
        expect(row(page, "mounted").locator("td[data-label='Waiting']")).to_contain_text("2")
        page.goto(f"http://127.0.0.1:{mounted.http_port}/queue/docs")
        expect(page.get_by_role("heading", name="Dashboard")).to_be_visible()
        page.close()
        assert [problem for problem in watch.problems if not problem.endswith("/queue")] == []


def test_lists_show_jobs_whatever_they_carry(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    portrait = {"of": "Ada", "image": "x" * 3_000_000}
    for _ in range(12):
        fail_one(client, queue, data=portrait)
    push(client, queue, 13, data=portrait)
    page, _ = open_page(site, f"#/queue/{queue}")
    expect(page.locator("tr[data-row]")).to_have_count(25)
    expect(row(page, "of: Ada")).to_have_count(13)
    # One search looks through 64 MB.
    for asked, found in (("", 25), ("&state=failed", 12), ("&find=portrait", 0), ("&find=Ada", 23)):
        page.goto(site.url(f"#/jobs?queue={queue}{asked}"))
        expect(page.locator("tr[data-row]")).to_have_count(found)
    page.goto(site.url(f"#/failures?queue={queue}"))
    expect(page.locator("details.group")).to_contain_text("12 jobs")
    expect(row(page, "of: Ada").first).to_be_visible()
    page.goto(site.url())
    expect(row(page, "mail server refused").locator(".excerpt")).to_contain_text("of: Ada")


def test_queues_that_no_path_can_name_do_not_hide_the_others(open_page: OpenPage, tmp_path: Path) -> None:
    with Site(tmp_path / "dots.db") as own, own.client() as client:
        for name in (".", "..", "mail", "__proto__"):
            fail_one(client, name, name=f"job of {name}")
        page, _ = open_page(own, "#/jobs")
        expect(page.locator("tr[data-row]")).to_have_count(2)
        page.goto(own.url("#/failures"))
        expect(page.locator("details.group")).to_contain_text("2 jobs")
        expect(row(page, "job of mail")).to_be_visible()
        page.close()


def test_a_queue_in_which_nothing_happens_says_so(open_page: OpenPage, tmp_path: Any) -> None:
    quiet = Site(tmp_path / "quiet.db")
    with quiet, quiet.client() as client:
        push(client, "imports")
    with quiet:  # figures begin with the server
        page, _ = open_page(quiet, "#/queue/imports")
        expect(page.locator(".chart-empty").first).to_have_text("No job has come or gone in the last hour.")
        page.close()


def test_what_is_wrong_with_a_queue_is_not_cut_on_a_phone(open_page: OpenPage, tmp_path: Any) -> None:
    with Site(tmp_path / "stuck.db") as site:
        assert isinstance(site, Site)
        with site.client() as client:
            long_ago = client.ok("Ping")["data"]["time"] - 600_000
            push(client, "newsletter-weekly", timestamp=long_ago)
        page, _ = open_page(site, "#/queues", viewport=PHONE)
        cell = row(page, "newsletter-weekly").locator("td.main")
        expect(cell).to_contain_text("stuck")
        assert cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
        page.close()
