"""Traces that follow a call into its job: `pip install headrace[otel]`, then

    instrument(app)

right after the app is created, so that no middleware is outside of it. Every enqueued call gets a span `create <queue>`
and carries its context (W3C traceparent, beside the arguments); every attempt of its job gets a span
`process <queue>` in the same trace, linked to the one that created it. Scheduled runs start traces of their own.

Only the API of OpenTelemetry is needed; without an SDK nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import Link, SpanKind, TracerProvider
except ModuleNotFoundError as error:
    message = 'OpenTelemetry is not installed: pip install "headrace[otel]"'
    raise ModuleNotFoundError(message, name=error.name) from None

from headrace import __version__
from headrace.tasks.app import Headrace
from headrace.tasks.task import AnyTask
from headrace.worker.context import JobContext

_KEY: Final = "trace"


def instrument(app: Headrace, tracer_provider: TracerProvider | None = None) -> None:
    """Let every call and every job of the app be a span."""
    tracer = trace.get_tracer("headrace", __version__, tracer_provider)

    def create(task: AnyTask) -> Mapping[str, Any]:
        carrier: dict[str, str] = {}
        attributes = {**_attributes("create", task.queue), "headrace.task": task.name}
        with tracer.start_as_current_span(f"create {task.queue}", kind=SpanKind.PRODUCER, attributes=attributes):
            propagate.inject(carrier)
        return {_KEY: carrier} if carrier else {}

    async def process(context: JobContext, call_next: Callable[[], Awaitable[Any]]) -> Any:
        parent = propagate.extract(_carried(context.data))
        origin = trace.get_current_span(parent).get_span_context()
        attributes: dict[str, str | int] = {
            **_attributes("process", context.queue),
            "messaging.message.id": context.id,
            "headrace.task": context.name,
            "headrace.attempt": context.attempt,
        }
        with tracer.start_as_current_span(
            f"process {context.queue}",
            parent,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=[Link(origin)] if origin.is_valid else (),
        ) as span:
            if span.get_span_context().is_valid:
                context.log_fields["trace_id"] = trace.format_trace_id(span.get_span_context().trace_id)
            return await call_next()

    app.carry(create)
    app.middleware(process)


def _attributes(operation: str, queue: str) -> dict[str, str]:
    return {
        "messaging.system": "headrace",
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
    }


def _carried(data: Any) -> dict[str, str]:
    """What came along; jobs of other producers may have anything there, or nothing."""
    carried = data.get(_KEY) if isinstance(data, dict) else None
    return {str(key): str(value) for key, value in carried.items()} if isinstance(carried, dict) else {}
