"""The scheduler on the real local backend: every slot once, in phase, through restarts and clock changes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from headrace.backends.base import Demand
from headrace.backends.local.backend import LocalBackend
from headrace.clock import ManualClock
from headrace.commands.cron import Cron
from headrace.commands.workers import RegisterWorker
from headrace.engine.crons import CATCH_UP_MS, Crons
from headrace.engine.workers import WorkerRegistry
from headrace.errors import InvalidCommand
from headrace.ids import IdSource
from headrace.model import CronEntry

# 2023-11-14 22:13:20 UTC, 20 s into a minute.
START = 1_700_000_000_000
DATA = msgspec.Raw(msgspec.msgpack.encode({"n": 1}))


async def fire_due(crons: Crons) -> int:
    """Run what is due; how many runs were looked at."""
    count = 0
    for run in crons.due_runs():
        await run
        count += 1
    return count


class Scheduler:
    """A backend with its scheduler, as a server has them; `restart` opens the same file again."""

    def __init__(self, path: Path | None = None) -> None:
        self.clock = ManualClock(START)
        self.path = path

    async def start(self) -> Scheduler:
        self.backend = LocalBackend(self.path, clock=self.clock)
        await self.backend.open()
        self.workers = WorkerRegistry(self.clock, IdSource(self.clock))
        self.crons = Crons(self.backend, self.clock, self.workers)
        await self.crons.start()
        self.backend.commit()
        return self

    async def stop(self) -> None:
        await self.backend.close()

    async def restart(self, after_ms: int = 0) -> None:
        await self.stop()
        self.clock.advance(after_ms)
        await self.start()

    async def put(self, **fields: object) -> CronEntry:
        immediately = bool(fields.pop("immediately", False))
        command = Cron(**{"name": "c", "queue": "q", "data": DATA, "timezone": "UTC", **fields})  # type: ignore[arg-type]
        entry = await self.crons.upsert(command.entry(), immediately=immediately)
        self.backend.commit()
        return entry

    async def fire(self) -> int:
        count = await fire_due(self.crons)
        self.backend.commit()
        return count

    async def pass_time(self, ms: int) -> None:
        for _ in range(ms // 100):
            self.clock.advance(100)
            await self.fire()

    async def waiting(self, queue: str = "q") -> int:
        return (await self.backend.counts(queue)).waiting

    async def executions(self) -> int | None:
        entry = await self.crons.get("c")
        return None if entry is None else entry.executions


@pytest.fixture
async def scheduler(tmp_path: Path):
    made = await Scheduler(tmp_path / "crons.db").start()
    yield made
    await made.stop()


# -- planning ------------------------------------------------------------------------------------------------


async def test_the_first_run_is_the_next_match_or_one_interval_away(scheduler: Scheduler) -> None:
    by_calendar = await scheduler.put(name="calendar", schedule="*/5 * * * *")
    by_interval = await scheduler.put(name="interval", repeat_every=1_500)
    assert by_calendar.next_run == START + 100_000  # 22:15:00
    assert by_interval.next_run == START + 1_500
    assert scheduler.crons.next_due_ms() == START + 1_500


async def test_due_times_translate_to_the_monotonic_clock(scheduler: Scheduler) -> None:
    assert scheduler.crons.next_due_mono() is None
    await scheduler.put(repeat_every=1_500)
    assert scheduler.crons.next_due_mono() == 1_500
    scheduler.clock.advance(2_000)
    assert scheduler.crons.next_due_mono() == 2_000


async def test_the_expression_wins_over_the_interval(scheduler: Scheduler) -> None:
    entry = await scheduler.put(schedule="0 * * * *", repeat_every=1_000)
    assert entry.next_run == START + 2_800_000


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "Cron job must have either schedule or repeatEvery"),
        ({"repeat_every": 0}, "Cron repeatEvery must be a positive safe integer number of milliseconds"),
        ({"repeat_every": 1.5}, "Cron repeatEvery must be a positive safe integer number of milliseconds"),
        ({"schedule": "* * *"}, "Invalid cron expression: Cron expression must have 5 fields, or 6"),
        ({"schedule": "0 0 30 2 *"}, "Invalid cron expression: Cron expression has no future occurrences"),
        ({"schedule": "0 0 * * *", "timezone": "Nowhere/Here"}, "Invalid cron expression: unknown time zone"),
    ],
)
async def test_impossible_timing_is_refused_and_nothing_stored(
    scheduler: Scheduler, fields: dict[str, object], text: str
) -> None:
    with pytest.raises(InvalidCommand) as refused:
        await scheduler.put(**fields)
    assert str(refused.value).startswith(text)
    assert await scheduler.crons.list() == []


# -- running -------------------------------------------------------------------------------------------------


async def test_nothing_runs_before_its_time_and_one_job_at_its_time(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000)
    scheduler.clock.advance(999)
    assert await scheduler.fire() == 0
    scheduler.clock.advance(1)
    assert await scheduler.fire() == 1
    assert await scheduler.waiting() == 1
    assert await scheduler.fire() == 0
    entry = await scheduler.crons.get("c")
    assert entry is not None
    assert (entry.executions, entry.last_slot, entry.next_run) == (1, START + 1_000, START + 2_000)


async def test_the_job_is_the_one_that_was_described(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, priority=7, job_name="report", immediately=True)
    await scheduler.fire()
    (claim,) = await scheduler.backend.claim("q", Demand(owner="w"))
    job = msgspec.msgpack.decode(claim.job)
    assert (job["name"], job["priority"], job["data"]) == ("report", 7, {"n": 1})
    assert job["uniqueKey"] == "cron:c"


async def test_every_second_means_every_second(scheduler: Scheduler) -> None:
    await scheduler.put(schedule="* * * * * *", prevent_overlap=False)
    await scheduler.pass_time(30_000)
    assert await scheduler.waiting() == 30


async def test_the_overlap_guard_holds_jobs_back_but_counts_runs(scheduler: Scheduler) -> None:
    await scheduler.put(schedule="*/2 * * * * *")
    await scheduler.pass_time(12_000)
    assert await scheduler.waiting() == 1
    assert await scheduler.executions() == 6


async def test_an_interval_keeps_its_phase_when_the_loop_is_late(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False)
    scheduler.clock.advance(3_400)
    assert await scheduler.fire() == 3
    entry = await scheduler.crons.get("c")
    assert entry is not None
    assert entry.next_run == START + 4_000
    assert await scheduler.waiting() == 3


async def test_one_run_stands_for_all_after_a_long_sleep(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False)
    scheduler.clock.advance(10 * CATCH_UP_MS + 500)
    assert await scheduler.fire() == 1
    entry = await scheduler.crons.get("c")
    assert entry is not None
    assert entry.next_run == START + 10 * CATCH_UP_MS + 1_000


async def test_immediately_runs_at_once_when_created_but_not_when_repeated(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=60_000, immediately=True, prevent_overlap=False)
    assert await scheduler.fire() == 1
    await scheduler.put(repeat_every=60_000, immediately=True, prevent_overlap=False)
    assert await scheduler.fire() == 0
    assert await scheduler.waiting() == 1


async def test_a_schedule_is_gone_when_its_runs_are_used_up(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, max_limit=3, prevent_overlap=False)
    await scheduler.pass_time(10_000)
    assert await scheduler.waiting() == 3
    assert await scheduler.crons.get("c") is None
    assert scheduler.crons.next_due_ms() is None


@pytest.mark.parametrize("limit", [0, -1])
async def test_a_limit_that_is_not_positive_is_none(scheduler: Scheduler, limit: int) -> None:
    await scheduler.put(repeat_every=1_000, max_limit=limit, prevent_overlap=False)
    await scheduler.pass_time(5_000)
    assert await scheduler.waiting() == 5


async def test_runs_without_a_worker_are_left_out_when_asked(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, skip_if_no_worker=True, prevent_overlap=False)
    await scheduler.pass_time(3_000)
    assert (await scheduler.waiting(), await scheduler.executions()) == (0, 0)
    scheduler.workers.register(RegisterWorker(name="w", queues=["q"]))
    await scheduler.pass_time(2_000)
    assert (await scheduler.waiting(), await scheduler.executions()) == (2, 2)


async def test_a_deleted_schedule_does_not_run(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000)
    assert await scheduler.crons.delete("c")
    assert not await scheduler.crons.delete("c")
    await scheduler.pass_time(3_000)
    assert await scheduler.waiting() == 0


# -- changing ------------------------------------------------------------------------------------------------


async def test_saying_the_same_again_keeps_count_and_phase(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=10_000, prevent_overlap=False)
    await scheduler.pass_time(15_000)
    again = await scheduler.put(repeat_every=10_000, prevent_overlap=False, priority=5)
    assert (again.executions, again.next_run, again.priority) == (1, START + 20_000, 5)


async def test_a_run_that_is_due_survives_saying_the_same_again(scheduler: Scheduler) -> None:
    await scheduler.put(schedule="* * * * *")
    scheduler.clock.advance(40_005)
    await scheduler.put(schedule="* * * * *")
    assert await scheduler.fire() == 1
    assert await scheduler.waiting() == 1


async def test_new_timing_starts_from_now(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=10_000)
    scheduler.clock.advance(4_000)
    changed = await scheduler.put(repeat_every=1_000)
    assert changed.next_run == START + 5_000
    assert scheduler.crons.next_due_ms() == START + 5_000


async def test_new_timing_runs_even_after_the_clock_was_set_back(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False)
    await scheduler.pass_time(2_000)
    scheduler.clock.jump(-3_600_000)
    await scheduler.put(repeat_every=500, prevent_overlap=False)
    await scheduler.pass_time(1_000)
    assert await scheduler.waiting() == 4


# -- restarts ------------------------------------------------------------------------------------------------


async def test_a_slot_that_ran_does_not_run_again_after_a_restart(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False, skip_missed_on_restart=False)
    for _ in range(5):
        await scheduler.pass_time(1_000)
        await scheduler.restart()
        assert await scheduler.fire() == 0
    assert (await scheduler.waiting(), await scheduler.executions()) == (5, 5)


async def test_no_slot_is_lost_over_short_restarts(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False, skip_missed_on_restart=False)
    for _ in range(10):
        scheduler.clock.advance(1_000)
        await scheduler.restart()  # down when the slot came
        assert await scheduler.fire() == 1
    assert await scheduler.waiting() == 10


async def test_missed_runs_are_left_out_by_default_and_the_phase_stays(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False)
    await scheduler.restart(after_ms=5_400)
    assert await scheduler.fire() == 0
    entry = await scheduler.crons.get("c")
    assert entry is not None
    assert entry.next_run == START + 6_000


async def test_missed_runs_are_made_up_for_once_when_asked(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False, skip_missed_on_restart=False)
    await scheduler.restart(after_ms=5_400)
    assert await scheduler.fire() == 1
    assert await scheduler.fire() == 0
    entry = await scheduler.crons.get("c")
    assert entry is not None
    assert entry.next_run == START + 6_000
    assert await scheduler.waiting() == 1


async def test_a_slot_fired_by_another_server_is_not_fired_here(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False)
    other = Crons(scheduler.backend, scheduler.clock, scheduler.workers)
    await other.start()
    for _ in range(5):
        scheduler.clock.advance(1_000)
        await fire_due(other)
        await scheduler.fire()
    assert (await scheduler.waiting(), await scheduler.executions()) == (5, 5)


async def test_a_job_counts_from_the_slot_it_was_made_for(scheduler: Scheduler) -> None:
    await scheduler.put(repeat_every=1_000, prevent_overlap=False)
    scheduler.clock.advance(3_700)
    assert await scheduler.fire() == 3
    jobs = await scheduler.backend.jobs("q", None, 0, 10, True)
    created = [msgspec.msgpack.decode(job)["createdAt"] for job in jobs]
    assert created == [START + 1_000, START + 2_000, START + 3_000]
