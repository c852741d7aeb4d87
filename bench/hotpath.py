"""What a command costs inside the server, without sockets: the place to look before and after an optimisation.

    .venv/bin/python bench/hotpath.py                     CPU-us per PUSH, PUSHB job, PULL and ACK, memory and disk
    .venv/bin/python bench/hotpath.py --profile push      the same work under cProfile, most expensive functions first
    .venv/bin/python bench/hotpath.py --event-log         what one event costs in the tick: made, encoded, appended

Frames are fed to a real Session over a real backend in blocks of 16, eight blocks to a tick, as eight busy
connections would; every tick ends with its commit.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.eventlog import EventLog, LogLimits
from headrace.backends.local.slices import run_now
from headrace.clock import SystemClock
from headrace.engine.engine import Engine
from headrace.model import Event
from headrace.server.session import Session

JOBS = 40_000
BLOCK = 16
BLOCKS_PER_TICK = 8
PAYLOAD = {"n": 123_456, "pad": "x" * 80}


def frame(**command: object) -> bytes:
    body = msgspec.msgpack.encode(command)
    return struct.pack(">I", len(body)) + body


class Rig:
    """A session on a backend, ticked by hand."""

    def __init__(self, path: Path | None) -> None:
        self.backend = LocalBackend(path)
        self.engine = Engine(self.backend, SystemClock())
        run_now(self.engine.start())
        self.session = Session(self.engine, "", stir=lambda _: None, later=lambda work: work())

    def tick(self) -> bytearray:
        self.engine.settle()
        return self.session.take()

    def feed(self, block: bytes, jobs: int) -> list[bytearray]:
        """The same block again and again, for as many jobs as asked; the replies of each tick."""
        outs = []
        for _ in range(jobs // (BLOCK * BLOCKS_PER_TICK)):
            for _ in range(BLOCKS_PER_TICK):
                self.session.receive(block)
            outs.append(self.tick())
        return outs

    def push(self) -> list[bytearray]:
        return self.feed(frame(cmd="PUSH", queue="bench", data=PAYLOAD, reqId="1") * BLOCK, JOBS)

    def pushb(self) -> None:
        batch = frame(cmd="PUSHB", queue="bench", jobs=[{"data": PAYLOAD}] * 100, reqId="1")
        for _ in range(JOBS // 100):
            self.session.receive(batch)
            self.tick()

    def pull(self) -> list[bytearray]:
        return self.feed(frame(cmd="PULL", queue="bench", reqId="1") * BLOCK, JOBS)

    def ack(self, pulled: list[list[bytes]]) -> None:
        for blocks in pulled:
            for block in blocks:
                self.session.receive(block)
            self.tick()


def frames_of(out: bytearray) -> Iterator[bytes]:
    at = 0
    while at < len(out):
        (length,) = struct.unpack_from(">I", out, at)
        yield bytes(out[at + 4 : at + 4 + length])
        at += 4 + length


def ack_blocks(outs: list[bytearray]) -> list[list[bytes]]:
    """For each tick of pulls the ACK frames that answer it, in blocks."""
    ticks = []
    for out in outs:
        acks = [frame(cmd="ACK", id=msgspec.msgpack.decode(reply)["job"]["id"], reqId="1") for reply in frames_of(out)]
        ticks.append([b"".join(acks[i : i + BLOCK]) for i in range(0, len(acks), BLOCK)])
    return ticks


def measured(work: Callable[[], object], profile: bool) -> float:
    """CPU-us per job."""
    if profile:
        with cProfile.Profile() as watched:
            work()
        pstats.Stats(watched).sort_stats("tottime").print_stats(25)
        return 0.0
    began = time.process_time()
    work()
    return (time.process_time() - began) / JOBS * 1e6


def run(path: Path | None, wanted: str | None) -> dict[str, float]:
    rig = Rig(path)
    results: dict[str, float] = {}
    for name, work in (("push", rig.push), ("pushb", rig.pushb)):
        results[name] = measured(work, profile=wanted == name)
    outs: list[bytearray] = []
    results["pull"] = measured(lambda: outs.extend(rig.pull()), profile=wanted == "pull")
    blocks = ack_blocks(outs)
    results["ack"] = measured(lambda: rig.ack(blocks), profile=wanted == "ack")
    run_now(rig.engine.stop())
    return results


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
    parser.add_argument("--profile", choices=("push", "pushb", "pull", "ack"), help="show where the time goes")
    parser.add_argument("--event-log", action="store_true", help="measure the event log alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.event_log:
            print(f"{event_log_cost(Path(folder)):.2f} us per event in blocks of {BLOCK}")
            return
        for place, path in (("memory", None), ("disk", Path(folder) / "bench.db")):
            figures = run(path, arguments.profile)
            print(f"{place:7s}" + "  ".join(f"{name} {us:6.2f} us" for name, us in figures.items()))


if __name__ == "__main__":
    main()
