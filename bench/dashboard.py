"""What an open dashboard costs the binary protocol: the same load with the page open and closed, in turn.

    .venv/bin/python bench/dashboard.py [--rounds 9]

A headless Chromium shows the overview while loadgen pushes and pulls over TCP. CPU is that of the server alone, HTTP
and live events included. The paired differences are printed with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from servers import ROOT, RunningServer, ask, headrace

LOADGEN = ROOT / "bench/build/loadgen"
WORKLOADS = {
    "PUSH 8 x 16": "push --connections 8 --inflight 16 --seconds 1",
    "mixed": "mixed --connections 8 --seconds 1",
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def cpu_us(server: RunningServer, options: str) -> float:
    command = [str(LOADGEN), "--port", str(server.port), "--pid", str(server.pid), "--obliterate", "--workload"]
    done = subprocess.run([*command, *options.split()], capture_output=True, text=True, timeout=60, check=True)
    return float(json.loads(done.stdout)["cpu_us_per_unit"])


def with_page(browser: Browser, server: RunningServer, options: str) -> float:
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{server.http_port}/")
    page.wait_for_selector("#state")
    try:
        return cpu_us(server, options)
    finally:
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="pairs per workload (default 9)")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium")
    if chromium is None or not LOADGEN.exists():
        raise SystemExit("run `make setup` and `make bench BENCH_ARGS=--quick` first: Chromium or loadgen is missing")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        server = RunningServer(headrace(with_http=True), Path(folder), on_disk=True)
        try:
            server.start()
            server.wait_for_ping()
            ask(server.port, {"cmd": "PUSH", "queue": "kept", "data": 1}, 5)  # loadgen's own queue comes and goes
            for title, options in WORKLOADS.items():
                cpu_us(server, options)
                changes = []
                for round_ in range(arguments.rounds):
                    order = (False, True) if round_ % 2 == 0 else (True, False)
                    result = {
                        is_open: with_page(browser, server, options) if is_open else cpu_us(server, options)
                        for is_open in order
                    }
                    changes.append(result[True] / result[False] - 1)
                low, middle, high = statistics.quantiles(changes, n=4)
                print(f"{title}: {middle:+.1%} with the dashboard open (quartiles {low:+.1%} .. {high:+.1%})")
        finally:
            server.stop()
            browser.close()


if __name__ == "__main__":
    main()
