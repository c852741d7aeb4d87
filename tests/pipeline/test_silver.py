"""What becomes of single jobs in silver. All of them are told in one go; each test looks at its own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from headrace.pipeline.schemas import EVENTS, columns
from tests.pipeline.conftest import Chronicle
from tests.scale import scaled

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MIDNIGHT = 1_793_491_200_000  # 2026-11-01 00:00 UTC


def event(job: str, seq: int, word: str, at: int, **more: Any) -> dict[str, Any]:
    moment = datetime.fromtimestamp((MIDNIGHT + at) / 1000, UTC)
    return {"shard": 0, "epoch": 1, "seq": seq, "ts": moment, "event": word, "queue": "q", "job_id": job, **more}


def frame(spark: SparkSession, events: list[dict[str, Any]]) -> DataFrame:
    rows = [tuple(one.get(name) for name in columns(EVENTS)) for one in events]
    ddl = ", ".join(f"{name} {kind}" for name, kind in columns(EVENTS).items())
    return spark.createDataFrame(rows, ddl)


CASES: dict[str, list[dict[str, Any]]] = {
    "plain": [
        event("plain", 1, "pushed", 0, priority=3, payload_bytes=7),
        event("plain", 2, "pulled", 40, attempt=1, worker="w"),
        event("plain", 3, "completed", 140, attempt=1, worker="w"),
    ],
    "buried": [
        event("buried", 10, "pushed", 0),
        event("buried", 11, "pulled", 5, attempt=1, worker="first"),
        event("buried", 12, "failed", 10, attempt=1, worker="first", error="E: 1", terminal=False),
        event("buried", 13, "retried", 10, attempt=2, delay_ms=500),
        event("buried", 14, "promoted", 510),
        event("buried", 15, "pulled", 600, attempt=2, worker="second"),
        event("buried", 16, "failed", 700, attempt=2, error="E: 2", terminal=True),
    ],
    "delayed": [
        event("delayed", 20, "pushed", 0, delay_ms=1_000),
        event("delayed", 21, "promoted", 1_000),
        event("delayed", 22, "pulled", 1_250, attempt=1),
        event("delayed", 23, "completed", 1_251, attempt=1),
    ],
    "blocked": [
        event("blocked", 30, "pushed", 0),
        event("blocked", 31, "waiting", 5_000, prev="waiting-children"),
        event("blocked", 32, "pulled", 5_100, attempt=1),
    ],
    "released": [
        event("released", 40, "pushed", 0),
        event("released", 41, "pulled", 1, attempt=1, worker="a"),
        event("released", 42, "released", 2, attempt=1, worker="a"),
        event("released", 43, "pulled", 3, attempt=1, worker="b"),
        event("released", 44, "completed", 4, attempt=1),
    ],
    "stalled": [
        event("stalled", 50, "pushed", 0),
        event("stalled", 51, "pulled", 0, attempt=1, worker="a"),
        event("stalled", 52, "stalled", 30_000, attempt=1, stalls=1, action="retry"),
        event("stalled", 53, "completed", 31_000, attempt=2),  # late, and nobody else had it
    ],
    "revived": [
        event("revived", 60, "pushed", 0),
        event("revived", 61, "pulled", 1, attempt=1),
        event("revived", 62, "failed", 2, attempt=1, error="E", terminal=True),
        event("revived", 63, "dlq-retried", 90_000, prev="failed"),
        event("revived", 64, "pulled", 90_010, attempt=1),
        event("revived", 65, "completed", 90_020, attempt=1),
    ],
    "cut": [event("cut", 70, "pulled", 5, attempt=2), event("cut", 71, "completed", 9, attempt=2)],
    "cancelled": [event("cancelled", 80, "pushed", 0), event("cancelled", 81, "removed", 7, prev="waiting")],
    "cleaned": [
        event("cleaned", 90, "pushed", 0),
        event("cleaned", 91, "pulled", 1, attempt=1),
        event("cleaned", 92, "completed", 2, attempt=1),
        event("cleaned", 93, "removed", 99_000, prev="completed"),
    ],
    "emptied": [
        event("drained", 100, "pushed", 0, queue="gone"),
        event("at work", 101, "pushed", 0, queue="gone"),
        event("at work", 102, "pulled", 1, queue="gone", attempt=1),
        event("", 103, "drained", 50, queue="gone", last_seq=102),
        event("after", 104, "pushed", 60, queue="gone"),
        event("", 105, "obliterated", 70, queue="gone", last_seq=103),
    ],
    "forgotten": [  # the server was killed, drained the queue after its start, and had handed out one job before
        event("forgotten", 400, "pushed", 0, queue="killed"),
        event("forgotten", 401, "pulled", 10, queue="killed", attempt=1, worker="w"),
        event("remembered", 402, "pushed", 20, queue="killed"),
        event("remembered", 403, "pulled", 90, queue="killed", attempt=1, worker="w"),
        event("", 404, "drained", 100, queue="killed", first_seq=403, last_seq=403),
    ],
    "lost": [
        event("lost", 120, "pushed", 0),
        event("lost", 121, "pulled", 10, attempt=1, worker="w"),
        event("lost", 122, "stalled", 30_010, attempt=1),
        event("lost", 123, "failed", 30_010, attempt=1, error="stalled too often", terminal=True),
    ],
    "reused": [
        one
        for n in range(0, 60, 3)
        for one in (
            event("reused", 200 + n, "pushed", n),
            event("reused", 201 + n, "pulled", n + 1, attempt=1),
            event("reused", 202 + n, "completed", n + 2, attempt=1),
        )
    ][:-1],
    "stepped back": [
        event("stepped back", 300, "pushed", 0),
        event("stepped back", 301, "pulled", 100, attempt=1, worker="w"),
        event("stepped back", 302, "waiting-children", 150),
        event("stepped back", 303, "waiting", 5_000, prev="waiting-children"),
        event("stepped back", 304, "pulled", 5_100, attempt=1, worker="w"),
        event("stepped back", 305, "completed", 5_200, attempt=1),
    ],
    "put off": [
        event("put off", 310, "pushed", 0),
        event("put off", 311, "delayed", 10, delay_ms=60_000),
        event("put off", 312, "promoted", 60_010),
        event("put off", 313, "pulled", 60_110, attempt=1),
        event("put off", 314, "delayed", 60_120, delay_ms=500),
        event("put off", 315, "pulled", 61_000, attempt=1),
        event("put off", 316, "completed", 61_001, attempt=1),
    ],
    "hurried": [
        event("hurried", 320, "pushed", 0, delay_ms=3_600_000),
        event("hurried", 321, "promoted", 1_000),
        event("hurried", 322, "pulled", 1_500, attempt=1),
        event("hurried", 323, "completed", 1_501, attempt=1),
    ],
    "interrupted": [  # the server was killed in between, and forgot who had it
        event("interrupted", 330, "pushed", 0),
        event("interrupted", 331, "pulled", 10, attempt=1, worker="a"),
        event("interrupted", 332, "pulled", 60_000, attempt=1, worker="b"),
        event("interrupted", 333, "completed", 61_000, attempt=1, worker="b"),
    ],
    "retried on Valkey": [  # where only the attempt that ended last has a beginning
        event("retried on Valkey", 340, "pushed", 0),
        event("retried on Valkey", 341, "failed", 500, error="E", terminal=False),
        event("retried on Valkey", 342, "retried", 500, prev="failed", delay_ms=3_600_000),
        event("retried on Valkey", 343, "promoted", 3_600_500),
        event("retried on Valkey", 344, "pulled", 3_600_600),
        event("retried on Valkey", 345, "completed", 3_600_700),
    ],
    "delayed on Valkey": [  # where a push does not tell the delay
        event("delayed on Valkey", 350, "pushed", 0),
        event("delayed on Valkey", 351, "promoted", 60_000),
        event("delayed on Valkey", 352, "pulled", 60_300),
        event("delayed on Valkey", 353, "completed", 60_400),
    ],
    "revived on Valkey": [  # where that is told of no job
        event("revived on Valkey", 360, "pushed", 0),
        event("revived on Valkey", 361, "pulled", 10),
        event("revived on Valkey", 362, "failed", 20, error="E", terminal=True),
        event("revived on Valkey", 363, "pulled", 90_000),
        event("revived on Valkey", 364, "completed", 90_010),
        event("revived on Valkey", 365, "removed", 99_000),
    ],
    "succeeded": [
        event("succeeded", 370, "pushed", 0, queue="reused"),  # how it ended is not in the log
        event("succeeded", 371, "pushed", 1_000, queue="reused"),
        event("", 372, "obliterated", 2_000, queue="reused", last_seq=371),
    ],
    "set back": [  # the clock, twice
        event("set back", 380, "pushed", 90),
        event("set back", 381, "pulled", 60, attempt=1),
        event("set back", 382, "completed", 30, attempt=1),
    ],
    "midnight": [
        event("midnight", 110, "pushed", -60_000),
        event("midnight", 111, "pulled", -1_000, attempt=1, worker="night"),
        event("midnight", 112, "completed", 2_000, attempt=1),
    ],
}


@pytest.fixture(scope="module")
def told(spark: SparkSession) -> dict[str, dict[str, list[Any]]]:
    """Jobs and attempts by job id, in order. Every event comes three times and in no order."""
    from headrace.pipeline import silver

    events = frame(spark, [one for case in CASES.values() for one in case for _ in range(3)])
    shuffled = events.orderBy("queue", "event", "seq")
    lives = silver.judged(silver.lives_of(silver.by_life(shuffled)), silver.clearings(shuffled)).persist()
    made = {
        "jobs": silver.jobs_of(lives).orderBy("first_seq"),
        "attempts": silver.attempts_of(lives).orderBy("first_seq"),
        "carried": silver.carried(lives).orderBy("seq"),
    }
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in made}
    for name, table in made.items():
        for row in table.collect():
            found[name].setdefault(row["job_id"], []).append(row)
    lives.unpersist()
    return found


def only(rows: list[Any]) -> Any:
    (row,) = rows
    return row


def test_a_plain_job_has_its_times(told: Any) -> None:
    job = only(told["jobs"]["plain"])
    assert (job.outcome, job.wait_ms, job.run_ms, job.busy_ms, job.total_ms) == ("completed", 40, 100, 100, 140)
    assert (job.attempts, job.failures, job.stalls, job.priority, job.last_worker) == (1, 0, 0, 3, "w")
    assert (job.first_seq, job.last_seq, job.payload_bytes) == (1, 3, 7)


def test_a_dead_letter_keeps_its_last_worker_and_error(told: Any) -> None:
    job = only(told["jobs"]["buried"])
    assert (job.outcome, job.last_worker, job.last_error) == ("dlq", "second", "E: 2")
    assert (job.attempts, job.failures, job.run_ms, job.busy_ms, job.backoff_ms) == (2, 2, 100, 105, 500)
    assert job.error_signature == "E: <n>"


def test_a_retry_counts_once_and_has_its_own_attempt(told: Any) -> None:
    first, second = told["attempts"]["buried"]
    assert (first.round, first.attempt, first.worker, first.outcome, first.run_ms) == (1, 1, "first", "failed", 5)
    assert (second.round, second.attempt, second.worker, second.outcome, second.run_ms) == (
        2,
        2,
        "second",
        "failed",
        100,
    )
    assert (first.error, second.error) == ("E: 1", "E: 2")


def test_the_delay_that_was_asked_for_is_no_wait(told: Any) -> None:
    job = only(told["jobs"]["delayed"])
    assert (job.wait_ms, job.delay_ms, job.total_ms) == (250, 1_000, 1_251)


def test_waiting_for_children_is_no_wait_for_a_worker(told: Any) -> None:
    job = only(told["jobs"]["blocked"])
    assert (job.wait_ms, job.outcome, job.finished_at) == (100, None, None)
    assert only(told["attempts"]["blocked"]).ended_at is None


def test_a_job_given_back_was_not_attempted(told: Any) -> None:
    job = only(told["jobs"]["released"])
    assert (job.attempts, job.outcome, job.last_worker) == (1, "completed", "b")
    assert [row.outcome for row in told["attempts"]["released"]] == ["released", "completed"]


def test_a_stalled_attempt_ends_with_the_stall_even_if_the_job_completes_late(told: Any) -> None:
    job = only(told["jobs"]["stalled"])
    assert (job.outcome, job.stalls, job.total_ms) == ("completed", 1, 31_000)
    attempt = only(told["attempts"]["stalled"])
    assert (attempt.outcome, attempt.run_ms) == ("stalled", 30_000)


def test_a_revived_dead_letter_begins_a_second_life(told: Any) -> None:
    first, second = told["jobs"]["revived"]
    assert (first.outcome, second.outcome) == ("dlq", "completed")
    assert (first.first_seq, second.first_seq) == (60, 63)
    assert (second.wait_ms, second.total_ms, second.last_error) == (10, 20, None)
    assert [row.life_seq for row in told["attempts"]["revived"]] == [60, 63]


def test_a_job_that_stalled_for_the_last_time_leaves_its_error_with_that_attempt(told: Any) -> None:
    job = only(told["jobs"]["lost"])
    assert (job.outcome, job.failures, job.stalls, job.last_error) == ("dlq", 1, 1, "stalled too often")
    attempt = only(told["attempts"]["lost"])
    assert (attempt.outcome, attempt.run_ms, attempt.error) == ("stalled", 30_000, "stalled too often")


def test_an_id_that_is_used_again_and_again_has_a_life_for_each_use(told: Any) -> None:
    *ended, last = told["jobs"]["reused"]
    assert [(job.first_seq, job.last_seq, job.outcome) for job in ended] == [
        (seq, seq + 2, "completed") for seq in range(200, 257, 3)
    ]
    assert (last.first_seq, last.outcome) == (257, None)


def test_a_job_waits_for_its_first_worker_only_also_if_it_waits_for_children_later(told: Any) -> None:
    job = only(told["jobs"]["stepped back"])
    assert (job.wait_ms, job.run_ms, job.attempts, job.total_ms) == (100, 100, 1, 5_200)
    assert [row.outcome for row in told["attempts"]["stepped back"]] == ["waiting-children", "completed"]


def test_a_delay_that_is_changed_is_no_wait_either(told: Any) -> None:
    job = only(told["jobs"]["put off"])
    assert (job.wait_ms, job.attempts, job.outcome) == (100, 1, "completed")
    assert only(told["jobs"]["hurried"]).wait_ms == 500
    assert only(told["jobs"]["delayed on Valkey"]).wait_ms == 300


def test_an_attempt_that_nobody_ended_is_over_when_the_job_is_handed_out_again(told: Any) -> None:
    job = only(told["jobs"]["interrupted"])
    assert (job.attempts, job.run_ms, job.busy_ms, job.last_worker) == (1, 1_000, 60_990, "b")
    first, second = told["attempts"]["interrupted"]
    assert (first.worker, first.outcome, first.run_ms) == ("a", "released", 59_990)
    assert (second.worker, second.outcome, second.run_ms) == ("b", "completed", 1_000)


def test_a_job_whose_first_attempt_has_no_beginning_has_no_wait(told: Any) -> None:
    job = only(told["jobs"]["retried on Valkey"])
    assert (job.wait_ms, job.failures, job.total_ms) == (None, 1, 3_600_700)


def test_what_happens_after_the_end_of_a_job_is_another_life(told: Any) -> None:
    """A run that is told of it later knows nothing of the end, and must come to the same."""
    first, second = told["jobs"]["revived on Valkey"]
    assert (first.outcome, first.total_ms, first.attempts) == ("dlq", 20, 1)
    assert (second.outcome, second.added_at, second.run_ms, second.first_seq) == ("completed", None, 10, 363)
    assert [row.life_seq for row in told["attempts"]["revived on Valkey"]] == [360, 363]


def test_a_life_ends_before_its_successor_begins_also_if_the_queue_is_emptied_later(told: Any) -> None:
    first, second = told["jobs"]["succeeded"]
    assert (first.outcome, first.total_ms) == ("removed", 0)
    assert (second.outcome, second.total_ms) == ("removed", 1_000)


def test_only_the_events_of_lives_that_go_on_are_kept_for_later_each_once(told: Any) -> None:
    assert {job: [row.seq for row in rows] for job, rows in told["carried"].items()} == {
        "after": [104],
        "blocked": [30, 31, 32],
        "remembered": [402, 403],
        "reused": [257, 258],
    }


def test_a_job_whose_beginning_is_not_in_the_log_has_no_wait(told: Any) -> None:
    job = only(told["jobs"]["cut"])
    assert (job.added_at, job.wait_ms, job.total_ms, job.run_ms, job.outcome) == (None, None, None, 4, "completed")


def test_a_cancelled_job_was_removed_and_never_ran(told: Any) -> None:
    job = only(told["jobs"]["cancelled"])
    assert (job.outcome, job.total_ms, job.attempts, job.wait_ms) == ("removed", 7, 0, None)
    assert "cancelled" not in told["attempts"]


def test_cleaning_up_afterwards_changes_nothing(told: Any) -> None:
    job = only(told["jobs"]["cleaned"])
    assert (job.outcome, job.total_ms, job.last_seq) == ("completed", 2, 92)


def test_emptying_a_queue_ends_the_jobs_that_were_in_it(told: Any) -> None:
    drained, at_work, after = (only(told["jobs"][name]) for name in ("drained", "at work", "after"))
    assert (drained.outcome, drained.total_ms) == ("removed", 50)
    assert (at_work.outcome, at_work.total_ms) == ("removed", 70)  # not drained, but obliterated
    assert only(told["attempts"]["at work"]).outcome == "removed"
    assert after.outcome is None  # pushed while the queue was being emptied


def test_draining_a_queue_ends_jobs_whose_claim_the_server_has_forgotten(told: Any) -> None:
    job = only(told["jobs"]["forgotten"])
    assert (job.outcome, job.total_ms, only(told["attempts"]["forgotten"]).outcome) == ("removed", 100, "removed")
    assert only(told["jobs"]["remembered"]).outcome is None


def test_a_clock_that_was_set_back_makes_no_negative_times(told: Any) -> None:
    job = only(told["jobs"]["set back"])
    assert (job.wait_ms, job.run_ms, job.busy_ms, job.total_ms) == (0, 0, 0, 0)
    assert only(told["attempts"]["set back"]).run_ms == 0


def test_a_job_belongs_to_the_day_on_which_it_ended_in_utc(told: Any) -> None:
    assert str(only(told["jobs"]["midnight"]).finished_date) == "2026-11-01"
    assert str(only(told["attempts"]["midnight"]).ended_date) == "2026-11-01"


def test_what_was_taken_back_is_left_out(spark: SparkSession) -> None:
    from headrace.pipeline import silver

    events = [event("a", seq, "pushed", seq) for seq in (1, 2, 3, 4)]
    events += [event("b", 3, "pushed", 9) | {"epoch": 2}, event("b", 4, "pulled", 10) | {"epoch": 2}]
    kept = silver.without_retracted(frame(spark, events)).select("epoch", "seq").collect()
    assert sorted((row.epoch, row.seq) for row in kept) == [(1, 1), (1, 2), (2, 3), (2, 4)]


@pytest.mark.parametrize("seed", range(scaled(1, 2)))
def test_order_and_repetition_of_events_change_nothing(spark: SparkSession, chronicle: Chronicle, seed: int) -> None:
    from pyspark.sql import functions as f

    from headrace.pipeline import runs, silver

    events = runs.read_bronze(spark, chronicle.lake)
    assert events is not None
    again = events.unionByName(events.sample(0.3, seed=seed)).orderBy(f.rand(seed))
    told = silver.judged(silver.lives_of(silver.by_life(again)), silver.clearings(events)).persist()
    for table, make in (("jobs", silver.jobs_of), ("attempts", silver.attempts_of)):
        expected = (runs.read_jobs if table == "jobs" else runs.read_attempts)(spark, chronicle.lake)
        ours, theirs = make(told).drop("finished_date", "ended_date"), expected.drop("finished_date", "ended_date")
        assert ours.columns == theirs.select(*ours.columns).columns
        assert {*map(repr, ours.collect())} == {*map(repr, theirs.select(*ours.columns).collect())}
    told.unpersist()
