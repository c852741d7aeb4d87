"""What a step, a rollback or a hook receives: the data of its flow, the results so far, and its identity."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from msgspec import Raw

from headrace.client.payloads import decode_payload, encode_payload
from headrace.errors import InvalidCommand, PayloadError, WorkflowError
from headrace.model import MAX_DATA_BYTES
from headrace.propagation import PropagationMeta
from headrace.tasks.arguments import fitted
from headrace.worker.context import JobContext
from headrace.workflows.definition import Step, WorkflowDefinition
from headrace.workflows.plan import Body

D = TypeVar("D")
T = TypeVar("T")

MOST_LOG_BYTES: Final = 24 * 1024 * 1024
"""Less than half of what one reply can hold: the result of a flow may be all its results once more."""


def encoded(value: Any, wanted: Any, what: str, already: int = 0) -> Raw:
    """The value as it is written to the log of a flow, if it fits its type, and the log that has so many bytes
    already: whoever works on a flow reads all of it. An object is judged by what will be read of it: its class alone
    does not say that its fields are what they should be."""
    found = encode_payload(value, what)
    if wanted is not Any:
        found = encode_payload(fitted(decode_payload(found), wanted, what), what)
    if len(found) > MAX_DATA_BYTES:
        raise PayloadError(what, "$", f"{len(found)} bytes are too many, the most is {MAX_DATA_BYTES}")
    check_room(already, len(found), what)
    return found


def signal_payload(definition: WorkflowDefinition[Any, Any] | None, name: str, payload: Any) -> Raw:
    """The payload of a signal as it is written, if it is what the flow waits for: a second one would be refused."""
    step = None if definition is None or payload is None else definition.steps.get(name)
    wanted = Any if step is None or step.kind != "wait" else step.result
    return encoded(payload, wanted, f"payload of signal {name!r}")


def check_room(already: int, more: int, what: str) -> None:
    """Refuse what would make a log too large that has so many bytes already."""
    if already + more > MOST_LOG_BYTES:
        raise PayloadError(what, "$", f"the flow would have more than {MOST_LOG_BYTES} bytes of data and results")


class Results(Mapping[str, Any]):
    """Results by the name of their step, as the types that the steps declare; read when they are asked for."""

    def __init__(self, done: Mapping[str, Body], definition: WorkflowDefinition[Any, Any]) -> None:
        self._done = done
        self._definition = definition

    def __getitem__(self, name: str) -> Any:
        step = self._definition.steps.get(name)
        value = decode_payload(self._done[name].result)
        return value if step is None or value is None else fitted(value, step.result, f"result of step {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._done)

    def __len__(self) -> int:
        return len(self._done)

    def __repr__(self) -> str:
        return repr(dict(self))


class FlowLogger(logging.LoggerAdapter[logging.Logger]):
    """Puts the meta of the flow and who speaks into every record."""

    def process(self, msg: Any, kwargs: Any) -> Any:
        return msg, {**kwargs, "extra": {**(self.extra or {}), **kwargs.get("extra", {})}}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext(Generic[D]):
    """Read only. `attempt` counts from 1; `idempotency_key` is the same for every attempt at this step of this flow."""

    flow_id: str
    workflow: str
    step: str
    """The name of the step, `{step}:rollback` in a rollback, empty in hooks of the whole flow."""
    data: D
    results: Mapping[str, Any]
    attempt: int
    meta: PropagationMeta
    log: FlowLogger
    provider_id: str = ""
    job: JobContext | None = None

    def __post_init__(self) -> None:
        if not self.flow_id:
            raise InvalidCommand("the context of a step needs the id of its flow")

    def result(self, step: Step[T]) -> T:
        """What a step before this one returned, as its type."""
        if step.name not in self.results:
            raise WorkflowError(f"there is no result of step {step.name!r} here: it has not run before {self.step!r}")
        found: T = self.results[step.name]
        return found

    @property
    def correlation_id(self) -> str:
        """The request that all of this belongs to; the flow itself if none was given."""
        return str(self.meta.get("correlationId", self.flow_id))

    @property
    def idempotency_key(self) -> str:
        """For those who must do it once: the same for every attempt at this step of this flow."""
        return f"{self.flow_id}-{self.step}" if self.step else self.flow_id

    @property
    def cancelled(self) -> bool:
        """Whether the step ran out of time, or its flow does not want it any more: functions in threads look at it."""
        return self.job is not None and self.job.cancelled
