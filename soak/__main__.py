"""`python -m soak`: the run from beginning to end. `--seed` decides what fails when, and what is pushed."""

from __future__ import annotations

import argparse
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Final

from tests.integration.eventfolder import read_log

from soak.accounts import Account, Flows, Watch, account_of_log, wait_for_quiet
from soak.faults import FAULTS, Planned, plan
from soak.ledger import Push, Start, Tally, read
from soak.pulse import Pulse
from soak.stage import Settings, Stage
from soak.verdict import Evidence, Line, Side, executions, judge, table, targets_of

SIDES: Final = ("local", "fleet")
_TELL_EVERY: Final = 10.0
_QUIET_BEFORE_END: Final = 1.25
"""How much of the end is without new faults, in times of the longest one."""
_INGEST_LIMIT_S: Final = 300.0


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # everything that was started ends first
    folder = Path(options.folder or tempfile.mkdtemp(prefix="headrace-soak-"))
    crew = (1, 2, 1, 2) if options.small else (2, 3, 2, 3)
    settings = Settings(folder, options.seed, options.rate, options.lease, *crew)
    print(f"what happens is written down in {folder}", flush=True)
    lines = Soak(settings, options).run()
    broken = sum(not line.is_kept for line in lines)
    print(f"\nseed {options.seed}, {options.minutes:g} minutes\n{table(lines)}\n")
    if broken:
        print(f"{broken} of {len(lines)} promises were broken; the logs are in {folder}", flush=True)
        return 1
    print(f"all {len(lines)} promises were kept", flush=True)
    if not options.folder:
        shutil.rmtree(folder)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m soak", description="Everything at once, under faults.")
    parser.add_argument("--minutes", type=float, default=20, help="how long there is load (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same faults (default: 1)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT",
                        help=f"only these: {', '.join(FAULTS)}")  # fmt: skip
    parser.add_argument("--longest", type=float, default=4, help="seconds that a fault lasts at most (default: 4)")
    parser.add_argument("--rate", type=float, default=40, help="jobs per second on each side (default: 40)")
    parser.add_argument("--lease", type=float, default=15, help="lease of jobs in seconds (default: 15)")
    parser.add_argument("--ingests", type=int, default=3, help="runs of the pipeline; 0 needs no Spark (default: 3)")
    parser.add_argument("--small", action="store_true", help="fewer producers and workers")
    parser.add_argument(
        "--folder", help="where to keep what is written down (default: a folder that goes if all is well)"
    )
    return parser


class Soak:
    def __init__(self, settings: Settings, options: argparse.Namespace) -> None:
        self._settings = settings
        self._folder = settings.folder
        self._options = options
        self._seconds = options.minutes * 60
        self._problems: list[str] = []
        self._tallies = {
            f"{what} {side}": Tally(self._folder / f"{what}-{side}.jsonl")
            for side in SIDES
            for what in ("pushes", "runs", "starts")
        }

    def run(self) -> list[Line]:
        with Stage(self._settings) as stage:
            planned = self._plan(stage)
            with Watch(stage) as watch, Pulse(stage.note):
                self._under_load(stage, planned)
                stage.end_load()
                flows = {side: Flows(stage.url_of(side), self._starts(side)) for side in SIDES}
                urls = {side: stage.url_of(side) for side in SIDES}
                left = wait_for_quiet(urls, flows, 120)
                watch.look_at_valkey()
            stage.look_for_deaths()
            stage.end_work()
            return judge(self._evidence(stage, watch, flows, left))

    # -- the run -------------------------------------------------------------------------------------------------------

    def _plan(self, stage: Stage) -> list[Planned]:
        until = self._seconds - _QUIET_BEFORE_END * self._options.longest
        rng = random.Random(self._settings.seed)
        planned = plan(rng, self._options.faults, list(stage.hands), until, self._options.longest)
        print(f"seed {self._settings.seed}: {len(planned)} faults in {self._options.minutes:g} minutes")
        for one in planned:
            print(f"  {one.at:7.1f} s  {one.fault:<14} {one.target:<16} for {one.seconds:.1f} s")
        print(flush=True)
        return planned

    def _under_load(self, stage: Stage, planned: list[Planned]) -> None:
        began = time.monotonic()
        teller = threading.Thread(target=self._tell, args=(stage, began), daemon=True)
        ingests = threading.Thread(target=self._ingest_now_and_then, args=(stage, began), daemon=True)
        teller.start()
        ingests.start()
        with ThreadPoolExecutor() as hands:
            for at, together in groupby(planned, key=lambda one: one.at):
                time.sleep(max(0.0, began + at - time.monotonic()))
                if time.monotonic() - began > self._seconds:
                    break
                list(hands.map(lambda one: FAULTS[one.fault].act(stage, one.target, one.seconds), together))
                stage.look_for_deaths()
        time.sleep(max(0.0, began + self._seconds - time.monotonic()))
        ingests.join()

    def _tell(self, stage: Stage, began: float) -> None:
        while (passed := time.monotonic() - began) < self._seconds:
            counts = ", ".join(f"{tally.renew():,} {name}" for name, tally in self._tallies.items())
            print(f"{passed:6.0f} s  {len(stage.incidents)} faults; {counts}", flush=True)
            time.sleep(_TELL_EVERY)

    # -- the pipeline --------------------------------------------------------------------------------------------------

    def _ingest_now_and_then(self, stage: Stage, began: float) -> None:
        """All but the last of the runs, spread over the time."""
        for number in range(1, self._options.ingests):
            time.sleep(max(0.0, began + self._seconds * number / self._options.ingests - time.monotonic()))
            self._pipeline("ingest", "--capture", str(stage.capture))

    def _pipeline(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "headrace", "pipeline", *arguments, "--lake", str(self._folder / "lake")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INGEST_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            self._problems.append(f"pipeline {arguments[0]} did not end within {_INGEST_LIMIT_S:g} s")
            return ""
        if done.returncode:
            self._problems.append(f"pipeline {arguments[0]} failed: {done.stdout[-300:]} {done.stderr[-500:]}")
        return done.stdout

    def _bronze(self, stage: Stage) -> int | None:
        if not self._options.ingests:
            return None
        self._pipeline("ingest", "--capture", str(stage.capture))
        found = re.search(r"bronze: ([\d,]+) events", self._pipeline("verify"))
        return int(found[1].replace(",", "")) if found else 0

    # -- the end -------------------------------------------------------------------------------------------------------

    def _starts(self, side: str) -> list[Start]:
        return read(self._folder / f"starts-{side}.jsonl", Start)

    def _evidence(self, stage: Stage, watch: Watch, flows: dict[str, Flows], left: list[str]) -> Evidence:
        logs = [*self._folder.glob("*.log")]
        stage.stop("server", stage.servers["server"])
        events = read_log(stage.capture)
        accounts = {"local": account_of_log(events), "fleet": watch.account}
        sides = [self._side(stage, side, accounts[side], flows[side]) for side in SIDES]
        seqs = [event["seq"] for event in events]
        bronze = self._bronze(stage)
        return Evidence(sides, watch.sizes, stage.deaths, logs, left, seqs, bronze, self._problems)

    def _side(self, stage: Stage, side: str, account: Account, flows: Flows) -> Side:
        incidents = [one for one in stage.incidents if one.target.startswith(targets_of(side))]
        return Side(
            side,
            self._settings.lease,
            read(self._folder / f"pushes-{side}.jsonl", Push),
            self._starts(side),
            executions(self._folder / f"runs-{side}.jsonl", incidents),
            executions(self._folder / f"steps-{side}.jsonl", incidents),
            account,
            flows.timelines,
            incidents,
            stage.scheduled_until[side],
        )


if __name__ == "__main__":
    sys.exit(main())
