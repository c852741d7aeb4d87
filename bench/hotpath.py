"""What a command costs inside the server, without sockets: the place to look before and after an optimisation.

    .venv/bin/python bench/hotpath.py                     CPU-us per job of every workload, memory and disk
    .venv/bin/python bench/hotpath.py --source DIR        the same for the package in DIR (another checkout's src)
    .venv/bin/python bench/hotpath.py --profile push      the same work under cProfile, most expensive functions first
    .venv/bin/python bench/hotpath.py --event-log         what one event costs in the tick: made, encoded, appended

Frames are fed to a real Session over a real backend: PUSH, PULL and ACK in blocks of 16, eight blocks to a tick, as
eight busy connections would; PUSHB, PULLB and ACKB of 100, one to a tick; and lone ones, each a tick of its own.
Every tick ends with its commit. The figure is the 20th percentile of the ticks: on a busy machine most are disturbed.
There are fewer jobs than completed ones are kept, so that no ACK has to evict any.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

if "--source" in sys.argv:  # before the package is imported
    sys.path.insert(0, sys.argv[sys.argv.index("--source") + 1])

from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.eventlog import EventLog, LogLimits
from headrace.backends.local.slices import run_now
from headrace.clock import SystemClock
from headrace.engine.engine import Engine
from headrace.model import Event
from headrace.server.session import Session

JOBS = 19_200
LONE = 1500
BATCH = 100
BLOCK = 16
PER_TICK = 8 * BLOCK
PAYLOAD = {"n": 123_456, "pad": "x" * 80}
WORKLOADS = ("push", "pushb", "pull", "ack", "pullb", "ackb", "lone-push", "lone-pull", "lone-ack")

Tick = list[bytes]
"""What is received in one tick, read by read."""


def frame(**command: object) -> bytes:
    body = msgspec.msgpack.encode({**command, "reqId": "1"})
    return struct.pack(">I", len(body)) + body


def replies(out: bytearray) -> Iterator[dict[str, Any]]:
    at = 0
    while at < len(out):
        (length,) = struct.unpack_from(">I", out, at)
        yield msgspec.msgpack.decode(out[at + 4 : at + 4 + length])
        at += 4 + length


class Rig:
    """A session on a backend, ticked by hand."""

    def __init__(self, path: Path | None, profiled: str | None) -> None:
        self.engine = Engine(LocalBackend(path), SystemClock())
        run_now(self.engine.start())
        self.session = Session(self.engine, "", stir=lambda: None, later=lambda work: work())
        self.costs: dict[str, float] = {}
        self._profiled = profiled

    def feed(self, name: str, ticks: list[Tick], jobs: int) -> list[bytearray]:
        """Run ticks of `jobs` jobs each and note what one job costs; the replies of each tick."""
        with cProfile.Profile() as watched:
            if self._profiled != name:
                watched.disable()
            outs, times = [], []
            for tick in ticks:
                began = time.process_time_ns()
                outs.append(self._run(tick))
                times.append(time.process_time_ns() - began)
        if self._profiled == name:
            pstats.Stats(watched).sort_stats("tottime").print_stats(25)
        self.costs[name] = sorted(times)[len(times) // 5] / 1000 / jobs
        return outs

    def _run(self, tick: Tick) -> bytearray:
        for read in tick:
            self.session.receive(read)
        self.engine.settle()
        return self.session.take()

    def bursts(self) -> None:
        blocks = PER_TICK // BLOCK
        self.feed(
            "push", [[frame(cmd="PUSH", queue="q", data=PAYLOAD) * BLOCK] * blocks] * (JOBS // PER_TICK), PER_TICK
        )
        outs = self.feed("pull", [[frame(cmd="PULL", queue="q") * BLOCK] * blocks] * (JOBS // PER_TICK), PER_TICK)
        acks = [[frame(cmd="ACK", id=reply["job"]["id"]) for reply in replies(out)] for out in outs]
        self.feed("ack", [[b"".join(a[i : i + BLOCK]) for i in range(0, len(a), BLOCK)] for a in acks], PER_TICK)

    def batches(self) -> None:
        jobs = [{"data": PAYLOAD}] * BATCH
        self.feed("pushb", [[frame(cmd="PUSHB", queue="b", jobs=jobs)]] * (JOBS // BATCH), BATCH)
        outs = self.feed("pullb", [[frame(cmd="PULLB", queue="b", count=BATCH)]] * (JOBS // BATCH), BATCH)
        pulled = [[job["id"] for job in next(replies(out))["jobs"]] for out in outs]
        self.feed("ackb", [[frame(cmd="ACKB", ids=ids)] for ids in pulled], BATCH)

    def lone(self) -> None:
        self.feed("lone-push", [[frame(cmd="PUSH", queue="l", data=PAYLOAD)]] * LONE, 1)
        outs = self.feed("lone-pull", [[frame(cmd="PULL", queue="l")]] * LONE, 1)
        self.feed("lone-ack", [[frame(cmd="ACK", id=next(replies(out))["job"]["id"])] for out in outs], 1)


def run(path: Path | None, profiled: str | None) -> dict[str, float]:
    rig = Rig(path, profiled)
    rig.bursts()
    rig.batches()
    rig.lone()
    run_now(rig.engine.stop())
    return rig.costs


def event_log_cost(folder: Path) -> float:
    """CPU-us per event to make it, encode it and append it, in blocks of 16."""
    log = EventLog.open(folder, store_seq=0, epoch=1, durable=lambda _: True, limits=LogLimits())
    began = time.process_time()
    for start in range(1, JOBS, BLOCK):
        log.record([Event(start + i, 1_700_000_000_000, "pushed", 1, "bench", "x" * 36, None) for i in range(BLOCK)])
        log.committed = log.last_seq
    return (time.process_time() - began) / JOBS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", metavar="DIR", help="measure the package in this folder")
    parser.add_argument("--profile", choices=WORKLOADS, help="show where the time goes")
    parser.add_argument("--event-log", action="store_true", help="measure the event log alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.event_log:
            print(f"{event_log_cost(Path(folder)):.2f} us per event in blocks of {BLOCK}")
            return
        for place, path in (("memory", None), ("disk", Path(folder) / "bench.db")):
            costs = run(path, arguments.profile)
            print(f"{place:7s}" + "  ".join(f"{name} {costs[name]:5.2f}" for name in WORKLOADS))


if __name__ == "__main__":
    main()
