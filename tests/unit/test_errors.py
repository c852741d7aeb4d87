"""Errors as values: they cross processes as Python pickles them, whatever their classes take."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from headrace import errors
from headrace.errors import HeadraceError
from headrace.worker.failures import RetryLater, UnrecoverableError

_ARGUMENTS: dict[type[HeadraceError], tuple[object, ...]] = {
    errors.RateLimited: (),
    errors.Internal: (),
    errors.JobFailed: ("j1", "no such order"),
    errors.RemoteError: ("ValueError", "no such order"),
    errors.PayloadError: ("order", "$.id", "Expected int"),
    errors.UnknownEventError: ("order.paid", ["order.placed"]),
    errors.WorkflowStepError: ("charge", ValueError("no such order")),
    errors.WorkflowRollbackError: (ValueError("charge"), [ValueError("refund")]),
    errors.WorkflowTimeoutError: ("f1", 3.0),
    errors.StepNotFoundError: ("order", "charge"),
}


def _kinds(kind: type[HeadraceError]) -> Iterator[type[HeadraceError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from _kinds(below)


@pytest.mark.parametrize("kind", list(_kinds(HeadraceError)), ids=lambda kind: kind.__name__)
def test_an_error_comes_out_of_a_pool_of_processes_as_what_it_was(kind: type[HeadraceError]) -> None:
    """One that could not be rebuilt would break the whole pool."""
    error = kind(*_ARGUMENTS.get(kind, ("no such order",)))
    error.add_note("look again")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again)) == (kind, str(error))
        assert vars(again).keys() == vars(error).keys()


def test_what_handlers_raise_comes_out_of_a_pool_of_processes_too() -> None:
    later = pickle.loads(pickle.dumps(RetryLater("the bank is closed", after="1h")))
    assert (str(later), later.after_ms) == ("the bank is closed", 3_600_000)
    assert str(pickle.loads(pickle.dumps(UnrecoverableError("gone")))) == "gone"
