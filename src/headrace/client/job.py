"""A job as its producer sees it: a handle to query and control it, and a snapshot of it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar, cast

import msgspec
from msgspec import Raw, Struct

from headrace import commands
from headrace.client.client import Client
from headrace.client.payloads import decode_payload, encode_payload, without_absent
from headrace.client.verbs import AsyncShell, Shell, SyncShell, verb
from headrace.durations import Duration, milliseconds, seconds
from headrace.errors import ConnectionLost, JobFailed, JobTimeout, NotFound, Refused, Unreachable
from headrace.model import Log, TimelineEntry

T = TypeVar("T")

_LONGEST_WAIT: Final = 30.0
"""Seconds for which one command waits for a job; a longer wait repeats it."""


class JobInfo(Struct, rename="camel", kw_only=True, omit_defaults=True):
    """A snapshot of a job. Times are ms since the epoch; `data` and `result` are decoded when they are read."""

    id: str
    queue: str = ""
    state: str = "unknown"
    encoded_data: Raw = msgspec.field(default=Raw(b""), name="data")
    encoded_result: Raw = msgspec.field(default=Raw(b""), name="returnvalue")
    given_name: str | None = msgspec.field(default=None, name="name")
    priority: int = 0
    attempts: int = 0
    max_attempts: int = 3
    stall_count: int = 0
    progress: float = 0
    progress_message: str | None = None
    failed_reason: str | None = None
    stacktrace: list[str] | None = None
    stack_trace_limit: int = 10
    created_at: float = 0
    run_at: float = 0
    started_at: float | None = None
    completed_at: float | None = None
    timeout: float | None = None
    ttl: float | None = None
    custom_id: str | None = None
    unique_key: str | None = None
    group_id: str | None = None
    parent_id: str | None = None
    depends_on: list[str] = []
    children_ids: list[str] = []
    tags: list[str] = []
    timeline: list[TimelineEntry] = []

    @property
    def data(self) -> Any:
        """What it was added with, as plain values."""
        return decode_payload(self.encoded_data)

    @property
    def result(self) -> Any:
        """What it returned, as plain values; None while it has not ended."""
        return decode_payload(self.encoded_result)

    @property
    def name(self) -> str:
        """Its name; clients of some languages keep it inside the data."""
        if self.given_name is not None:
            return self.given_name
        try:
            data = self.data
        except (msgspec.MsgspecError, ValueError):  # other clients write what Python cannot hold
            return "default"
        name = data.get("name") if isinstance(data, dict) else None
        return name if isinstance(name, str) else "default"

    @property
    def created(self) -> datetime:
        """When it was added."""
        return datetime.fromtimestamp(self.created_at / 1000, UTC)


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[JobInfo]:
    return msgspec.msgpack.Decoder(JobInfo, strict=False)


def decode_job(encoded: bytes | Raw) -> JobInfo:
    try:
        return _decoder().decode(encoded)
    except msgspec.ValidationError:
        return _decoder().decode(without_absent(encoded, 1))


class JobVerbs(Shell, Generic[T]):
    """The operations on one job."""

    def __init__(
        self, client: Client, job_id: str, queue: str, name: str = "", decode: Callable[[Any], T] | None = None
    ) -> None:
        super().__init__(client)
        self.id = job_id
        self.queue = queue
        self.name = name
        self._decode = decode or cast("Callable[[Any], T]", decode_payload)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.queue}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobVerbs) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    # -- its end -------------------------------------------------------------------------------------------------------

    @verb
    async def result(self, timeout: Duration | None = None) -> T:
        """What the job returned. Raises JobFailed if it failed for good, JobTimeout if it has not ended in time."""
        ended = await self._end(timeout)
        if ended is None:
            span = timeout if isinstance(timeout, str) else f"{seconds(timeout or 0):g} s"
            raise JobTimeout(f"Job {self.id} did not end within {span}; it goes on")
        if not ended.completed:
            raise JobFailed(self.id, (await self._info()).failed_reason or "no reason was given")
        return self._decode(ended.result or Raw(b""))

    @verb
    async def wait(self, timeout: Duration | None = None) -> bool:
        """Wait for it to end, either way; False if it has not ended in time."""
        return await self._end(timeout) is not None

    async def _end(self, timeout: Duration | None) -> commands.control.Waited | None:
        deadline = None if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        while True:
            left = _LONGEST_WAIT if deadline is None else min(_LONGEST_WAIT, deadline - time.monotonic())
            wait = commands.control.WaitJob(id=self.id, timeout=max(0, math.ceil(left * 1000)))
            try:
                waited = await self._ask(wait, max(left, 0) + self._client.timeout)
                if waited.completed:
                    return waited
                state = (await self._ask(commands.queries.GetState(id=self.id))).state
            except ConnectionLost as error:
                if isinstance(error, Unreachable) or (deadline is not None and time.monotonic() >= deadline):
                    raise
                continue  # asking again changes nothing, and waits for the connection that comes
            if state == "completed":
                continue
            if state == "failed":
                return waited
            if state == "unknown":
                raise NotFound(f"Job {self.id} was removed: what became of it is not known any more")
            if deadline is not None and time.monotonic() >= deadline:
                return None

    # -- looking -------------------------------------------------------------------------------------------------------

    @verb
    async def info(self) -> JobInfo:
        """A snapshot of the job now. Raises NotFound if it is no longer kept."""
        return await self._info()

    async def _info(self) -> JobInfo:
        return decode_job((await self._ask(commands.queries.GetJob(id=self.id))).job)

    @verb
    async def state(self) -> str:
        """Its state; `unknown` if it is no longer kept."""
        return (await self._ask(commands.queries.GetState(id=self.id))).state

    @verb
    async def logs(self) -> list[Log]:
        """Its log lines, oldest first."""
        return (await self._ask(commands.logs.GetLogs(id=self.id))).data.logs

    @verb
    async def children_values(self) -> dict[str, Any]:
        """The results of its children, by `<queue>:<id>`."""
        found = await self._ask(commands.queries.GetChildrenValues(id=self.id))
        return {child: decode_payload(value) for child, value in found.data.values.items()}

    @verb
    async def failed_children(self) -> dict[str, str]:
        """Errors of failed children in spite of which the parent continued, by `<queue>:<id>`."""
        return (await self._ask(commands.families.GetFailedChildrenValues(id=self.id))).values

    # -- telling -------------------------------------------------------------------------------------------------------

    @verb
    async def log(self, message: str, level: str = "info") -> None:
        """Add a line to its log; `level` is info, warn or error, any other counts as info."""
        await self._ask(commands.logs.AddLog(id=self.id, message=message, level=level))

    @verb
    async def set_progress(self, percent: float, message: str | None = None) -> None:
        """Report progress while it runs."""
        await self._ask(commands.control.Progress(id=self.id, progress=percent, message=message))

    @verb
    async def cancel(self, force: bool = False) -> bool:
        """Withdraw it if it has not started. False: it was too late for that.

        With `force` also while it runs: its worker learns so with its next heartbeat and stops the handler.
        """
        try:
            await self._ask(commands.control.Cancel(id=self.id, force=force))
        except (NotFound, Refused):
            if (await self._ask(commands.queries.GetState(id=self.id))).state == "unknown":
                raise NotFound(f"Job not found: {self.id}") from None
            return False
        return True

    @verb
    async def promote(self) -> None:
        """Make a delayed job ready now."""
        await self._ask(commands.control.Promote(id=self.id))

    @verb
    async def retry(self) -> None:
        """Retry a dead letter with fresh attempts."""
        retried = await self._ask(commands.dlq.RetryDeadLetters(queue=self.queue, job_id=self.id))
        if not retried.count:
            raise NotFound(f"Job {self.id} is no dead letter of {self.queue}")

    @verb
    async def update(self, data: Any) -> None:
        """Replace its data, if it has not ended."""
        await self._ask(commands.control.Update(id=self.id, data=encode_payload(data)))

    @verb
    async def set_priority(self, priority: int) -> None:
        """Change its priority, if it has not started."""
        await self._ask(commands.control.ChangePriority(id=self.id, priority=priority))

    @verb
    async def set_delay(self, delay: Duration) -> None:
        """Delay it by this long, counted from now."""
        await self._ask(commands.control.ChangeDelay(id=self.id, delay=milliseconds(delay, "delay")))

    @verb
    async def discard(self) -> None:
        """Turn it into a dead letter now."""
        await self._ask(commands.control.Discard(id=self.id))


class Job(JobVerbs[T], AsyncShell):
    """A job, async: `await job.result()`."""


class SyncJob(JobVerbs[T], SyncShell):
    """A job, blocking: `job.result()`."""
