"""OpenTelemetry: a trace goes on in the job that a call became, whoever runs it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headrace import Backoff, Flow, Headrace, JobFailed, JobFields
from headrace.contrib.otel import instrument
from headrace.testing.bench import AppBench, put_on_bench

log = logging.getLogger("shop")


class Traced:
    """An app with its tracer, and the spans that were ended."""

    def __init__(self) -> None:
        self.app = Headrace("headrace://nowhere.invalid:1", attempts=2, backoff=Backoff.fixed("1s"))
        self.provider = TracerProvider()
        self.tracer = self.provider.get_tracer("test")
        self.exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        instrument(self.app, self.provider)

        @self.app.task(queue="q")
        async def inner(n: int) -> str:
            return format_trace()

        @self.app.task(queue="q")
        async def outer() -> None:
            await inner.enqueue(1)

        @self.app.task(queue="q")
        def in_thread() -> str:
            return format_trace()

        @self.app.task(queue="q")
        async def fails() -> None:
            raise ValueError("no")

        @self.app.cron(every="1h", queue="q")
        async def hourly() -> None: ...

        self.inner, self.outer, self.in_thread, self.fails, self.hourly = inner, outer, in_thread, fails, hourly

    def spans(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is kind]


def format_trace() -> str:
    return trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.fixture
async def bench(traced: Traced) -> AsyncIterator[AppBench]:
    with put_on_bench(traced.app) as bench:
        yield bench


async def test_a_job_is_in_the_trace_of_its_call_and_linked_to_it(traced: Traced, bench: AppBench) -> None:
    with traced.tracer.start_as_current_span("request") as request:
        job = await traced.inner.enqueue(1)
    await bench.drain()
    (create,), (process,) = traced.spans(SpanKind.PRODUCER), traced.spans(SpanKind.CONSUMER)
    assert create.parent is not None
    assert create.parent.span_id == request.get_span_context().span_id
    assert process.parent is not None
    assert process.parent.span_id == create.context.span_id
    assert [link.context.span_id for link in process.links] == [create.context.span_id]
    assert await job.result() == trace.format_trace_id(request.get_span_context().trace_id)


async def test_spans_say_what_they_are(traced: Traced, bench: AppBench) -> None:
    job = await traced.inner.enqueue(1)
    await bench.drain()
    (create,), (process,) = traced.spans(SpanKind.PRODUCER), traced.spans(SpanKind.CONSUMER)
    assert (create.name, process.name) == ("create q", "process q")
    assert dict(process.attributes or {}) == {
        "messaging.system": "headrace",
        "messaging.operation.type": "process",
        "messaging.destination.name": "q",
        "messaging.message.id": job.id,
        "headrace.task": "inner",
        "headrace.attempt": 1,
    }


async def test_the_context_is_a_w3c_traceparent_beside_the_arguments(traced: Traced, bench: AppBench) -> None:
    await traced.inner.enqueue(1)
    (call,) = bench.enqueued(traced.inner)
    (create,) = traced.spans(SpanKind.PRODUCER)
    expected = f"00-{create.context.trace_id:032x}-{create.context.span_id:016x}-{create.context.trace_flags:02x}"
    assert call.data["trace"] == {"traceparent": expected}
    assert call.args == (1,)


async def test_jobs_of_jobs_batches_and_flows_stay_in_the_trace(traced: Traced, bench: AppBench) -> None:
    with traced.tracer.start_as_current_span("request"):
        await traced.outer.enqueue()
        await traced.inner.enqueue_many([(1,), (2,)])
        await traced.app.enqueue_flow(Flow(traced.inner.s(3), children=[traced.in_thread.s()]))
    await bench.drain()
    processed = traced.spans(SpanKind.CONSUMER)
    assert len(processed) == 6
    assert len({span.context.trace_id for span in processed}) == 1


async def test_a_handler_in_a_thread_sees_its_span(traced: Traced, bench: AppBench) -> None:
    job = await traced.in_thread.enqueue()
    await bench.drain()
    assert await job.result() == f"{traced.spans(SpanKind.CONSUMER)[0].context.trace_id:032x}"


async def test_every_attempt_is_a_span_and_tells_of_its_error(traced: Traced, bench: AppBench) -> None:
    job = await traced.fails.enqueue()
    for _ in range(2):
        await bench.drain()
        await bench.advance("10s")
    with pytest.raises(JobFailed):
        await job.result()
    spans = traced.spans(SpanKind.CONSUMER)
    assert [(span.attributes or {})["headrace.attempt"] for span in spans] == [1, 2]
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}
    assert [event.name for event in spans[0].events] == ["exception"]
    assert spans[0].context.trace_id == spans[1].context.trace_id


async def test_runs_of_a_schedule_begin_traces_of_their_own(traced: Traced, bench: AppBench) -> None:
    with traced.tracer.start_as_current_span("the start of a worker"):
        await bench.enter_schedules()
    for _ in range(2):
        await bench.advance("1h")
        await bench.drain()
    spans = traced.spans(SpanKind.CONSUMER)
    assert [span.parent for span in spans] == [None, None]
    assert len({span.context.trace_id for span in spans}) == 2


@pytest.mark.parametrize("data", [None, 7, {"trace": "text"}, {"trace": {"traceparent": "no such thing"}}])
async def test_foreign_data_begins_a_trace_of_its_own(traced: Traced, bench: AppBench, data: object) -> None:
    await traced.app.queue("q").add("in_thread", data)
    (run,) = await bench.drain()
    assert run.error is None
    assert traced.spans(SpanKind.CONSUMER)[0].links == ()


async def test_log_records_carry_the_trace(traced: Traced, bench: AppBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(JobFields())

    @traced.app.task(queue="q")
    async def talks() -> None:
        log.warning("here")

    await talks.enqueue()
    await bench.drain()
    (record,) = [record for record in caplog.records if record.name == "shop"]
    assert record.__dict__["trace_id"] == f"{traced.spans(SpanKind.CONSUMER)[0].context.trace_id:032x}"
