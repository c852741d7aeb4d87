"""Schedules over restarts: whenever the server goes down, no slot fires twice and none is missed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from headrace.backends.local.backend import LocalBackend
from headrace.backends.local.slices import run_now
from headrace.clock import ManualClock
from headrace.commands.cron import Cron
from headrace.engine.engine import Engine
from headrace.model import EVENT_WORDS, EventName
from tests.conformance.rig import pack
from tests.scale import scaled

START = 1_700_000_000_000
STEP_MS = 250


class Server:
    """An engine on a file with a clock that stands still between steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock(START)
        self.fired: list[int] = []
        self.start()

    def start(self) -> None:
        self.backend = LocalBackend(self.path, clock=self.clock)
        self.engine = Engine(self.backend, self.clock)
        run_now(self.engine.start())

    def stop(self) -> None:
        run_now(self.backend.close())

    def step(self, ms: int, *, commits: bool = True) -> None:
        """Let time pass. A server that dies before it commits loses what it did."""
        self.clock.advance(ms)
        run_now(self.engine.sweep())
        if commits:
            for event in self.engine.settle():
                if event.event == EVENT_WORDS[EventName.CRON_FIRED]:
                    self.fired.append(event.ts)

    def schedule(self, **fields: object) -> None:
        given = {"name": "c", "queue": "q", "data": pack(1), "preventOverlap": False, "timezone": "UTC"}
        given |= {"skipMissedOnRestart": False}
        names = {"preventOverlap": "prevent_overlap", "skipMissedOnRestart": "skip_missed_on_restart"}
        options = {names.get(key, key): value for key, value in {**given, **fields}.items()}
        run_now(self.engine.crons.upsert(Cron(**options).entry()))
        self.engine.settle()

    def executions(self) -> int:
        (entry,) = run_now(self.backend.crons())
        return entry.executions


SCHEDULES = [{"repeat_every": 2000}, {"schedule": "*/3 * * * * *"}]


@pytest.mark.parametrize("seed", range(scaled(8, 100)))
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["every 2 s", "cron of seconds"])
def test_every_slot_fires_once(tmp_path: Path, schedule: dict[str, object], seed: int) -> None:
    """Stops shorter than the interval: one run per slot, at its time or at the start after it."""
    rng = random.Random(seed)
    server = Server(tmp_path / "jobs.db")
    server.schedule(**schedule)
    interval = 2000 if "repeat_every" in schedule else 3000
    first = START + 2000 if interval == 2000 else START + 1000  # START is 20 s past a minute
    for _ in range(200):
        roll = rng.random()
        if roll < 0.05:
            server.stop()
            server.clock.advance(rng.choice((0, 100, interval - STEP_MS)))
            server.start()
            server.step(0)
        elif roll < 0.1:
            server.step(STEP_MS, commits=False)
            server.stop()
            server.start()
            server.step(0)
        else:
            server.step(STEP_MS)
    server.step(0)
    now = server.clock.now_ms()
    slots = list(range(first, now + 1, interval))
    assert len(server.fired) == len(slots)
    for fired, slot in zip(server.fired, slots, strict=True):
        assert slot <= fired < slot + interval
    assert server.executions() == len(slots)
    assert run_now(server.backend.counts("q")).waiting == len(slots)
    server.stop()


@pytest.mark.parametrize("seed", range(scaled(4, 40)))
def test_what_was_missed_is_left_out_by_default(tmp_path: Path, seed: int) -> None:
    """With skipMissedOnRestart nothing runs late, nothing runs twice, and the phase is kept."""
    rng = random.Random(seed)
    server = Server(tmp_path / "jobs.db")
    server.schedule(repeat_every=2000, skipMissedOnRestart=True)
    down: list[tuple[int, int]] = []
    for _ in range(150):
        if rng.random() < 0.05:
            began = server.clock.now_ms()
            server.stop()
            server.clock.advance(rng.choice((0, 900, 5000)))
            server.start()
            down.append((began, server.clock.now_ms()))
        else:
            server.step(STEP_MS)
    slots = range(START + 2000, server.clock.now_ms() + 1, 2000)
    served = [slot for slot in slots if not any(began < slot <= ended for began, ended in down)]
    assert [fired - (fired - START) % 2000 for fired in server.fired] == served
    server.stop()
