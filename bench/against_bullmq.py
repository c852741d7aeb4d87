"""Headrace on Valkey against BullMQ on the same server: CPU per job, of the server and of the client.

    python bench/against_bullmq.py [--rounds 5] [--jobs 3000]

Both run in turn, phase by phase, and medians over the rounds are compared. Wall time says little on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.valkeyserver import ValkeyServer  # noqa: E402

LOAD: Final = ROOT / "bench" / "valkeyload"
PHASES: Final = (
    ("bulk add", "bulk", 0),
    ("process, concurrency 50", "work", 50),
    ("add one by one", "single", 0),
    ("process, concurrency 10", "work", 10),
    ("bulk add", "bulk", 0),
    ("process, concurrency 1", "work", 1),
)


def server_cpu(server: ValkeyServer) -> float:
    used = server.client().info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def command_of(side: str, server: ValkeyServer, phase: str, jobs: int, concurrency: int) -> list[str]:
    given = [phase, str(jobs), str(concurrency)]
    if side == "bullmq":
        return ["node", str(LOAD / "bullmq.mjs"), str(server.port), *given]
    return [sys.executable, str(LOAD / "ours.py"), server.url, *given]


def measure(side: str, server: ValkeyServer, phase: str, jobs: int, concurrency: int) -> tuple[float, float]:
    """CPU microseconds per job: server and client."""
    before = server_cpu(server)
    command = command_of(side, server, phase, jobs, concurrency)
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    spent = server_cpu(server) - before
    return spent / jobs * 1e6, float(done.stdout.split()[-1]) / jobs * 1e6


def run_round(results: dict[tuple[str, str], list[tuple[float, float]]], jobs: int) -> None:
    for side in ("ours", "bullmq"):
        with tempfile.TemporaryDirectory() as folder, ValkeyServer(Path(folder)) as server:
            for title, phase, concurrency in PHASES:
                results.setdefault((title, side), []).append(measure(side, server, phase, jobs, concurrency))


def report(results: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    print("| phase | server us/job, ours | BullMQ | ratio | client us/job, ours | BullMQ | ratio |")
    print("|---|---|---|---|---|---|---|")
    for title in dict.fromkeys(title for title, _, _ in PHASES):
        row = [title]
        for part in (0, 1):
            ours, theirs = (statistics.median(r[part] for r in results[title, side]) for side in ("ours", "bullmq"))
            row += [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=3000)
    chosen = parser.parse_args()
    results: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(chosen.rounds):
        run_round(results, chosen.jobs)
    report(results)


if __name__ == "__main__":
    main()
