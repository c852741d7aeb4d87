"""The measurements: workloads on disk and in memory, start-up, and a large backlog.

Each method of `Bench` starts the servers it needs, measures them in turn (A B A B ...) and returns plain rows
for `report.py`. The workloads with the ratio each must reach are DISK and MEMORY: a new one is a new line.
"""

from __future__ import annotations

import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadgen.alternate import Result, Runs, Target, run_loadgen, run_rounds, summarise
from servers import BenchmarkFailed, Contender, RunningServer

QUEUE = "lg"  # loadgen's default
RUN_LIMIT_S = 120.0
FILL_LIMIT_S = 900.0
FILL_SLICES = 10
RECOVERY_LIMIT_S = 900.0  # bunqueue has been seen to need three minutes for a million jobs


@dataclass(frozen=True)
class Workload:
    """A loadgen run: its title and options, the CPU ratio to reach, the budget in CPU-us per job."""

    title: str
    options: str
    floor: float
    budget_us: float | None = None
    is_awake: bool = False
    """Whether the cores are kept from sleeping meanwhile."""


DISK = (
    Workload("PUSH 8 x 16", "push --connections 8 --inflight 16 --seconds 1", 8, 20),
    Workload("PUSHB 100", "pushb --inflight 4 --batch 100 --seconds 1", 5, 10),
    Workload("PULL+ACK 8 x 16", "pull --connections 8 --inflight 16 --prefill 40000 --seconds 2", 25, 38),
    Workload("PULLB+ACKB 100", "pullb --connections 2 --inflight 4 --prefill 100000 --seconds 2", 10, 14),
    Workload("mixed", "mixed --connections 8 --seconds 1", 15, 60),
    Workload("sequential", "seq --inflight 1 --seconds 0.7", 2.5, 450),
    Workload("sequential, cores kept awake", "seq --inflight 1 --seconds 0.7", 2.5, 450, is_awake=True),
)
MEMORY = (
    Workload("PUSH 8 x 16", "push --connections 8 --inflight 16 --seconds 1", 5),
    Workload("PUSHB 100", "pushb --inflight 4 --batch 100 --seconds 1", 2),
    Workload("PULL+ACK 8 x 16", "pull --connections 8 --inflight 16 --prefill 40000 --seconds 2", 6),
)
# Both servers get every workload once, unmeasured: bun compiles hot functions, Python fills its caches.
WARM_UP = (
    "push --connections 8 --inflight 16 --seconds 0.5",
    "pushb --inflight 4 --batch 100 --seconds 0.5",
    "pull --connections 8 --inflight 16 --prefill 2000 --seconds 1",
    "pullb --connections 2 --inflight 4 --prefill 5000 --seconds 1",
    "mixed --connections 8 --seconds 0.5",
    "seq --inflight 1 --seconds 0.3",
)


@dataclass(frozen=True)
class StartTime:
    """Milliseconds from starting the process to its first Ping reply."""

    server: str
    storage: str
    median_ms: float
    lowest_ms: float
    runs: int


@dataclass(frozen=True)
class Backlog:
    """What a large number of waiting jobs costs one server."""

    server: str
    jobs: int
    rss_bytes: int
    empty_rss_bytes: int
    database_bytes: int
    other_bytes: int
    first_slice_us: float
    last_slice_us: float
    restart_s: float


class Bench:
    """The set-up shared by all measurements: the generator, the servers and a folder for their data."""

    def __init__(self, loadgen: Path, contenders: Sequence[Contender], build: Path) -> None:
        self._loadgen = str(loadgen)
        self._contenders = contenders
        self._build = build
        self._raw = build / "runs.jsonl"

    def workloads(self, workloads: Sequence[Workload], on_disk: bool, rounds: int) -> list[Result]:
        """Rows of medians, one per workload and server; those with cores kept awake come last."""
        has_awake = any(workload.is_awake for workload in workloads)
        if has_awake:
            with cores_awake():
                pass  # if that is refused, now and not after minutes of measuring
        with ExitStack() as stack:
            targets = []
            for contender in self._contenders:
                server = stack.enter_context(self._server(contender, on_disk))
                server.wait_for_ping()
                targets.append(server.target)
            say(f"warm-up ({'disk' if on_disk else 'memory'})")
            run_rounds(self._loadgen, targets, WARM_UP, 1, RUN_LIMIT_S)
            rows = self._rows(workloads, targets, rounds, is_awake=False)
            if has_awake:
                stack.enter_context(cores_awake())
                rows += self._rows(workloads, targets, rounds, is_awake=True)
        return rows

    def _rows(self, workloads: Sequence[Workload], targets: list[Target], rounds: int, is_awake: bool) -> list[Result]:
        specs = [workload.options for workload in workloads if workload.is_awake == is_awake]
        runs = run_rounds(self._loadgen, targets, specs, rounds, RUN_LIMIT_S, self._raw)
        _require_complete(runs, len(specs) * len(targets), rounds)
        return [{**row, "is_awake": is_awake} for row in summarise(runs, targets, specs)]

    def starts(self, rounds: int) -> list[StartTime]:
        """How long each server takes from its start to the first reply, on disk and in memory."""
        rows = []
        for on_disk in (True, False):
            times: dict[str, list[float]] = {contender.name: [] for contender in self._contenders}
            for number in range(rounds):
                say(f"start {number + 1} of {rounds} ({'disk' if on_disk else 'memory'})")
                for contender in self._contenders:
                    times[contender.name].append(self._start_once(contender, on_disk))
            for name, taken in times.items():
                storage = "disk" if on_disk else "memory"
                rows.append(StartTime(name, storage, statistics.median(taken), min(taken), rounds))
        return rows

    def backlogs(self, jobs: int) -> list[Backlog]:
        """What `jobs` waiting jobs of 100 bytes cost each server."""
        return [self._backlog(contender, jobs) for contender in self._contenders]

    def _start_once(self, contender: Contender, on_disk: bool) -> float:
        with self._server(contender, on_disk, start=False) as server:
            began = time.perf_counter()
            server.start()
            server.wait_for_ping()
            return (time.perf_counter() - began) * 1000

    def _backlog(self, contender: Contender, jobs: int) -> Backlog:
        with self._server(contender, on_disk=True) as server:
            server.wait_for_ping()
            empty_rss = server.rss_bytes()
            slices = self._fill(server, jobs)
            time.sleep(1.5)  # buffered writes and garbage of the fill are no part of the backlog
            rss = server.rss_bytes()
            database, other = server.file_bytes()
            restart_s = _crash_and_pull(server)
        return Backlog(
            contender.name, jobs, rss, empty_rss, database, other, slices[0], slices[-1], round(restart_s, 2)
        )

    def _fill(self, server: RunningServer, jobs: int) -> list[float]:
        """Push `jobs` jobs in slices; CPU-us per job of each slice, so that growing cost shows."""
        count = str(jobs // FILL_SLICES)
        options = ["pushb", "--inflight", "4", "--batch", "1000", "--count", count, "--seconds", "600"]
        costs = []
        for number in range(FILL_SLICES):
            say(f"{server.contender.name}: filling, {number + 1} of {FILL_SLICES} x {count} jobs")
            result = run_loadgen(self._loadgen, server.target, options, FILL_LIMIT_S)
            if result is None or result["jobs"] != int(count) or result["errors"]:
                raise BenchmarkFailed(f"{server.contender.name} did not accept {count} jobs: {result}")
            costs.append(float(result["cpu_us_per_unit"]))
        return costs

    @contextmanager
    def _server(self, contender: Contender, on_disk: bool, start: bool = True) -> Iterator[RunningServer]:
        """A server with fresh data. Beside the build, not in /tmp, which may be memory."""
        with tempfile.TemporaryDirectory(prefix=f"{contender.name}-", dir=self._build) as folder:
            server = RunningServer(contender, Path(folder), on_disk)
            try:
                if start:
                    server.start()
                yield server
            finally:
                server.stop()


@contextmanager
def cores_awake() -> Iterator[None]:
    """Keep the cores from sleeping, as the kernel promises while this file is open.

    To wake a sleeping core takes a virtual machine tens of microseconds, which is the hypervisor's time and not a
    server's, although it is charged to one.
    """
    try:
        request = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError as error:
        raise BenchmarkFailed(f"the cores cannot be kept awake, which takes Linux and root: {error}") from error
    try:
        os.write(request, struct.pack("i", 0))  # at most 0 us to wake up
        yield
    finally:
        os.close(request)


def _crash_and_pull(server: RunningServer) -> float:
    """Seconds from kill -9 until the restarted server has handed out a job."""
    say(f"{server.contender.name}: kill -9 and restart")
    began = time.perf_counter()
    server.kill()
    server.start()
    pull = {"cmd": "PULL", "queue": QUEUE}
    server.wait_for(pull, lambda reply: reply.get("job") is not None, RECOVERY_LIMIT_S)
    return time.perf_counter() - began


def _require_complete(runs: Runs, cells: int, rounds: int) -> None:
    """A median over the runs that happened to work would flatter the server."""
    if len(runs) != cells or any(len(results) != rounds for results in runs.values()):
        raise BenchmarkFailed("some runs failed; the reasons are above")


def say(text: str) -> None:
    """A progress line."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
