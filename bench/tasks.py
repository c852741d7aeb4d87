#!/usr/bin/env python3
"""Measure what a no-op task costs, from the call to its end, beside other task queues (part `tasks` of `make bench`).

    bench/tasks.py                      everything, about ten minutes
    bench/tasks.py --quick              one round, small numbers, prints instead of writing
    bench/tasks.py --only dramatiq      one contender beside ours

CPU of producer, worker and broker together, per job: in bulk, and one by one. Everything is started by this script and
gone when it ends. Needs dramatiq, huey and redis-server (`tools/setup.sh bench`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import report
from measure import say
from servers import HOST, BenchmarkFailed, Contender, RunningServer, bunqueue, headrace

HERE = Path(__file__).resolve().parent
BLOCK = "tasks"
LIMIT_S = 180.0
WAYS = ("bulk", "one")


@dataclass(frozen=True)
class Peer:
    """A library, what it stores jobs in, and what it promises."""

    name: str
    library: str
    broker: Contender | None
    survives_broker: bool
    """Whether what was acknowledged is there after kill -9 of the broker (for embedded ones, of the process)."""
    survives_worker: bool
    """Whether a job whose worker was killed runs again."""

    @property
    def is_ours(self) -> bool:
        return self.library == "headrace"

    @property
    def is_as_safe(self) -> bool:
        return self.survives_broker and self.survives_worker


def ours() -> list[Peer]:
    return [
        Peer("headrace, embedded", "headrace", None, True, True),
        Peer("headrace, server", "headrace", headrace(), True, True),
    ]


def peers() -> list[Peer]:
    return [
        *ours(),
        Peer("dramatiq, redis", "dramatiq", redis(keeps=False), False, True),
        Peer("dramatiq, redis with AOF", "dramatiq", redis(keeps=True), True, True),
        Peer("huey, redis", "huey", redis(keeps=False), False, False),
        Peer("huey, redis with AOF", "huey", redis(keeps=True), True, False),
        Peer("huey, sqlite", "huey", None, True, False),
        Peer("bunqueue", "bunqueue", bunqueue(), True, True),
    ]


def redis(*, keeps: bool) -> Contender:
    """Redis as fast as it can be, or with a log that survives the death of its process (as our journal does)."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise BenchmarkFailed("redis-server is not installed: run 'tools/setup.sh bench'")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()[2]

    def command(tcp_port: int, http_port: int, data_file: Path | None) -> list[str]:
        storage = ["--appendonly", "yes" if keeps else "no", "--appendfsync", "everysec", "--save", ""]
        return [binary, "--bind", HOST, "--port", str(tcp_port), *storage]

    return Contender("redis", version.removeprefix("v="), command)


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    cpu_us: float
    per_s: float


class Stage:
    """One peer at work: its processes, and the proof of its jobs."""

    def __init__(self, peer: Peer, folder: Path, stack: ExitStack) -> None:
        self._peer = peer
        self._folder = folder
        self._stack = stack
        self._proof = folder / "proof"
        self._done = 0
        self._processes: list[psutil.Process] = []
        place = self._start_broker() if peer.broker is not None else str(folder / "jobs.db")
        if peer.broker is not None or not peer.is_ours:
            self._start("worker", place)
            self._producer = self._start("producer", place)
        else:
            self._producer = self._start("both", place)

    def _start_broker(self) -> str:
        assert self._peer.broker is not None
        server = RunningServer(self._peer.broker, self._folder, on_disk=True)
        self._stack.callback(server.stop)
        server.start()
        wait_for_port(server.port)
        self._processes.append(psutil.Process(server.pid))
        return str(server.port)

    def _start(self, role: str, place: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "taskpeers.py"), self._peer.library, role, place, str(self._proof)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=self._folder)
        self._stack.callback(_end, process)
        self._expect(process, "ready")
        self._processes.append(psutil.Process(process.pid))
        return process

    def _expect(self, process: subprocess.Popen[str], word: str) -> None:
        assert process.stdout is not None
        if process.stdout.readline().strip() != word:
            raise BenchmarkFailed(f"{self._peer.name}: a process ended")

    def run(self, way: str, count: int) -> Figure:
        cpu, began = self._cpu(), time.monotonic()
        assert self._producer.stdin is not None
        self._producer.stdin.write(f"{way} {count}\n")
        self._producer.stdin.flush()
        self._expect(self._producer, "done")
        self._done += count
        self._wait_for_proof()
        elapsed = time.monotonic() - began
        return Figure((self._cpu() - cpu) / count * 1e6, count / elapsed)

    @property
    def worker(self) -> psutil.Process:
        """The process in which jobs run: behind the broker where there is one."""
        return self._processes[0 if len(self._processes) == 1 else -2]

    def delays(self) -> list[float]:
        """How long each job of the way `rare` was under way, in seconds."""
        return [delay for (delay,) in struct.iter_unpack("d", self._proof.with_name("proof.delays").read_bytes())]

    def _cpu(self) -> float:
        return sum(sum(process.cpu_times()[:4]) for process in self._processes)

    def _wait_for_proof(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while (size := self._proof.stat().st_size if self._proof.exists() else 0) < self._done:
            if any(process.status() == psutil.STATUS_ZOMBIE for process in self._processes):
                raise BenchmarkFailed(f"{self._peer.name}: a process ended before {self._done - size} jobs had run")
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"{self._peer.name}: {self._done - size} jobs did not run within {LIMIT_S:g} s")
            time.sleep(0.005)
        if size > self._done:
            raise BenchmarkFailed(f"{self._peer.name}: {size - self._done} jobs ran twice")


@contextmanager
def staged(peer: Peer) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Stage(peer, Path(folder), stack)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"nobody listens on port {port}") from None
            time.sleep(0.02)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def measure(contenders: Sequence[Peer], rounds: int, counts: dict[str, int]) -> dict[tuple[str, str], list[Figure]]:
    """Every peer in turn, `rounds` times; each run is warmed up before it is measured."""
    figures: dict[tuple[str, str], list[Figure]] = {}
    for number in range(rounds):
        for peer in contenders:
            say(f"round {number + 1} of {rounds}: {peer.name}")
            with staged(peer) as stage:
                for way in WAYS:
                    stage.run(way, max(100, counts[way] // 10))
                    figures.setdefault((peer.name, way), []).append(stage.run(way, counts[way]))
    return figures


# -- telling -----------------------------------------------------------------------------------------------------------


def table(contenders: Sequence[Peer], figures: dict[tuple[str, str], list[Figure]]) -> str:
    header = ["", "broker may die", "worker may die", "bulk CPU-us", "jobs/s", "one by one CPU-us", "jobs/s"]
    rows = [header]
    for peer in contenders:
        promises = ["yes" if kept else "no" for kept in (peer.survives_broker, peer.survives_worker)]
        row = [peer.name, *promises]
        for way in WAYS:
            cpu, rate = medians(figures[peer.name, way])
            mark = _mark(peer, way, cpu, contenders, figures)
            row += [f"{cpu:.0f}{mark}", f"{rate:,.0f}"]
        rows.append(row)
    return report.render(rows)


def medians(figures: Sequence[Figure]) -> tuple[float, float]:
    return statistics.median(f.cpu_us for f in figures), statistics.median(f.per_s for f in figures)


def _mark(
    peer: Peer, way: str, cpu: float, contenders: Sequence[Peer], figures: dict[tuple[str, str], list[Figure]]
) -> str:
    """Ours must be cheaper than all others in bulk, and one by one than those that promise as much."""
    others = [other for other in contenders if not other.is_ours and (way == "bulk" or other.is_as_safe)]
    cheapest = min((medians(figures[other.name, way])[0] for other in others), default=float("inf"))
    return f" {report.MISSED}" if peer.is_ours and cpu >= cheapest else ""


def _provenance(contenders: Sequence[Peer], rounds: int, counts: dict[str, int]) -> str:
    brokers = {peer.broker.name: peer.broker for peer in contenders if peer.broker is not None}
    libraries = [f"{name} {importlib.metadata.version(name)}" for name in ("dramatiq", "huey", "bunqueue-client")]
    method = (
        f"Clients: {', '.join(libraries)}. Medians of {rounds} rounds, {counts['bulk']:,} jobs in bulk and "
        f"{counts['one']:,} one by one; CPU of producer, worker and broker together, per job."
    )
    return report.provenance(list(brokers.values()), method, Path(tempfile.gettempdir()))


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        chosen = [peer for peer in peers() if args.only is None or peer.is_ours or peer.library == args.only]
        counts = {"bulk": 2000, "one": 500} if args.quick else {"bulk": args.jobs, "one": args.jobs // 4}
        rounds = 1 if args.quick else args.rounds
        text = table(chosen, measure(chosen, rounds, counts))
    except BenchmarkFailed as failure:
        say(str(failure))
        return 2
    text = _provenance(chosen, rounds, counts) + text
    print(text)
    if not (args.quick or args.only or args.no_write):
        report.write_block(BLOCK, text)
    return 1 if args.check and report.misses(text) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("dramatiq", "huey", "bunqueue"), help="this library beside ours")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=20_000, help="jobs in bulk; a quarter of them one by one")
    parser.add_argument("--quick", action="store_true", help="one round with small numbers; prints only")
    parser.add_argument("--no-write", action="store_true", help="print the table, leave the page alone")
    parser.add_argument("--check", action="store_true", help="exit 1 when a requirement is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
