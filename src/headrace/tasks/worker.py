"""The worker of an app, in its own module so that a program that only enqueues does not load what running needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.tasks.app import Headrace
from headrace.tasks.task import AnyTask
from headrace.worker.context import JobContext
from headrace.worker.worker import Worker


class TaskWorker(Worker):
    """A worker that runs the tasks of an app."""

    def __init__(self, app: Headrace, queues: str | Sequence[str], **options: Any) -> None:
        super().__init__(app.client, queues, self._call, **options)
        self._app = app

    async def run(self, *, handle_signals: bool = True) -> None:
        async with self._app.alive() as self.state:
            await super().run(handle_signals=handle_signals)

    async def _prepare(self) -> None:
        await self._app.enter_schedules(self.queues)

    async def _call(self, context: JobContext) -> Any:
        async def run(task: AnyTask) -> Any:
            if task.run_in == "process":
                return await self._execute(context, "process", task, _nothing)
            bound = task.arguments.decode(context.data)
            return await self._execute(
                context, task.run_in, task, lambda: task.arguments.call(task.function, bound, context)
            )

        return await self._app.run_job(context, run)


def _nothing() -> None:
    """A process finds its function by name: there is nothing to call here."""
