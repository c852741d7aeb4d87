"""Takes the pictures of the dashboard that the README shows: a server of its own, a few minutes of made-up traffic.

    python tools/screenshots.py                 three minutes of traffic, then docs/images/*.png
    python tools/screenshots.py --seconds 30    quicker, with emptier charts

The traffic is a small shop on an uneventful day: mails that arrive faster than they can be sent, a paused import, a
flow of dependent jobs, errors of three kinds. To add a picture: a line in PICTURES.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, sync_playwright

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.ports import free_port  # noqa: E402
from tests.serverprocess import ServerProcess  # noqa: E402
from tests.wireclient import Client  # noqa: E402

IMAGES: Final = ROOT / "docs" / "images"
PICTURES: Final = [
    # file, place ("{failed}": a job that failed after several attempts), width, height, colours
    ("dashboard-light.png", "#/", 1280, 900, "light"),
    ("dashboard-dark.png", "#/", 1280, 900, "dark"),
    ("job-light.png", "#/job/{failed}", 1280, 900, "light"),
    ("phone-dark.png", "#/", 390, 844, "dark"),
]
PEOPLE: Final = ["ada", "grace", "linus", "barbara", "ken", "margaret", "dennis", "radia"]
MAIL_STACK: Final = [
    "Traceback (most recent call last):",
    'File "/srv/mailer/worker.py", line 88, in handle',
    "self.smtp.send(message)",
    'File "/srv/mailer/smtp.py", line 41, in send',
    "raise SmtpTimeout(host, seconds)",
]
Failure = tuple[str, list[str]] | None


class Shop:
    """Producers and workers, each a thread with a connection of its own, until `ends`."""

    def __init__(self, port: int, seconds: float) -> None:
        self.port = port
        self.ends = time.monotonic() + seconds
        self.random = random.Random(7)
        self.threads: list[threading.Thread] = []

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self.ends

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        self.threads.append(thread)

    def run(self) -> None:
        self.start(self.produce, "emails", "welcome", 5.5, self.mail)
        for host in ("mail-1", "mail-2", "mail-3"):
            self.start(self.work, "emails", "mailer", host, 0.75, self.mail_failure)
        self.start(self.produce, "thumbnails", "resize", 7.0, self.image)
        for _ in range(3):
            self.start(self.work, "thumbnails", "thumbs", "img-1", 0.3, self.image_failure)
        self.start(self.produce, "webhooks", "deliver", 2.5, self.hook)
        self.start(self.work, "webhooks", "hooks", "edge-1", 0.25, self.hook_failure)
        self.start(self.produce, "invoices", "render", 0.8, self.invoice)
        self.start(self.work, "invoices", "billing", "bill-1", 0.5, lambda: None)
        self.start(self.work, "orders", "fulfilment", "shop-1", 2.0, lambda: None)
        for thread in self.threads:
            thread.join()

    # -- producers and workers -----------------------------------------------------------------------------------------

    def produce(self, queue: str, name: str, per_second: float, data: Callable[[], dict[str, Any]]) -> None:
        client = Client(self.port)
        while self.is_open:
            client.ok("PUSH", queue=queue, name=name, data=data(), maxAttempts=3, backoff=1500)
            tide = 1 + 0.5 * math.sin(time.monotonic() / 11)
            time.sleep(self.random.expovariate(per_second * tide))

    def work(self, queue: str, name: str, host: str, seconds: float, failure: Callable[[], Failure]) -> None:
        client, done, failed = Client(self.port), 0, 0
        fields = {"queues": [queue], "concurrency": 4, "hostname": host, "pid": self.random.randint(900, 30_000)}
        worker = client.ok("RegisterWorker", name=name, **fields)["data"]["workerId"]
        while self.is_open:
            pulled = client.call("PULL", queue=queue, timeout=500, owner=worker)
            if job := pulled.get("job"):
                time.sleep(self.random.expovariate(1 / seconds))
                problem = failure()
                self.settle(client, job["id"], pulled.get("token"), host, problem)
                done, failed = done + (problem is None), failed + (problem is not None)
            client.call("Heartbeat", id=worker, activeJobs=int(job is not None), processed=done, failed=failed)

    def settle(self, client: Client, job_id: str, token: str | None, host: str, problem: Failure) -> None:
        client.ok("AddLog", id=job_id, message=f"taken by {host}")
        if problem is None:
            client.call("ACK", id=job_id, token=token, result={"ok": True, "took": self.random.randint(20, 400)})
            return
        error, stack = problem
        client.ok("AddLog", id=job_id, message=error, level="error")
        client.call("FAIL", id=job_id, token=token, error=error, stack=[*stack, error])

    # -- what is in the jobs -------------------------------------------------------------------------------------------

    def mail(self) -> dict[str, Any]:
        template = self.random.choice(["welcome", "receipt", "reset"])
        return {
            "to": f"{self.random.choice(PEOPLE)}@example.com",
            "template": template,
            "tags": ["eu", "transactional"],
        }

    def image(self) -> dict[str, Any]:
        return {"image": f"media/{self.random.randint(10**6, 10**7)}.jpg", "width": 320}

    def hook(self) -> dict[str, Any]:
        return {
            "url": "https://hooks.example.net/orders",
            "event": "order.paid",
            "order": self.random.randint(1000, 9999),
        }

    def invoice(self) -> dict[str, Any]:
        return {"invoice": f"{self.random.randint(1, 9999):04}", "total": self.random.randint(100, 90_000) / 100}

    def mail_failure(self) -> Failure:
        if self.random.random() > 0.3:
            return None
        return f"SmtpTimeout: smtp-{self.random.randint(1, 4)}.example.net did not answer within 30 s", MAIL_STACK

    def image_failure(self) -> Failure:
        if self.random.random() > 0.22:
            return None
        number = self.random.randint(10**6, 10**7)
        return f"cannot decode image {number}: unexpected end of file", ["at decode (/srv/thumbs/decode.js:14:9)"]

    def hook_failure(self) -> Failure:
        if self.random.random() > 0.3:
            return None
        return "HTTP 503 from https://hooks.example.net/orders", ["at post (/srv/hooks/post.ts:33:11)"]


def prepare(client: Client) -> None:
    """What was there before the day began."""
    now = client.ok("Ping")["data"]["time"]
    for n in range(40):
        data = {"to": f"{PEOPLE[n % 8]}@example.com", "template": "weekly-digest"}
        client.ok("PUSH", queue="newsletter", name="digest", data=data, timestamp=now - 400_000 + n * 900)
    rows = [{"name": "row", "data": {"file": "customers.csv", "row": n}} for n in range(4130)]
    client.ok("PUSHB", queue="imports", jobs=rows)
    client.ok("Pause", queue="imports")
    for n in range(40):
        client.ok("PUSH", queue="reminders", name="renewal", data={"account": 1000 + n}, delay=(n + 1) * 600_000)
    client.ok("Cron", name="nightly-report", queue="reports", schedule="0 3 * * *", data={}, timezone="Europe/Vienna")
    client.ok("SetConcurrency", queue="thumbnails", limit=8)


def send_newsletter(port: int) -> None:
    """Takes a while, so that something has been late in the pictures."""
    with Client(port) as client:
        for _ in range(40):
            pulled = client.ok("PULL", queue="newsletter", timeout=0)
            client.ok("ACK", id=pulled["job"]["id"], token=pulled.get("token"))
            time.sleep(0.5)


def failed_job(port: int) -> str:
    """The newest mail that used up its attempts."""
    with Client(port) as client:
        return str(client.ok("Dlq", queue="emails")["jobs"][-1]["id"])


def take(browser: Browser, http_port: int, failed: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, place, width, height, colours in PICTURES:
        page = browser.new_page(
            viewport={"width": width, "height": height}, color_scheme=colours, reduced_motion="reduce"
        )
        page.goto(f"http://127.0.0.1:{http_port}/{place.format(failed=failed)}")
        page.locator("svg.chart, svg.gantt").first.wait_for()
        page.locator("svg.spark polyline, .error-text").first.wait_for()
        page.screenshot(path=IMAGES / name)
        page.close()
        print(f"{name}: {(IMAGES / name).stat().st_size // 1000} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180, help="how long the traffic runs")
    seconds = parser.parse_args().seconds
    http_port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder) / "shop.db", "--http-port", str(http_port))
        with server, server.client() as client:
            prepare(client)
        # The charts begin with the server: started again, they do not show the preparations.
        with server, sync_playwright() as playwright:
            shop = Shop(server.port, seconds + 30)
            threading.Thread(target=send_newsletter, args=(server.port,), daemon=True).start()
            running = threading.Thread(target=shop.run, daemon=True)
            running.start()
            time.sleep(seconds)
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            take(browser, http_port, failed_job(server.port))
            browser.close()
            shop.ends = time.monotonic()
            running.join(timeout=10)


if __name__ == "__main__":
    main()
