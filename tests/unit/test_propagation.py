"""Context, errors and retry policies that travel between processes."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from headrace.durations import milliseconds
from headrace.errors import (
    InvalidCommand,
    PayloadError,
    RemoteError,
    UnknownEventError,
    WorkflowRollbackError,
    WorkflowStepError,
    WorkflowTimeoutError,
    message_of,
)
from headrace.events.queues import EventWorker
from headrace.propagation import ErrorReport, PropagationFilter, Retry, capture, current_meta, propagate, restored
from headrace.worker.failures import RetryLater, UnrecoverableError, reason_of, stack_of


def test_outside_of_any_context_nothing_is_carried() -> None:
    assert capture() == {}
    assert current_meta() == {}


def test_python_spellings_become_wire_names_and_keys_of_the_application_stay() -> None:
    with propagate({"tenant-id": 3}, correlation_id="r-9", user_id="u1"):
        assert current_meta() == {"tenant-id": 3, "correlationId": "r-9", "user_id": "u1"}
    assert current_meta() == {}


def test_only_a_correlation_id_invents_no_trace() -> None:
    with propagate(correlation_id="r"):
        assert capture() == {"correlationId": "r"}


def test_each_message_is_a_child_span_of_where_it_was_sent() -> None:
    with propagate(trace_id="t", span_id="a" * 16):
        first = capture()
    with restored(first):
        second = capture()
    assert first["traceId"] == second["traceId"] == "t"
    assert first["parentSpanId"] == "a" * 16
    assert second["parentSpanId"] == first["spanId"]
    assert len({first["spanId"], second["spanId"], "a" * 16}) == 3
    assert len(second["spanId"]) == 16


def test_a_trace_without_a_span_has_no_parent() -> None:
    with propagate(trace_id="t"):
        assert "parentSpanId" not in capture()


def test_keys_without_a_value_are_not_carried() -> None:
    with propagate(tenant=None, flag=False):
        assert capture() == {"flag": False}


def test_restored_replaces_what_was_current() -> None:
    with propagate(tenant="outer"):
        with restored({"user": "inner"}):
            assert current_meta() == {"user": "inner"}
        with restored(None):
            assert current_meta() == {}
        assert current_meta() == {"tenant": "outer"}


def test_the_meta_cannot_be_changed_in_place() -> None:
    with propagate(tenant="t") as meta, pytest.raises(TypeError):
        meta["tenant"] = "other"  # type: ignore[index]


async def test_tasks_side_by_side_do_not_mix() -> None:
    async def seen(tenant: str) -> object:
        with propagate(tenant=tenant):
            await asyncio.sleep(0)
            return current_meta()["tenant"]

    assert await asyncio.gather(seen("a"), seen("b")) == ["a", "b"]


def test_log_records_carry_the_meta_and_keep_their_own_fields() -> None:
    record = logging.makeLogRecord({"name": "mine"})
    with propagate(correlation_id="r", name="theirs"):
        PropagationFilter().filter(record)
    assert record.name == "mine"
    assert record.__dict__["correlationId"] == "r"
    assert record.__dict__["meta"] == {"correlationId": "r", "name": "theirs"}


def _raised() -> ValueError:
    try:
        raise ValueError("no such order")
    except ValueError as error:
        return error


def test_a_remote_error_tells_type_message_step_attempt_and_traceback() -> None:
    report = ErrorReport.of(_raised(), step="charge", attempt=3)
    error = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ErrorReport).rebuild()
    assert (error.type_name, error.message, error.step, error.attempt) == ("ValueError", "no such order", "charge", 3)
    assert "_raised" in error.remote_traceback
    assert str(error) == "ValueError: no such order"


def test_a_remote_error_passed_on_stays_what_it_was() -> None:
    first = ErrorReport.of(_raised(), step="charge", attempt=1)
    assert ErrorReport.of(first.rebuild(), step="other", attempt=9) == first


def test_the_reason_of_a_failed_job_becomes_a_remote_error() -> None:
    error = ErrorReport.of_reason("KeyError: 'x'", ["a.py:1 in f", "KeyError: 'x'"], attempt=2).rebuild()
    assert (error.type_name, error.message, error.attempt) == ("KeyError", "'x'", 2)
    assert error.remote_traceback.startswith("a.py:1")


class Declined(UnrecoverableError):
    pass


@pytest.mark.parametrize(
    "raised",
    [
        KeyError(),
        ValueError("no: such\norder"),
        Declined(),
        Declined("limit: reached"),
        Declined("two\nlines"),
        RetryLater("busy", after=1),
        ValueError("x" * 5000),
        Declined("x" * 5000),
        ExceptionGroup("both", [Declined("a"), KeyError()]),
    ],
)
def test_the_type_and_message_of_an_error_survive_the_failure_of_its_job(raised: Exception) -> None:
    error = ErrorReport.of_reason(reason_of(raised), stack_of(raised, 10)).rebuild()
    assert error.type_name == type(raised).__name__
    assert message_of(raised).startswith(error.message)
    assert bool(error.message) == bool(str(raised))


@pytest.mark.parametrize("reason", ["out of paper", "see page 3: nothing", "stalled", ""])
def test_a_reason_without_a_type_is_kept_whole(reason: str) -> None:
    assert ErrorReport.of_reason(reason).rebuild().message == reason


def test_a_rollback_error_is_a_group_of_the_failure_and_what_came_after() -> None:
    primary = WorkflowStepError("ship", RemoteError("ValueError", "no van"))
    error = WorkflowRollbackError(primary, [RuntimeError("refund")])
    assert isinstance(error, ExceptionGroup)
    assert error.primary is primary
    assert error.exceptions == (primary, *error.rollback_errors)
    assert str(primary) == "Step 'ship' failed: no van"
    with pytest.raises(ExceptionGroup):
        raise error


def test_errors_read_as_sentences_and_catch_by_their_python_kin() -> None:
    assert str(UnknownEventError("a.b", ["c.d"])) == "Unknown event 'a.b'; the registry has: c.d"
    assert isinstance(UnknownEventError("a", []), KeyError)
    assert isinstance(WorkflowTimeoutError("f", 1.5), TimeoutError)
    assert str(WorkflowTimeoutError("f", 1.5)) == "Workflow f timed out after 1500ms"
    assert PayloadError("order.placed", "$.total", "expected int").path == "$.total"


def test_a_retry_becomes_options_of_a_job() -> None:
    options = Retry(5, backoff="fixed", delay="2s").options()
    assert options["attempts"] == 5
    assert options["backoff"].wire().delay == 2000  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"backoff": "linear"}, {"delay": -1}])
def test_an_impossible_retry_is_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidCommand):
        Retry(**wrong)  # type: ignore[arg-type]


def test_the_traceback_of_a_report_begins_with_code_that_is_not_ours() -> None:
    def handler() -> None:
        raise ValueError("no such order")

    async def called() -> BaseException:
        with pytest.raises(ValueError, match="no such order") as caught:
            await EventWorker.__new__(EventWorker).run_in_place("loop", handler)
        return caught.value

    error = asyncio.run(called())
    assert error.__traceback__ is not None
    report = ErrorReport.of(error.with_traceback(error.__traceback__.tb_next))
    assert "in handler" in report.traceback
    assert "headrace/worker" not in report.traceback


def test_a_traceback_that_is_all_ours_is_told_whole() -> None:
    with pytest.raises(InvalidCommand) as caught:
        milliseconds("soon")
    error = caught.value
    assert error.__traceback__ is not None
    assert "durations.py" in ErrorReport.of(error.with_traceback(error.__traceback__.tb_next)).traceback


def test_an_error_whose_message_cannot_be_read_is_reported_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError("no message")

    report = ErrorReport.of(Broken())
    assert (report.type, report.message) == ("Broken", "its message cannot be read")
