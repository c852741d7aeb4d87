"""The ticker: what leaves when, and its timer where ticks end without it."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.backends.base import Demand
from headrace.backends.local.slices import run_now
from headrace.clock import ManualClock
from headrace.commands.jobs import PushEntry
from headrace.embedded import EmbeddedEngine
from headrace.errors import StorageUnavailable
from headrace.server.ticker import Release


async def test_a_timer_that_comes_late_sweeps_once_however_many_ticks_end_meanwhile() -> None:
    clock = ManualClock()
    home = EmbeddedEngine(None, clock)
    await home.start()
    ticker = home.ticker
    assert ticker._timer is not None
    ticker._timer.cancel()
    clock.advance(10_000)
    ticker._on_time()
    sweep = ticker._timer
    for _ in range(5):
        ticker.schedule()
        await asyncio.sleep(0)
        assert not ticker._is_scheduled
    assert ticker._timer is sweep
    await home.stop()
    assert sweep.cancelled()


async def test_what_is_done_on_time_does_not_count_as_long_as_the_server_had_been_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = 1000.0
    monkeypatch.setattr("headrace.server.ticker.perf_counter", lambda: seconds)
    clock = ManualClock()
    home = EmbeddedEngine(None, clock)
    await home.start()
    run_now(home.engine.backend.insert_one("q", PushEntry(data=msgspec.Raw(b"\x01"), delay=60_000)))
    home.engine.pull("q", Demand(), 90_000).send(None).resume = lambda claims: None
    home.ticker.schedule()
    await asyncio.sleep(0)
    seconds += 60
    clock.advance(60_000)
    home.ticker._sweep()
    text = await home.engine.figures.prometheus()
    assert "bunqueue_pull_duration_seconds_count 1" in text
    assert "bunqueue_pull_duration_seconds_sum 0.0" in text
    await home.stop()


class NotedOutlet:
    """A connection whose replies leave a note."""

    is_durable = False

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def flush(self) -> None:
        self._notes.append("reply")

    def spoil(self, error: StorageUnavailable) -> None:
        self._notes.append("spoilt")

    def hold(self) -> Release:
        raise AssertionError("nothing here is durable")


@pytest.mark.parametrize(
    ("is_pushed", "order"), [(True, ["log", "rows", "reply"]), (False, ["reply", "log"])], ids=["push", "claim"]
)
async def test_only_replies_that_report_nothing_stored_leave_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pushed: bool, order: list[str]
) -> None:
    home = EmbeddedEngine(tmp_path / "jobs.db")
    await home.start()
    backend, ticker, notes = home.engine.backend, home.ticker, []  # type: ignore[var-annotated]
    job = PushEntry(data=msgspec.Raw(b"\x01"))
    run_now(backend.insert_one("q", job))
    ticker._end()
    noted(monkeypatch, backend._log, "record", notes, "log")  # type: ignore[union-attr]
    noted(monkeypatch, backend._journal, "commit", notes, "rows")  # type: ignore[union-attr]
    if is_pushed:
        run_now(backend.insert_one("q", job))
    assert len(run_now(backend.claim("q", Demand()))) == 1
    ticker.stir(NotedOutlet(notes))
    ticker._end()
    assert notes == order
    await home.stop()


async def test_a_job_whose_reply_has_left_stays_with_its_worker_whatever_the_end_of_the_tick_brings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the tick serves who waits, and may find a job past its ttl: that is stored, and may be refused."""

    def refuse(*_: object) -> None:
        raise StorageUnavailable("the disk refuses")

    clock, notes, gone = ManualClock(), [], {}  # type: ignore[var-annotated]
    home = EmbeddedEngine(tmp_path / "jobs.db", clock)
    await home.start()
    engine, backend, ticker = home.engine, home.engine.backend, home.ticker
    run_now(backend.set_concurrency("busy", 1))
    for queue, options in (("busy", {}), ("busy", {"ttl": 500, "priority": 1}), ("q", {})):
        run_now(backend.insert_one(queue, PushEntry(data=msgspec.Raw(b"\x01"), **options)))  # type: ignore[arg-type]
        if not gone:
            assert len(run_now(backend.claim("busy", Demand(holder=gone)))) == 1
    waiter = engine.pull("busy", Demand(), 60_000).send(None)
    waiter.resume = lambda claims: notes.append("served")
    ticker._end()
    clock.advance(1000)
    run_now(backend.release(gone))
    assert len(run_now(backend.claim("q", Demand()))) == 1
    ticker.stir(NotedOutlet(notes))
    monkeypatch.setattr(backend._journal, "commit", refuse)  # type: ignore[union-attr]
    ticker._end()
    assert notes == ["reply", "served"]
    monkeypatch.undo()
    assert backend.probe() is True
    assert run_now(backend.claim("q", Demand())) == []
    await home.stop()


async def test_events_that_wait_for_the_disk_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(events: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    home = EmbeddedEngine(tmp_path / "jobs.db")
    await home.start()
    run_now(home.engine.backend.insert_one("q", PushEntry(data=msgspec.Raw(b"\x01"))))
    home.ticker._end()
    with monkeypatch.context() as full:
        full.setattr(home.engine.backend._log, "record", refuse)  # type: ignore[union-attr]
        run_now(home.engine.backend.claim("q", Demand()))
        for _ in range(3):
            home.ticker._end()
    (told,) = [line for line in caplog.messages if "wait for the disk" in line]
    assert told.startswith("events wait for the disk: Storage is full")
    await home.stop()


async def test_a_disk_that_refuses_at_the_end_does_not_keep_the_file_from_being_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise StorageUnavailable("the disk refuses")

    home = EmbeddedEngine(tmp_path / "jobs.db")
    await home.start()
    run_now(home.engine.backend.pause("q"))
    with monkeypatch.context() as full:
        full.setattr(home.engine.backend._journal, "commit", refuse)  # type: ignore[union-attr]
        await home.stop()
    assert "could not be stored: the disk refuses" in caplog.text
    again = EmbeddedEngine(tmp_path / "jobs.db")
    await again.start()
    await again.stop()


def noted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, notes: list[str], note: str) -> None:
    """Have a method leave a note when it is called."""
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        notes.append(note)
        return method(*args)

    monkeypatch.setattr(owner, name, call)
