"""Spark's data source against a running server: reading and writing, batch and stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.pipeline.options import KINDS
from headrace.pipeline.schemas import EVENTS, JOB_ROWS, LETTER_ROWS, RESULT_ROWS, arrow
from tests.protocol.steps import bury, push
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def capturing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--capture", str(folder / "log"), "--capture-segment-ms", "200")
    with ServerProcess(folder / "headrace.db", *flags) as server:
        with server.client() as client:
            for n in range(30):
                push(client, "mail", data={"n": n}, name="send")
            for _ in range(20):
                job = client.ok("PULL", queue="mail")["job"]
                client.ok("ACK", id=job["id"], result={"sum": job["data"]["n"]})
            bury(client, "sms")
        yield server


@pytest.fixture
def client(capturing: ServerProcess) -> Iterator[Client]:
    with capturing.client() as connected:
        yield connected


def url(server: ServerProcess) -> str:
    return f"headrace://127.0.0.1:{server.port}"


def load(spark: SparkSession, server: ServerProcess, **options: Any) -> DataFrame:
    return spark.read.format("headrace").option("url", url(server)).options(**options).load()


def keys(frame: DataFrame) -> list[tuple[int, int, int]]:
    return sorted((row.shard, row.epoch, row.seq) for row in frame.select("shard", "epoch", "seq").collect())


def everything(client: Client) -> list[tuple[int, int, int]]:
    lines = client.ok("Events", limit=20_000)["lines"].splitlines()
    return [(0, event["epoch"], event["seq"]) for event in map(json.loads, lines)]


def test_arrow_and_spark_agree_on_every_table(spark: SparkSession) -> None:
    from pyspark.sql.pandas.types import from_arrow_schema

    from headrace.pipeline.schemas import columns

    for table in (EVENTS, JOB_ROWS, RESULT_ROWS, LETTER_ROWS):
        ddl = ", ".join(f"{name} {kind}" for name, kind in columns(table).items())
        assert from_arrow_schema(arrow(table)) == spark.createDataFrame([], ddl).schema


def test_events_are_read_once_in_any_number_of_partitions(
    spark: SparkSession, capturing: ServerProcess, client: Client
) -> None:
    expected = everything(client)
    for partitions in (1, 3):
        frame = load(spark, capturing, numPartitions=partitions)
        assert keys(frame) == expected
        assert frame.rdd.getNumPartitions() == partitions


def offset(client: Client, seq: int) -> dict[str, dict[str, int]]:
    return {"0": {"epoch": client.ok("EventSegments")["epoch"], "seq": seq}}


def test_events_can_be_chosen_by_queue_columns_and_offset(
    spark: SparkSession, capturing: ServerProcess, client: Client
) -> None:
    offsets = {"startingOffset": json.dumps(offset(client, 2)), "endingOffset": json.dumps(offset(client, 4))}
    frame = load(spark, capturing, queue="mail", columns="seq, event", **offsets)
    assert [tuple(row) for row in frame.orderBy("seq").collect()] == [(3, "pushed"), (4, "pushed")]
    assert frame.columns == ["seq", "event"]


def test_jobs_results_and_dead_letters_are_tables(spark: SparkSession, capturing: ServerProcess) -> None:
    jobs = load(spark, capturing, kind="jobs", queue="mail", fetchSize=7, numPartitions=3).collect()
    assert sorted(json.loads(job.data)["n"] for job in jobs) == list(range(30))
    assert {job.state for job in jobs} == {"completed", "waiting"}
    assert len(load(spark, capturing, kind="jobs", queue="mail", state="completed").collect()) == 20
    results = load(spark, capturing, kind="results").collect()
    assert sorted(json.loads(row.result)["sum"] for row in results) == list(range(20))
    (letter,) = load(spark, capturing, kind="dlq").collect()
    assert (letter.queue, letter.attempts) == ("sms", 1)


def test_what_a_server_has_none_of_is_an_empty_table(spark: SparkSession, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "empty.db", "--capture", str(tmp_path / "log")) as server:
        assert {kind: load(spark, server, kind=kind).count() for kind in KINDS} == dict.fromkeys(KINDS, 0)


def test_conditions_on_queue_and_state_are_left_to_the_server(spark: SparkSession, capturing: ServerProcess) -> None:
    jobs = load(spark, capturing, kind="jobs").where("queue = 'mail' AND state = 'completed' AND job_name = 'send'")
    assert jobs.count() == 20
    plan = jobs._jdf.queryExecution().executedPlan().toString()
    assert "= send" in plan
    assert "= mail" not in plan
    assert "= completed" not in plan
    events = load(spark, capturing).where("queue = 'sms'")
    assert {row.queue for row in events.collect()} == {"sms"}
    off = load(spark, capturing, kind="jobs", pushdown="off").where("queue = 'mail' AND state = 'completed'")
    assert off.count() == 20
    assert load(spark, capturing, kind="jobs", queue="sms").where("queue = 'mail'").count() == 0
    assert load(spark, capturing, kind="jobs").where("queue = ''").count() == 0
    assert load(spark, capturing, kind="jobs").where("state = 'nonsense'").count() == 0


def test_a_token_is_in_no_plan(
    spark: SparkSession, capturing: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ({"token": "secret"}, {"url": f"{url(capturing)}?token=secret"}):
        frame = load(spark, capturing, kind="jobs", **options)
        assert frame.count() > 0
        frame.explain("formatted")
        frame.explain(extended=True)
        assert "secret" not in frame._jdf.queryExecution().toString()
    shown = capsys.readouterr().out
    assert "headrace" in shown
    assert "secret" not in shown


def test_a_wrong_option_is_an_error_that_says_so(spark: SparkSession, capturing: ServerProcess) -> None:
    with pytest.raises(Exception, match="kind must be one of"):
        load(spark, capturing, kind="jbos").collect()
    with pytest.raises(Exception, match="the option columns names"):
        load(spark, capturing, columns="seq,nope").collect()


# -- streams -------------------------------------------------------------------------------------------------------


def stream(
    spark: SparkSession, server: ServerProcess, folder: Path, **options: Any
) -> tuple[list[int], list[tuple[int, int, int]], list[dict[str, Any]]]:
    """Read all that is there now as a stream: sizes of its batches, what it brought, and what it reported."""
    sizes: list[int] = []
    found: list[tuple[int, int, int]] = []

    def keep(batch: DataFrame, number: int) -> None:
        brought = keys(batch)
        sizes.append(len(brought))
        found.extend(brought)

    reader = spark.readStream.format("headrace").option("url", url(server)).options(**options)
    writer = reader.load().writeStream.foreachBatch(keep).option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(100)
        return sizes, sorted(found), [json.loads(progress.json) for progress in query.recentProgress]
    finally:
        query.stop()


def test_a_stream_reads_everything_in_bounded_batches_and_goes_on_from_its_checkpoint(
    spark: SparkSession, capturing: ServerProcess, client: Client, tmp_path: Path
) -> None:
    expected = everything(client)
    sizes, found, progress = stream(spark, capturing, tmp_path, maxEventsPerTrigger=30)
    assert found == expected
    assert sizes == [30, 30, len(expected) - 60]
    assert progress[-1]["sources"][0]["endOffset"] == offset(client, len(expected))
    assert progress[-1]["sources"][0]["latestOffset"] == offset(client, len(expected))
    push(client, "mail")
    _, found, _ = stream(spark, capturing, tmp_path, maxEventsPerTrigger=30, consumer="tests")
    assert found == everything(client)[len(expected) :]
    assert found


def test_a_stream_stops_where_events_were_dropped_unless_told_to_go_on(spark: SparkSession, tmp_path: Path) -> None:
    flags = ("--capture", str(tmp_path / "log"), "--capture-segment-ms", "100", "--capture-keep-bytes", "0")
    with ServerProcess(tmp_path / "loss.db", *flags) as server, server.client() as client:
        client.ok("EventPosition", consumer="holder", seq=0)
        push(client, "q")
        stream(spark, server, tmp_path)
        client.ok("ForgetEventPosition", consumer="holder")
        while client.ok("EventSegments")["first"] < 5:
            push(client, "q")
        client.ok("EventPosition", consumer="holder", seq=client.ok("EventSegments")["last"])
        push(client, "q")
        with pytest.raises(Exception, match="were dropped before they were read"):
            stream(spark, server, tmp_path)
        _, found, _ = stream(spark, server, tmp_path, failOnDataLoss="false")
        assert found


# -- writing -------------------------------------------------------------------------------------------------------


def written(client: Client, queue: str) -> Iterator[int]:
    after: int | None = 0
    while after is not None:
        page = client.ok("ScanJobs", queue=queue, after=after, limit=10_000)
        yield from (job["data"]["id"] for job in page["jobs"])
        after = page.get("next")


def write(frame: DataFrame, server: ServerProcess, **options: Any) -> None:
    frame.write.format("headrace").mode("append").option("url", url(server)).options(**options).save()


def test_rows_become_jobs_once_however_often_they_are_written(
    spark: SparkSession, capturing: ServerProcess, client: Client, queue: str
) -> None:
    frame = spark.range(500).selectExpr("id", "concat('user-', id) AS user", "int(id % 3) AS priority")
    for size in (100, 37):
        write(frame.repartition(2), capturing, queue=queue, idColumns="id", batchSize=size)
    jobs = client.ok("GetJobs", queue=queue, limit=1000)["jobs"]
    assert sorted(job["data"]["id"] for job in jobs) == list(range(500))
    assert {job["data"]["user"] for job in jobs} == {f"user-{n}" for n in range(500)}
    assert all(job["priority"] == job["data"]["id"] % 3 for job in jobs)


def test_even_jobs_that_are_done_and_gone_are_not_written_again(
    spark: SparkSession, capturing: ServerProcess, client: Client, queue: str
) -> None:
    frame = spark.range(3).selectExpr("id")
    write(frame, capturing, queue=queue, idColumns="id")
    for _ in range(3):
        job = client.ok("PULL", queue=queue)["job"]
        client.ok("ACK", id=job["id"], removeOnComplete=True)
    write(frame, capturing, queue=queue, idColumns="id")
    assert client.ok("PULL", queue=queue)["job"] is None
    write(frame, capturing, queue=queue, idColumns="id", pipeline="another")
    assert client.ok("GetJobCounts", queue=queue)["counts"]["waiting"] == 3


def test_a_task_that_dies_half_way_and_is_tried_again_adds_nothing_twice(
    spark: SparkSession, capturing: ServerProcess, client: Client, queue: str
) -> None:
    from pyspark import TaskContext

    rows = scaled(1_000, 500_000)
    middle = rows // 100 // 4

    def die_once(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        for n, batch in enumerate(batches):
            if n == middle and context.attemptNumber() == 0:
                raise RuntimeError("killed on purpose")
            yield batch

    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        frame = spark.range(0, rows, 1, 2).mapInArrow(die_once, "id long")
        write(frame, capturing, queue=queue, idColumns="id", batchSize=50)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert sorted(written(client, queue)) == list(range(rows))


def test_a_write_that_may_not_meet_known_rows_fails_when_it_does(
    spark: SparkSession, capturing: ServerProcess, client: Client, queue: str
) -> None:
    strict = {"queue": queue, "idColumns": "id", "onDuplicate": "fail", "batchSize": 5, "pipeline": queue}
    write(spark.range(20), capturing, **{**strict, "queue": f"{queue}-too"})
    write(spark.range(10), capturing, **strict)
    write(spark.range(10, 20), capturing, **strict)
    with pytest.raises(Exception, match="1 rows of a batch are jobs already"):
        write(spark.range(19, 25), capturing, **strict)
    assert 20 <= client.ok("GetJobCounts", queue=queue)["counts"]["waiting"] < 25
    with pytest.raises(Exception, match="onDuplicate must be one of"):
        write(spark.range(1), capturing, **{**strict, "onDuplicate": "shrug"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"idColumns": "id"}, "name the queue"),
        ({"queue": "q"}, "idColumns"),
        ({"queue": "q", "idColumns": "nope"}, "nope"),
    ],
)
def test_writing_asks_for_what_it_needs(
    spark: SparkSession, capturing: ServerProcess, options: dict[str, str], text: str
) -> None:
    with pytest.raises(Exception, match=text):
        write(spark.range(1), capturing, **options)


def test_a_stream_writes_every_row_once_also_when_a_batch_is_replayed(
    spark: SparkSession, capturing: ServerProcess, client: Client, queue: str, tmp_path: Path
) -> None:
    spark.range(40).write.parquet(str(tmp_path / "in"))
    source = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
    for attempt in ("a", "b"):  # a lost checkpoint replays everything
        writer = source.writeStream.format("headrace").option("url", url(capturing)).option("queue", queue)
        writer = writer.option("idColumns", "id").option("checkpointLocation", str(tmp_path / attempt))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(100)
    assert client.ok("GetJobCounts", queue=queue)["counts"]["waiting"] == 40


def test_spark_finds_the_source_without_registration() -> None:
    import pyspark_headrace

    assert pyspark_headrace.DefaultSource.name() == "headrace"
