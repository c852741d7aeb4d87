"""Acting: pause, limits, retry, remove after one question; by mouse and keyboard; signing in; a server that goes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import expect

from tests.browser.conftest import OpenPage, Site
from tests.browser.test_watching import fail_one, push, row
from tests.valkeyserver import ValkeyServer
from tests.wireclient import Client


def test_a_queue_is_paused_and_resumed_where_one_looks(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue)
    page, _ = open_page(site)
    line = row(page, queue)
    line.get_by_role("button", name="Pause").click()
    expect(line.locator(".state.paused")).to_be_visible()
    assert client.ok("IsPaused", queue=queue)["paused"] is True
    line.get_by_role("button", name="Resume").click()
    expect(line.locator(".state.paused")).to_have_count(0)
    assert client.ok("IsPaused", queue=queue)["paused"] is False


def test_draining_asks_once_and_says_how_many(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    push(client, queue, 12)
    page, _ = open_page(site, f"#/queue/{queue}")
    page.get_by_role("button", name="Remove waiting").click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text(f"Remove 12 waiting and delayed jobs of {queue}?")
    question.get_by_role("button", name="Keep").click()
    assert client.ok("Count", queue=queue)["count"] == 12
    page.get_by_role("button", name="Remove waiting").click()
    question.get_by_role("button", name="Remove 12 jobs").click()
    expect(page.locator(".toast")).to_contain_text("12")
    assert client.ok("Count", queue=queue)["count"] == 0


def test_delayed_jobs_run_before_their_time_after_one_question(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue, 4, delay=3_600_000)
    page, _ = open_page(site, f"#/queue/{queue}")
    page.get_by_role("button", name="Run 4 delayed now").click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text(f"Run 4 delayed jobs of {queue} now?")
    question.get_by_role("button", name="Keep").click()
    assert client.ok("GetJobCounts", queue=queue)["counts"]["delayed"] == 4
    page.get_by_role("button", name="Run 4 delayed now").click()
    question.get_by_role("button", name="Run 4 jobs").click()
    expect(page.locator(".toast")).to_contain_text("4 jobs ready")
    assert client.ok("GetJobCounts", queue=queue)["counts"]["waiting"] == 4


def test_completed_jobs_are_cleaned_after_one_question(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue, 3)
    for _ in range(3):
        pulled = client.ok("PULL", queue=queue, timeout=1000)
        client.ok("ACK", id=pulled["job"]["id"], token=pulled.get("token"))
    page, _ = open_page(site, f"#/queue/{queue}?state=completed")
    expect(page.locator("tr[data-row]")).to_have_count(3)
    page.get_by_role("button", name="Remove completed").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove 3 jobs").click()
    expect(page.locator("tr[data-row]")).to_have_count(0)
    assert client.ok("GetJobCounts", queue=queue)["counts"]["completed"] == 0


def test_each_limit_is_set_and_lifted_by_itself(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    push(client, queue)
    client.ok("RateLimit", queue=queue, limit=9, duration=1000)
    page, _ = open_page(site, f"#/queue/{queue}")
    page.get_by_role("button", name="Limits").click()
    page.get_by_label("Jobs running at once").fill("4")
    page.get_by_role("dialog").get_by_role("button", name="Set").first.click()
    expect(page.locator(".toast").first).to_be_visible()
    expect(page.get_by_role("dialog").get_by_label("Jobs", exact=True)).to_have_value("9")
    limits = client.ok("GetQueueLimits", queue=queue)["data"]["limits"]
    assert limits["concurrencyLimit"] == 4
    assert limits["rateLimit"]["max"] == 9
    page.get_by_role("dialog").get_by_role("button", name="No limit").first.click()
    expect(page.locator(".toast")).to_have_count(2)
    assert client.ok("GetQueueLimits", queue=queue)["data"]["limits"]["concurrencyLimit"] is None


def test_failures_are_grouped_by_error_selected_and_retried(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    alike = [fail_one(client, queue, f"host {n} timed out after {n} s") for n in (1, 2, 3)]
    other = fail_one(client, queue, "disk is full")
    page, _ = open_page(site, f"#/failures?queue={queue}")
    groups = page.locator("details.group")
    expect(groups).to_have_count(2)
    timed_out = groups.filter(has_text="timed out")
    expect(timed_out).to_contain_text("3 jobs")
    timed_out.locator("summary input").check()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.method == "POST" else None)
    page.get_by_role("button", name="Retry 3 jobs").click()
    expect(groups).to_have_count(1)
    assert len(asked) == 1
    assert {client.ok("GetState", id=job)["state"] for job in alike} == {"waiting"}
    assert client.ok("GetState", id=other)["state"] == "failed"


def test_a_failed_job_is_removed_from_its_page(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    failed, kept = (fail_one(client, queue, "no such address") for _ in range(2))
    page, _ = open_page(site, f"#/job/{failed}")
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator("h1")).to_contain_text(queue)
    assert [client.ok("GetState", id=job)["state"] for job in (failed, kept)] == ["unknown", "failed"]


def test_a_delayed_job_is_promoted_and_a_waiting_one_cancelled(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    (job_id,) = push(client, queue, delay=3_600_000)
    page, _ = open_page(site, f"#/job/{job_id}")
    expect(page.get_by_role("button", name="Retry")).to_have_count(0)
    page.get_by_role("button", name="Run now").click()
    expect(page.locator("h1 .state")).to_contain_text("waiting")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_contain_text("Cancel the job welcome?")
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    expect(page.locator("h1")).to_contain_text(queue)
    assert client.ok("GetState", id=job_id)["state"] == "unknown"


def test_an_active_job_can_be_taken_from_its_worker_and_nothing_else(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue)
    pulled = client.ok("PULL", queue=queue, timeout=1000)
    client.ok("Progress", id=pulled["job"]["id"], progress=40, message="halfway")
    page, _ = open_page(site, f"#/job/{pulled['job']['id']}")
    expect(page.locator("main")).to_contain_text("40 % halfway")
    buttons = page.locator(".head .actions").first.get_by_role("button")
    expect(buttons).to_have_text(["Cancel"])
    buttons.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.locator("h1")).to_contain_text(queue)
    assert client.ok("GetState", id=pulled["job"]["id"])["state"] == "unknown"


def test_the_keyboard_is_enough(site: Site, client: Client, queue: str, open_page: OpenPage) -> None:
    job_id = fail_one(client, queue)
    page, _ = open_page(site)
    expect(page.locator("#state")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next and previous row")
    page.keyboard.press("Escape")
    page.keyboard.type("gq")
    expect(page.locator("h1")).to_have_text("Queues")
    page.keyboard.press("/")
    page.keyboard.type(queue)
    expect(page.locator("tr[data-row]")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    focused = page.locator(":focus")
    expect(focused).to_have_text(queue)
    assert focused.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text(queue)
    page.keyboard.press("j")
    page.keyboard.press("r")
    expect(page.locator(".toast")).to_contain_text("runs again")
    assert client.ok("GetState", id=job_id)["state"] == "waiting"


def test_the_theme_can_be_switched_and_is_remembered(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    push(client, queue)
    page, _ = open_page(site, color_scheme="light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    expect(page.locator("#state")).to_be_visible()
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(page.locator("#state")).to_be_visible()
    assert page.evaluate(ground) == dark


def test_signing_in_with_a_wrong_and_then_the_right_token(open_page: OpenPage, tmp_path: Path) -> None:
    with Site(tmp_path / "closed.db", "--auth-tokens", "open-sesame") as closed:
        assert isinstance(closed, Site)
        with closed.client() as client:
            client.ok("Auth", token="open-sesame")
            push(client, "secret-mail")
        page, watch = open_page(closed)
        watch.allow("401")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(page.locator("body")).not_to_contain_text("secret-mail")
        page.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="did not accept")).to_be_visible()
        expect(page).to_have_title("Sign in · Headrace")
        page.keyboard.type("open-sesame")  # over the refused one
        page.get_by_role("button", name="Sign in").click()
        expect(row(page, "secret-mail")).to_be_visible()
        page.reload()
        expect(row(page, "secret-mail")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        expect(page.locator("body")).not_to_contain_text("secret-mail")
        page.close()  # a page that outlives its server complains about that


def test_a_token_may_be_written_in_any_alphabet(open_page: OpenPage, tmp_path: Path) -> None:
    with Site(tmp_path / "closed.db", "--auth-tokens", "сезам-開け") as closed:
        assert isinstance(closed, Site)
        page, watch = open_page(closed)
        watch.allow("401")
        for token, heading in (("сезам", "Sign in"), ("сезам-開け", "No queues yet")):
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("alert").filter(has_text="did not accept")).to_have_count(int(heading == "Sign in"))
            expect(page.get_by_role("heading", name=heading)).to_be_visible()
        expect(page.locator("#lost")).to_be_hidden()
        first_job = page.locator("pre").inner_text()
        subprocess.run(["bash", "-c", first_job], check=True, env={**os.environ, "HEADRACE_TOKEN": token}, timeout=60)
        expect(page.locator("tr[data-row]").filter(has_text="mail")).to_be_visible()
        page.close()  # a page that outlives its server complains about that


def test_a_page_opens_a_websocket_with_its_token(open_page: OpenPage, tmp_path: Path) -> None:
    with Site(tmp_path / "closed.db", "--auth-tokens", "open-sesame/é") as closed:
        assert isinstance(closed, Site)
        page, watch = open_page(closed)
        watch.allow("401", "WebSocket connection")
        ask = """async (token) => {
          const text = String.fromCharCode(...new TextEncoder().encode(token));
          const encoded = btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
          const socket = new WebSocket(`ws://${location.host}/ws`, ["headrace", `bearer.${encoded}`]);
          return await new Promise((resolve) => {
            socket.onopen = () => socket.send(JSON.stringify({ cmd: "Ping" }));
            socket.onmessage = ({ data }) => resolve([socket.protocol, JSON.parse(data).ok]);
            socket.onerror = () => resolve(["refused", false]);
          });
        }"""
        assert page.evaluate(ask, "open-sesame/é") == ["headrace", True]
        assert page.evaluate(ask, "close-sesame") == ["refused", False]
        page.close()  # a page that outlives its server complains about that


def test_a_lost_server_is_loud_and_its_return_is_silent(open_page: OpenPage, tmp_path: Path) -> None:
    site = Site(tmp_path / "lost.db")
    site.start()
    try:
        with site.client() as client:
            push(client, "mail", 2)
            # The reply left after the commit, so the jobs outlive the kill below.
        page, watch = open_page(site)
        watch.allow("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED")
        strip = page.locator("#lost")
        expect(row(page, "mail")).to_be_visible()
        expect(strip).to_be_hidden()
        site.kill()
        seen = r"What you see is from \d\d:\d\d:\d\d; trying again."
        expect(strip).to_have_text(re.compile(f"No connection to the server. {seen}"))
        expect(row(page, "mail")).to_be_visible()
        page.set_viewport_size({"width": 390, "height": 200})
        page.mouse.wheel(0, 300)
        ends, begins = strip.bounding_box(), page.locator("#bar").bounding_box()
        assert ends is not None
        assert begins is not None
        assert 0 <= ends["y"] < ends["y"] + ends["height"] <= begins["y"] < 200
        site.start()
        expect(strip).to_be_hidden()
        expect(row(page, "mail").locator("td[data-label=Waiting] .figure")).to_have_text("2")
    finally:
        site.kill()


def test_a_place_that_is_first_opened_while_the_server_is_gone_fills_itself_later(
    open_page: OpenPage, tmp_path: Path
) -> None:
    site = Site(tmp_path / "lost.db")
    site.start()
    try:
        page, watch = open_page(site)
        watch.allow("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED")
        expect(page.get_by_role("heading", name="No queues yet")).to_be_visible()
        site.kill()
        page.get_by_role("link", name="Schedules").click()  # its module was never fetched
        expect(page.get_by_role("heading", name="No answer yet")).to_be_visible()
        expect(page.locator("#lost")).to_be_visible()
        site.start()
        expect(page.get_by_role("heading", name="Nothing is scheduled")).to_be_visible()
        page.close()  # a page that outlives its server complains about that
    finally:
        site.kill()


def test_what_is_asked_of_a_server_that_is_gone_is_told_to_have_failed(open_page: OpenPage, tmp_path: Path) -> None:
    site = Site(tmp_path / "gone.db")
    site.start()
    try:
        with site.client() as client:
            for _ in range(2):
                fail_one(client, "mail")
        places = {
            "#/": ["Retry 2", "Pause"],
            "#/queue/mail": ["Retry 2 failed", "Limits"],
            "#/failures?queue=mail": ["Remove all"],
        }
        opened = [(open_page(site, place), names) for place, names in places.items()]
        for (page, watch), names in opened:
            watch.allow("ERR_")
            expect(page.get_by_role("button", name=names[-1])).to_be_visible()
        expect(opened[0][0][0].get_by_role("button", name="Retry 2")).to_have_count(2)
        site.kill()
        for (page, _), names in opened:
            expect(page.locator("#lost")).to_be_visible()
            for button in [button for name in names for button in page.get_by_role("button", name=name).all()]:
                page.locator(".toast").evaluate_all("toasts => toasts.forEach((toast) => toast.remove())")
                button.click()
                expect(page.locator(".toast.bad")).to_have_text("The server does not answer.")
    finally:
        site.kill()


def test_what_a_backend_cannot_do_is_no_lost_server(open_page: OpenPage, tmp_path: Path) -> None:
    with (
        ValkeyServer(tmp_path) as valkey,
        Site(Path(":memory:"), "--backend", valkey.url) as site,
        site.client() as client,
    ):
        assert isinstance(site, Site)
        push(client, "mail")
        page, watch = open_page(site)
        watch.allow("501")
        expect(page.locator("#state")).to_contain_text("No queue is known to be late. 1 waiting")
        page.evaluate("""() => {
          const strip = new MutationObserver(() => (window.wasLost = true));
          strip.observe(document.getElementById("lost"), { childList: true });
        }""")
        page.goto(site.url("#/queue/mail?find=ada"))
        expect(page.locator(".notice")).to_contain_text("not supported on this backend")
        assert page.evaluate("window.wasLost") is None
        page.close()  # a page that outlives its server complains about that


def test_a_server_that_hangs_is_told_like_one_that_is_gone(open_page: OpenPage, tmp_path: Path) -> None:
    with Site(tmp_path / "hangs.db") as site, site.client() as client:
        assert isinstance(site, Site)
        client.ok("PUSH", queue="mail", data=1)
        page, watch = open_page(site)
        watch.allow("ERR_", "Failed to load resource", "signal timed out")
        expect(page.locator("tr[data-row]")).to_have_count(1)
        strip = page.locator("#lost")
        expect(strip).to_be_hidden()
        os.kill(site.pid, signal.SIGSTOP)
        try:
            expect(strip).to_be_visible(timeout=30_000)
        finally:
            os.kill(site.pid, signal.SIGCONT)
        expect(strip).to_be_hidden(timeout=30_000)
        page.close()


HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


def test_names_data_and_errors_are_text_whatever_is_in_them(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    job_id = f'{queue}"/><b>{HOSTILE}'
    client.ok("PUSH", queue=queue, jobId=job_id, name=HOSTILE, data={HOSTILE: HOSTILE}, tags=[HOSTILE], maxAttempts=1)
    client.ok("AddLog", id=job_id, message=HOSTILE)
    client.ok("PULL", queue=queue)
    client.ok("FAIL", id=job_id, error=HOSTILE, stack=[HOSTILE])
    client.ok("RegisterWorker", name=HOSTILE, queues=[queue], hostname=HOSTILE)
    client.ok("Cron", name=HOSTILE, queue=queue, schedule="0 3 * * *", data={}, jobName=HOSTILE)
    page, _ = open_page(site, f"#/queue/{queue}")
    places = ["#/", f"#/queue/{queue}", "#/failures", "#/schedules", "#/workers", f"#/jobs?find={queue}"]
    for place in [*places, f"#/job/{quote(job_id, safe='')}"]:
        page.goto(site.url(place))
        expect(page.locator("#content")).to_contain_text("onerror=")
        assert page.evaluate("window.hacked") is None, place
        assert page.locator("#content img, #content script").count() == 0, place
    client.ok("CronDelete", name=HOSTILE)


def test_a_job_beyond_every_calendar_and_one_beyond_every_screen_are_shown(
    site: Site, client: Client, queue: str, open_page: OpenPage
) -> None:
    client.ok("PUSH", queue=queue, name="far", data={}, timestamp=8_640_000_000_000_000, delay=1000)
    data: object = "core"
    for _ in range(200):
        data = {"deep": data, "wide": list(range(200))}
    deep = client.ok("PUSH", queue=queue, name="deep", data=data)["id"]
    page, _ = open_page(site, f"#/queue/{queue}")
    expect(page.locator("tr[data-row]")).to_have_count(2)
    page.get_by_role("link", name="far").click()
    expect(page.locator("h1")).to_contain_text("far")
    expect(page.locator("h1 .state")).to_contain_text("delayed")
    page.goto(site.url(f"#/job/{deep}"))
    expect(page.locator(".tree")).to_contain_text("see raw")
    assert page.locator(".tree *").count() < 10_000


def test_an_address_with_a_bare_percent_sign_opens_a_page(site: Site, open_page: OpenPage) -> None:
    page, watch = open_page(site, "#/queue/100%")
    watch.allow("400")
    expect(page.locator(".notice")).to_contain_text("Queue name contains invalid characters")


def test_a_job_that_is_gone_says_so(site: Site, open_page: OpenPage) -> None:
    page, watch = open_page(site, "#/workflows")
    watch.allow("404")
    page.goto(site.url("#/job/no-such-job"))
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()
    expect(page).to_have_title("Not found · Headrace")
