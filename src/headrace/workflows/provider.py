"""Workflows behind one URL: start flows, run their steps, wait for them.

    flows = Workflows("sqlite:///jobs.db")

    @flows.implement(process_order)
    class ProcessOrder: ...

    async with flows:
        handle = await flows.execute(process_order, Order(...), id="order-42")
        receipt = await handle.result()

A process that implements nothing can start flows and ask about them all the same. Nothing about a flow is kept here:
whoever stops, or dies, loses nothing but its own waiting.
"""

from __future__ import annotations

import asyncio
import logging
import random
import string
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast

from msgspec import structs

from headrace.client.client import Client
from headrace.client.options import RateLimit
from headrace.client.payloads import encode_payload
from headrace.client.queue import Queue
from headrace.commands.flows import FlowFound, FlowGet, FlowList, FlowWait
from headrace.connect import DEFAULT_URL, open_client, release_client
from headrace.durations import Duration, milliseconds, seconds
from headrace.errors import ConnectionLost, InvalidCommand, ProviderStoppedError, WorkflowError
from headrace.model import Flow, FlowStatus
from headrace.propagation import PropagationMeta, Retry, capture
from headrace.workflows.context import fitted
from headrace.workflows.definition import WorkflowDefinition
from headrace.workflows.handle import FlowHandle
from headrace.workflows.ledger import Ledger, entry_of, record_of
from headrace.workflows.machine import Decision, News, Run, begin
from headrace.workflows.plan import Body, Entry, Plan, Policy, plan_of
from headrace.workflows.registry import Implementation, StepRegistry
from headrace.workflows.runner import FlowWorker
from headrace.workflows.tree import steps_queue, workflow_queue

D = TypeVar("D")
R = TypeVar("R")
T = TypeVar("T")
Home = TypeVar("Home")

log: Final = logging.getLogger("headrace.workflows")
SHORTEST_STALL: Final = 5.0
_MOST_WAITING: Final = 100
"""Commands that wait for flows at once; a server serves a limited number of them per connection."""
_WAIT_SLICE: Final = 1.0
_DIGITS: Final = string.digits + string.ascii_lowercase


class Workflows:
    """`async with flows:` connects, starts a worker pair for every implemented workflow and drains them at the end."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        queue_prefix: str = "workflow",
        default_timeout: Duration = 30,
        stall_interval: Duration = SHORTEST_STALL,
        step_timeout: Duration | None = None,
        default_retry: Retry | None = None,
        rollback_retry: Retry | None = None,
        max_stalls: int = 3,
        concurrency: int = 10,
        drain: Duration = 25,
        provider_id: str = "",
        worker_class: type[FlowWorker] = FlowWorker,
        step_registry: StepRegistry | None = None,
        logger: logging.Logger = log,
    ) -> None:
        """`stall_interval` is the lease of steps, and the margin of every timeout: a worker may die once without
        making its flow late. `max_stalls` is how often that may happen to one step."""
        self._stall = seconds(stall_interval, "stall_interval")
        if self._stall < SHORTEST_STALL:
            raise InvalidCommand(f"stall_interval must be at least {SHORTEST_STALL:g} s, not {self._stall:g}")
        self.url = url
        self.provider_id = provider_id or f"flows-{_random_text(7)}"
        self.step_registry = StepRegistry() if step_registry is None else step_registry
        self._prefix = queue_prefix
        self._default_timeout = default_timeout
        self._step_timeout = None if not step_timeout else milliseconds(step_timeout, "step_timeout")
        self._policies = {
            "retry": Policy.of(default_retry or Retry()),
            "rollback_retry": Policy.of(rollback_retry or default_retry or Retry()),
            "max_stalls": max_stalls,
        }
        self._concurrency = concurrency
        self._drain = drain
        self._worker_class = worker_class
        self._log = logger
        self._homes: dict[tuple[str, int], tuple[WorkflowDefinition[Any, Any], Any]] = {}
        self._settings: dict[str, tuple[int, RateLimit | None]] = {}
        self._implementations: dict[tuple[str, int], Implementation] = {}
        self._client: Client | None = None
        self._workers: dict[str, list[tuple[FlowWorker, asyncio.Task[None]]]] = {}

    # -- code ----------------------------------------------------------------------------------------------------------

    def implement(
        self,
        definition: WorkflowDefinition[Any, Any],
        *,
        concurrency: int | None = None,
        rate_limit: RateLimit | None = None,
    ) -> Callable[[Home], Home]:
        """Give the code of a workflow: a class (made without arguments when the provider starts) or an object whose
        methods are marked with `@step.execute` and `@step.rollback`."""

        def keep(home: Home) -> Home:
            self._keep(definition, home, concurrency, rate_limit)
            return home

        return keep

    def register_definition_consumer(
        self,
        definition: WorkflowDefinition[Any, Any],
        steps: Mapping[str, Any],
        *,
        on_complete: Callable[..., Any] | None = None,
        on_error: Callable[..., Any] | None = None,
        concurrency: int | None = None,
        rate_limit: RateLimit | None = None,
    ) -> None:
        """The same with functions: `{"charge": charge}` or `{"charge": (charge, refund)}`."""
        found = {
            name: dict(zip(("execute", "rollback"), given if isinstance(given, Sequence) else (given,), strict=False))
            for name, given in steps.items()
        }
        made = Implementation.checked(definition, found, on_complete, on_error)
        self._keep(definition, made, concurrency, rate_limit)

    def _keep(
        self, definition: WorkflowDefinition[Any, Any], home: Any, concurrency: int | None, limit: RateLimit | None
    ) -> None:
        key = (definition.name, definition.version)
        if key in self._homes:
            raise InvalidCommand(f"workflow {definition.name!r} version {definition.version} is implemented already")
        if self._client is not None:
            raise InvalidCommand(f"implement workflow {definition.name!r} before the provider starts")
        self._homes[key] = (definition, home)
        self._settings[definition.name] = (concurrency or self._concurrency, limit)

    def definition_of(self, workflow: str, version: int) -> WorkflowDefinition[Any, Any] | None:
        home = self._homes.get((workflow, version))
        return None if home is None else home[0]

    # -- beginning and end ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Workflows:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Connect, and return when the workers are ready. Does nothing when it runs already."""
        if self._client is not None:
            return
        for key, (definition, home) in self._homes.items():
            made = home if isinstance(home, Implementation) else Implementation.of(definition, home)
            self._implementations[key] = made
            for name, step in made.steps.items():
                self.step_registry.register(definition.name, name, step.handler, step.rollback)
        self._client = open_client(self.url)
        self._ledger = Ledger(self._client)
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slots = asyncio.Semaphore(_MOST_WAITING)
        try:
            await asyncio.wrap_future(self._client.connect())
            await self._start_workers()
        except BaseException:
            await self.stop()
            raise

    async def _start_workers(self) -> None:
        for workflow, (concurrency, limit) in self._settings.items():
            steps, flows = steps_queue(workflow, self._prefix), workflow_queue(workflow, self._prefix)
            if limit is not None:
                await Queue(self._asked(), steps).limit_rate(limit)
            self._workers.setdefault("steps", []).append(self._started(steps, concurrency))
            self._workers.setdefault("flows", []).append(self._started(flows, concurrency))
        await asyncio.gather(*(worker.ready.wait() for pairs in self._workers.values() for worker, _ in pairs))

    def _started(self, queue: str, concurrency: int) -> tuple[FlowWorker, asyncio.Task[None]]:
        worker = self._worker_class(
            self._asked(),
            queue,
            self._ledger,
            self._implementations,
            provider_id=self.provider_id,
            logger=self._log,
            concurrency=concurrency,
            lease=self._stall,
            drain=self._drain,
        )
        return worker, asyncio.create_task(worker.run(handle_signals=False))

    async def stop(self) -> None:
        """Take no more work, let running steps end, then running decisions; whoever still waits for a result gets
        ProviderStoppedError. The flows themselves go on elsewhere."""
        client = self._client
        if client is None:
            return
        for worker, _ in (pair for pairs in self._workers.values() for pair in pairs):
            worker.pause()
        for kind in ("steps", "flows"):
            pairs = self._workers.pop(kind, [])
            for worker, _ in pairs:
                worker.stop()
            await asyncio.gather(*(task for _, task in pairs))
        self._client = None
        if not self._stopped.done():
            self._stopped.set_result(None)
        if release_client(client):
            await asyncio.wrap_future(client.close())

    def _asked(self) -> Client:
        if self._client is None:
            raise ProviderStoppedError("the workflow provider is not started: use `async with flows:` or flows.start()")
        return self._client

    # -- flows ---------------------------------------------------------------------------------------------------------

    async def execute(
        self,
        definition: WorkflowDefinition[D, R],
        data: D,
        *,
        id: str | None = None,
        idempotency_key: str | None = None,
        timeout: Duration | None = None,
        on_timeout: Literal["cancel", "detach"] = "cancel",
        priority: int = 0,
        meta: PropagationMeta | None = None,
    ) -> FlowHandle[R]:
        """Start a flow, or find the one that has this id or key. Returns when the store has it.

        `timeout` counts from now, and the margin of one stall is added; 0 is none. When it is over the flow is taken
        back (`cancel`), or only its waiters are sent away (`detach`).
        """
        self._asked()
        if not isinstance(definition, WorkflowDefinition):
            raise WorkflowError(f"{definition!r} is no workflow: build one with workflow(...).build()")
        given = encode_payload(fitted(data, definition.data, f"data of workflow {definition.name!r}"))
        plan = self._plan(definition, timeout, on_timeout, priority)
        carried = dict(capture() if meta is None else meta)
        if not carried:
            self._log.debug("workflow %s starts without a context to carry", definition.name)
        started = Entry("started", body=Body(plan=plan, data=given, meta=carried or None))
        flow_id = idempotency_key or id or _new_flow_id()
        flow = await self._begin(flow_id, begin(started))
        if flow.workflow != definition.name:
            raise WorkflowError(f"the id {flow_id!r} belongs to a flow of workflow {flow.workflow!r}")
        return FlowHandle(self, flow_id, definition)

    def _plan(self, definition: WorkflowDefinition[Any, Any], timeout: Any, on_timeout: Any, priority: int) -> Plan:
        base = milliseconds(self._default_timeout if timeout is None else timeout, "timeout")
        effective = base + self._stall * 1000 if base else 0
        options: dict[str, Any] = {
            **self._policies,
            "timeout": effective,
            "on_timeout": on_timeout,
            "priority": priority,
        }
        return plan_of(definition, step_timeout=self._step_timeout, **options)

    async def _begin(self, flow_id: str, decision: Decision) -> Flow:
        plan = decision.entries[0].body.plan
        assert plan is not None
        queue = workflow_queue(plan.workflow, self._prefix)
        try:
            return (await self._ledger.start(flow_id, queue, decision))[0]
        except ConnectionLost:
            # Whether it was begun is unknown; beginning the same id again is harmless.
            return (await self._ledger.start(flow_id, queue, decision))[0]

    async def get_handle(self, flow_id: str, definition: WorkflowDefinition[Any, R] | None = None) -> FlowHandle[R]:
        """A flow that was started anywhere."""
        self._asked()
        return FlowHandle(self, flow_id, definition)

    async def get_status(self, flow_id: str) -> FlowStatus:
        return await (await self.get_handle(flow_id)).status()

    async def get_result(self, flow_id: str, timeout: Duration | None = None) -> Any:
        return await FlowHandle[Any](self, flow_id).result(timeout)

    async def list(
        self, workflow: str | None = None, status: FlowStatus | None = None, limit: int = 100, before: str | None = None
    ) -> list[Flow]:
        asked = FlowList(workflow=workflow, status=status, limit=limit, before=before)
        return (await self._asked().ask(asked)).flows

    async def retry(self, flow_id: str) -> FlowHandle[Any]:
        """Begin a failed or cancelled flow anew, as `{id}~2` and so on. Groups at its beginning that are complete and
        were not taken back keep their results; everything after them runs again."""
        found = await self.look(flow_id)
        if found.flow.status not in (FlowStatus.FAILED, FlowStatus.CANCELLED):
            raise WorkflowError(f"flow {flow_id} is {found.flow.status.value}: only failed flows can be retried")
        run = record_of(found).run
        begun = entry_of(found.steps[0])
        started = Entry("started", body=structs.replace(begun.body, retry_of=flow_id))
        kept = _kept_steps(run)
        entries = [entry for entry in map(entry_of, found.steps) if entry.kind == "completed" and entry.step in kept]
        again = _next_id(flow_id)
        await self._begin(again, begin(started, entries))
        return FlowHandle(self, again, self.definition_of(run.plan.workflow, run.plan.version))

    # -- what handles stand on -----------------------------------------------------------------------------------------

    async def look(self, flow_id: str) -> FlowFound:
        return await self._asked().ask(FlowGet(id=flow_id))

    async def carry_out(self, flow_id: str, news: News) -> Decision:
        self._asked()
        return await self._ledger.carry_out(flow_id, news)

    async def wait_end(self, flow_id: str, patience: float | None) -> FlowFound:
        """The flow at its end; or as it is when patience (monotonic) or its own time is over."""
        return await self._until_stopped(self._wait_end(flow_id, patience))

    async def _wait_end(self, flow_id: str, patience: float | None) -> FlowFound:
        deadline = patience
        while True:
            left = _WAIT_SLICE if deadline is None else min(_WAIT_SLICE, max(0.0, deadline - time.monotonic()))
            found = await self._ask_waiting(FlowWait(id=flow_id, timeout=left * 1000))
            if found.flow.status.is_final or (deadline is not None and time.monotonic() >= deadline):
                return found
            deadline = _earlier(patience, self._own_deadline(found))

    def _own_deadline(self, found: FlowFound) -> float | None:
        """When waiting is pointless although nobody ended the flow: perhaps there is no worker at all."""
        plan = record_of(found).run.plan
        if not plan.timeout:
            return None
        margin = self._stall * 1000 if plan.on_timeout == "cancel" else 0
        due = found.flow.created_at + plan.timeout + margin
        return time.monotonic() + max(0.0, due - time.time() * 1000) / 1000

    async def wait_change(self, flow_id: str, revision: int | None, after: int) -> FlowFound:
        if revision is None:
            return await self.look(flow_id)
        asked = FlowWait(id=flow_id, timeout=_WAIT_SLICE * 1000, revision=revision, after=after)
        return await self._until_stopped(self._ask_waiting(asked))

    async def _ask_waiting(self, asked: FlowWait) -> FlowFound:
        async with self._slots:
            try:
                return await self._asked().ask(asked, _WAIT_SLICE + self._asked().timeout)
            except ConnectionLost:
                await asyncio.sleep(0.1)
                return await self._asked().ask(FlowGet(id=asked.id, after=asked.after))

    async def _until_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        self._asked()
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._stopped), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ProviderStoppedError("the workflow provider was stopped; the flow goes on in the store")
        finally:
            task.cancel()


def _earlier(one: float | None, other: float | None) -> float | None:
    return (
        min(moment for moment in (one, other) if moment is not None) if one is not None or other is not None else None
    )


def _kept_steps(run: Run) -> set[str]:
    kept: set[str] = set()
    for group in run.plan.groups:
        names = {one.name for one in group}
        if not all(name in run.done and run.undone.get(name, _NEVER) is _NEVER for name in names):
            break
        kept |= names
    return kept


_NEVER: Final = cast("Any", object())


def _next_id(flow_id: str) -> str:
    base, mark, number = flow_id.rpartition("~")
    return f"{base}~{int(number) + 1}" if mark and number.isdigit() else f"{flow_id}~2"


def _random_text(length: int) -> str:
    return "".join(random.choices(_DIGITS, k=length))


def _new_flow_id() -> str:
    return f"flow-{time.time_ns() // 1_000_000}-{_random_text(7)}"
