"""Logging: records say which job they belong to, and nothing else about logging is touched."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest

from headrace import Headrace, JobFields
from headrace.cli.logs import JsonLines
from headrace.testing.bench import put_on_bench

log = logging.getLogger("shop.mail")


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(JobFields())
    return caplog


def make_app() -> Headrace:
    app = Headrace("memory://")

    @app.task(queue="mail")
    async def on_the_loop() -> None:
        await asyncio.create_task(below())

    @app.task(queue="mail")
    def in_a_thread() -> None:
        log.info("hello", extra={"queue": "mine"})

    @app.task(queue="mail")
    async def fails() -> None:
        raise ValueError("no")

    return app


async def below() -> None:
    log.info("hello")


@pytest.mark.parametrize(("task", "queue"), [("on_the_loop", "mail"), ("in_a_thread", "mine")])
async def test_records_in_and_below_a_handler_name_the_job(
    records: pytest.LogCaptureFixture, task: str, queue: str
) -> None:
    app = make_app()
    with put_on_bench(app) as bench:
        job = await app.tasks[task].enqueue()
        await bench.drain()
    (record,) = [record for record in records.records if record.name == "shop.mail"]
    found = {name: record.__dict__[name] for name in ("job_id", "queue", "task", "attempt")}
    assert found == {"job_id": job.id, "queue": queue, "task": task, "attempt": 1}
    line = json.loads(JsonLines().format(record))
    assert line.items() >= found.items()


def test_a_field_that_is_no_json_is_written_as_text() -> None:
    record = logging.makeLogRecord({"msg": "hello", "job_id": UUID(int=7), "queue": Path("mail")})
    line = json.loads(JsonLines().format(record))
    assert (line["job_id"], line["queue"]) == (str(UUID(int=7)), "mail")


async def test_the_record_of_a_failure_names_the_job(records: pytest.LogCaptureFixture) -> None:
    app = make_app()
    with put_on_bench(app) as bench:
        job = await app.tasks["fails"].enqueue()
        await bench.drain()
    (record,) = [record for record in records.records if record.name == "headrace.worker"]
    assert (record.__dict__["job_id"], record.__dict__["attempt"]) == (job.id, 1)


async def test_outside_of_jobs_records_stay_as_they_are(records: pytest.LogCaptureFixture) -> None:
    app = make_app()
    with put_on_bench(app) as bench:
        await app.tasks["on_the_loop"].enqueue()
        await bench.drain()
    log.info("outside")
    assert "job_id" not in records.records[-1].__dict__


def test_a_program_that_configures_no_logging_sees_none_of_ours() -> None:
    program = """
import logging
from headrace import Headrace
root = logging.getLogger()
before = (root.level, list(root.handlers), logging.getLogRecordFactory(), logging.getLoggerClass())
app = Headrace("memory://")
with app.sync() as s:
    s.queue("q").add("job")
logging.getLogger("headrace.worker").warning("not shown")
assert before == (root.level, list(root.handlers), logging.getLogRecordFactory(), logging.getLoggerClass())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("", "")
