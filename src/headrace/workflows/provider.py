"""Workflows behind one URL: start flows, run their steps, wait for them.

    flows = Workflows("sqlite:///jobs.db")

    @flows.implement(process_order)
    class ProcessOrder: ...

    async with flows:
        handle = await flows.execute(process_order, Order(...), id="order-42")
        receipt = await handle.result()

A process that implements nothing can still start flows and query them. Nothing about a flow is kept here:
a process that stops, or dies, loses nothing but its own waiting.
"""

from __future__ import annotations

import asyncio
import logging
import random
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar, Unpack, overload

from msgspec import structs

from headrace.client.client import Client
from headrace.client.options import RateLimit
from headrace.client.patience import Starting, reached
from headrace.client.queue import Queue
from headrace.commands.flows import FlowFound, FlowGet, FlowList
from headrace.connect import chosen_url, open_client, release_client
from headrace.durations import Duration, milliseconds, seconds
from headrace.errors import ConnectionLost, InvalidCommand, ProviderStoppedError, WorkflowError
from headrace.hooks import Hooks
from headrace.model import Flow, FlowStatus
from headrace.propagation import Retry, capture, carried
from headrace.worker.worker import until_ready
from headrace.workflows.context import encoded
from headrace.workflows.definition import WorkflowDefinition
from headrace.workflows.handle import FlowHandle
from headrace.workflows.ledger import REMEMBERED_FLOWS, FlowMetrics, Ledger, entry_of, record_of
from headrace.workflows.machine import Decision, News, Run, begin
from headrace.workflows.plan import Body, Entry, ExecuteOptions, Plan, Policy, check_plan, plan_of
from headrace.workflows.registry import Implementation, StepRegistry
from headrace.workflows.runner import FlowWorker
from headrace.workflows.sync import SyncWorkflows
from headrace.workflows.tree import steps_queue, workflow_queue
from headrace.workflows.watch import FlowWatch

D = TypeVar("D")
R = TypeVar("R")
Home = TypeVar("Home")

log: Final = logging.getLogger("headrace.workflows")
SHORTEST_STALL: Final = 5.0
_DIGITS: Final = string.digits + string.ascii_lowercase


class WorkflowProvider(Protocol):
    """What a service needs to start flows and to find them: no lifetime, no code of steps. `Workflows` is one."""

    async def execute(
        self, definition: WorkflowDefinition[D, R], data: D, **options: Unpack[ExecuteOptions]
    ) -> FlowHandle[R]: ...
    async def get_handle(self, flow_id: str) -> FlowHandle[Any]: ...
    async def get_status(self, flow_id: str) -> FlowStatus: ...
    async def get_result(self, flow_id: str, timeout: Duration | None = None) -> Any: ...


Running = tuple[FlowWorker, asyncio.Task[None]]


@dataclass
class _Parts:
    """What a started provider consists of."""

    client: Client
    ledger: Ledger
    watch: FlowWatch
    step_workers: list[Running] = field(default_factory=list)
    flow_workers: list[Running] = field(default_factory=list)

    @property
    def workers(self) -> list[Running]:
        return [*self.step_workers, *self.flow_workers]


class Workflows:
    """`async with flows:` connects, starts a pair of workers per implemented definition and drains them at the end."""

    def __init__(
        self,
        url: str | None = None,
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
        max_flow_states: int = REMEMBERED_FLOWS,
        queue_class: type[Queue] = Queue,
        worker_class: type[FlowWorker] = FlowWorker,
        queue_events_class: type[FlowWatch] = FlowWatch,
        flow_producer_class: type[Ledger] = Ledger,
        step_registry: StepRegistry | None = None,
        logger: logging.Logger = log,
        metrics: FlowMetrics | object = None,
    ) -> None:
        """Without a URL that of HEADRACE_URL counts, else a server on this machine.

        `stall_interval` is the lease of steps, and the margin of every timeout: a worker may die once without
        making its flow late. `max_stalls` is how often that may happen to one step. `max_flow_states` flows are
        remembered, to spare reading them for every step. The classes take the place of our own, for those who want to
        see or change what they do."""
        self._stall = seconds(stall_interval, "stall_interval")
        if self._stall < SHORTEST_STALL:
            raise InvalidCommand(f"stall_interval must be at least {SHORTEST_STALL:g} s, not {self._stall:g}")
        self.url = chosen_url(url)
        self.provider_id = provider_id or f"flows-{_random_text()}"
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
        self._max_flow_states = max_flow_states
        self._queue_class, self._worker_class = queue_class, worker_class
        self._watch_class, self._ledger_class = queue_events_class, flow_producer_class
        self._log = logger
        self._hooks = Hooks(metrics, logger)
        self._homes: dict[tuple[str, int], tuple[WorkflowDefinition[Any, Any], Any]] = {}
        self._settings: dict[tuple[str, int], tuple[int, RateLimit | None]] = {}
        self._implementations: dict[tuple[str, int], Implementation] = {}
        self._parts: _Parts | None = None
        self._starting = Starting("workflows")
        self._stopping: asyncio.Future[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

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
        found: dict[str, dict[str, Any]] = {}
        for name, given in steps.items():
            code = given if isinstance(given, Sequence) else (given,)
            if len(code) not in (1, 2):
                raise InvalidCommand(f"step {name!r} has a handler and perhaps a rollback, not {given!r}")
            found[name] = dict(zip(("execute", "rollback"), code, strict=False))
        made = Implementation.checked(definition, found, on_complete, on_error)
        self._keep(definition, made, concurrency, rate_limit)

    def _keep(
        self, definition: WorkflowDefinition[Any, Any], home: Any, concurrency: int | None, limit: RateLimit | None
    ) -> None:
        key = (definition.name, definition.version)
        if key in self._homes:
            raise InvalidCommand(f"workflow {definition.name!r} version {definition.version} is implemented already")
        if self._parts is not None:
            raise InvalidCommand(f"implement workflow {definition.name!r} before the provider starts")
        self._homes[key] = (definition, home)
        self._settings[key] = (concurrency or self._concurrency, limit)

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
        """Connect, and return when the workers are ready. Does nothing when it runs already. A server that is not there
        yet is waited for: that is logged, and ends with your cancellation or with `stop`."""
        if self._stopping is not None:
            await asyncio.shield(self._stopping)
        if self._parts is None or self._starting.is_under_way:
            await self._starting.join(self._start)

    async def _start(self) -> None:
        for key, (definition, home) in self._homes.items():
            made = home if isinstance(home, Implementation) else Implementation.of(definition, home)
            self._implementations[key] = made
            for name, step in made.steps.items():
                self.step_registry.register(definition.name, name, step.handler, step.rollback)
        client = open_client(self.url)
        ledger = self._ledger_class(client, self._hooks, self._max_flow_states)
        self._parts = parts = _Parts(client, ledger, self._watch_class(client, self._stall))
        self.loop = asyncio.get_running_loop()
        try:
            await reached(client, self._log, lambda: asyncio.wrap_future(client.connect()))
            await self._start_workers(parts)
        except BaseException:
            await self._close(parts)
            raise

    async def _start_workers(self, parts: _Parts) -> None:
        for (workflow, version), (concurrency, limit) in self._settings.items():
            queue = workflow_queue(workflow, self._prefix, version)
            if limit is not None:
                steps = self._queue_class(parts.client, steps_queue(queue))
                await reached(parts.client, self._log, partial(steps.limit_rate, limit))
            parts.step_workers.append(self._started(parts, steps_queue(queue), concurrency))
            parts.flow_workers.append(self._started(parts, queue, concurrency))
        await asyncio.gather(*(until_ready(worker, life) for worker, life in parts.workers))

    def _started(self, parts: _Parts, queue: str, concurrency: int) -> Running:
        worker = self._worker_class(
            parts.client,
            queue,
            parts.ledger,
            self._implementations,
            provider_id=self.provider_id,
            logger=self._log,
            hooks=self._hooks,
            concurrency=concurrency,
            lease=self._stall,
            drain=self._drain,
        )
        task = asyncio.create_task(worker.run(handle_signals=False))
        task.add_done_callback(self._tell_of_death)
        return worker, task

    def _tell_of_death(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._log.error("a workflow worker failed: %s", task.exception())

    async def stop(self) -> None:
        """Take no more work, let running steps end, then running decisions; whoever still waits for a result gets
        ProviderStoppedError. The flows themselves go on elsewhere."""
        if self._parts is None:
            return
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(self._parts))
        await asyncio.shield(self._stopping)

    async def _stop(self, parts: _Parts) -> None:
        try:
            await self._starting.stop()
            if self._parts is parts:
                await self._close(parts)
        finally:
            self._stopping = None

    async def _close(self, parts: _Parts) -> None:
        for worker, _ in parts.workers:
            worker.stop_pulling()
        await _drained(parts.step_workers)
        await _drained(parts.flow_workers)
        self._parts = self.loop = None
        parts.watch.stop()
        parts.ledger.stop()
        if (closing := release_client(parts.client)) is not None:
            await asyncio.wrap_future(closing)

    def _running(self) -> _Parts:
        if self._parts is None:
            raise ProviderStoppedError("the workflow provider is not started: use `async with flows:` or flows.start()")
        return self._parts

    @property
    def client(self) -> Client:
        """The client that it talks through while it is started."""
        return self._running().client

    def sync(self) -> SyncWorkflows:
        """The same for threads: `with flows.sync() as f: f.execute(...).result()`."""
        return SyncWorkflows(self)

    # -- flows ---------------------------------------------------------------------------------------------------------

    async def execute(
        self,
        definition: WorkflowDefinition[D, R],
        data: D,
        **options: Unpack[ExecuteOptions],
    ) -> FlowHandle[R]:
        """Start a flow, or find the one that has this id or key. Returns when the store has it.

        `timeout` counts from now, and the margin of one stall is added; 0 is none. When it expires the flow is
        compensated (`cancel`), or only its waiters time out (`detach`).
        """
        parts = self._running()
        if not isinstance(definition, WorkflowDefinition):
            raise WorkflowError(f"{definition!r} is no workflow: build one with workflow(...).build()")
        given = encoded(data, definition.data, f"data of workflow {definition.name!r}")
        plan = self._plan(definition, options)
        meta = options.get("meta")
        context = carried(capture() if meta is None else meta, "a flow")
        if not context:
            self._log.debug("workflow %s starts without a context to carry", definition.name)
        started = Entry("started", body=Body(plan=plan, data=given, meta=context or None))
        flow_id = options.get("idempotency_key") or options.get("id") or _new_flow_id()
        queue = workflow_queue(definition.name, self._prefix, definition.version)
        flow = await self._begin(parts.ledger, flow_id, queue, begin(started))
        if flow.workflow != definition.name:
            raise WorkflowError(f"the id {flow_id!r} belongs to a flow of workflow {flow.workflow!r}")
        return FlowHandle(self, flow_id, definition)

    def _plan(self, definition: WorkflowDefinition[Any, Any], options: ExecuteOptions) -> Plan:
        unknown = options.keys() - ExecuteOptions.__annotations__
        if unknown:
            known = ", ".join(ExecuteOptions.__annotations__)
            raise TypeError(f"execute() does not know the option {min(unknown)!r}; there are: {known}")
        timeout = options.get("timeout")
        base = milliseconds(self._default_timeout if timeout is None else timeout, "timeout")
        plan = plan_of(
            definition,
            step_timeout=self._step_timeout,
            timeout=base + self._stall * 1000 if base else 0,
            on_timeout=options.get("on_timeout", "cancel"),
            priority=options.get("priority", 0),
            **self._policies,
        )
        check_plan(plan)
        return plan

    @staticmethod
    async def _begin(ledger: Ledger, flow_id: str, queue: str, decision: Decision) -> Flow:
        try:
            return (await ledger.start(flow_id, queue, decision))[0]
        except ConnectionLost:
            # Whether it was begun is unknown; beginning the same id again is harmless.
            return (await ledger.start(flow_id, queue, decision))[0]

    @overload
    async def get_handle(self, flow_id: str, definition: WorkflowDefinition[Any, R]) -> FlowHandle[R]: ...
    @overload
    async def get_handle(self, flow_id: str, definition: None = None) -> FlowHandle[Any]: ...
    async def get_handle(self, flow_id: str, definition: WorkflowDefinition[Any, Any] | None = None) -> FlowHandle[Any]:
        """A flow that was started anywhere."""
        self._running()
        return FlowHandle(self, flow_id, definition)

    async def get_status(self, flow_id: str) -> FlowStatus:
        """The status of a flow; an unknown one is pending."""
        return await (await self.get_handle(flow_id)).status()

    async def get_result(self, flow_id: str, timeout: Duration | None = None) -> Any:
        """The result of a flow; raises the error with which it failed."""
        return await FlowHandle[Any](self, flow_id).result(timeout)

    async def list(
        self, workflow: str | None = None, status: FlowStatus | None = None, limit: int = 100, before: str | None = None
    ) -> list[Flow]:
        """Flows by id, the highest first (of generated ids that is the latest); `before` is the id to continue from."""
        asked = FlowList(workflow=workflow, status=status, limit=limit, before=before)
        return (await self.client.ask(asked)).flows

    async def retry(self, flow_id: str) -> FlowHandle[Any]:
        """Start a failed or cancelled flow again, as `{id}~2` and so on. Groups at its beginning that are complete and
        were not rolled back keep their results; everything after them runs again."""
        found = await self.look(flow_id)
        if found.flow.status not in (FlowStatus.FAILED, FlowStatus.CANCELLED):
            raise WorkflowError(f"flow {flow_id} is {found.flow.status.value}: only failed flows can be retried")
        run = record_of(found).run
        begun = entry_of(found.steps[0])
        started = Entry("started", body=structs.replace(begun.body, retry_of=flow_id))
        kept = _kept_steps(run)
        entries = [entry for entry in map(entry_of, found.steps) if entry.kind == "completed" and entry.step in kept]
        again = _next_id(flow_id)
        await self._begin(self._running().ledger, again, found.flow.queue, begin(started, entries))
        if entry_of((await self.look(again)).steps[0]).body.retry_of != flow_id:
            raise WorkflowError(f"flow {flow_id} cannot be retried: its next id {again!r} belongs to another flow")
        return FlowHandle(self, again, self.definition_of(run.plan.workflow, run.plan.version))

    # -- what handles stand on -----------------------------------------------------------------------------------------

    async def look(self, flow_id: str) -> FlowFound:
        return await self.client.ask(FlowGet(id=flow_id))

    async def carry_out(self, flow_id: str, news: News) -> Decision:
        return await self._running().ledger.carry_out(flow_id, news)

    async def wait_end(self, flow_id: str, patience: float | None) -> FlowFound:
        return await self._running().watch.wait_end(flow_id, patience)

    async def wait_change(self, flow_id: str, revision: int, after: int) -> FlowFound:
        return await self._running().watch.wait_change(flow_id, revision, after)


async def _drained(workers: list[Running]) -> None:
    for worker, _ in workers:
        worker.stop()
    await asyncio.gather(*(task for _, task in workers), return_exceptions=True)  # deaths were told already


def _kept_steps(run: Run) -> set[str]:
    kept: set[str] = set()
    for group in run.plan.groups:
        names = {one.name for one in group}
        if not all(name in run.done and name not in run.undone for name in names):
            break
        kept |= names
    return kept


def _next_id(flow_id: str) -> str:
    base, mark, number = flow_id.rpartition("~")
    return f"{base}~{int(number) + 1}" if mark and number.isdigit() else f"{flow_id}~2"


def _random_text() -> str:
    return "".join(random.choices(_DIGITS, k=7))


def _new_flow_id() -> str:
    return f"flow-{time.time_ns() // 1_000_000}-{_random_text()}"
