"""The log lines that workers write about a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from headrace.commands._base import Command, Flag, Ok, Reply, command
from headrace.model import Count, JobId, Log, Position, ShortText, Text

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.peer import Peer


LEVELS: Final = ("info", "warn", "error")


class LogAdded(Struct):
    added: bool = True


class LogAddedReply(Reply):
    data: LogAdded


class LogsData(Struct):
    """The lines that were asked for; `count` is how many there are."""

    logs: list[Log]
    count: int


class LogsFound(Reply):
    data: LogsData


@command(
    LogAddedReply,
    category="Logs",
    flags=Flag.WRITE,
    http="POST /jobs/{id}/logs fail=400",
    errors=("Job not found",),
)
class AddLog(Command[LogAddedReply], tag="AddLog"):
    """Add a line to the log of a job, in any state. The oldest lines make room for new ones.

    Levels are `info`, `warn` and `error`; any other is kept as `info`: no job should fail because of a line it logs.
    """

    id: JobId
    message: Text
    level: ShortText = "info"

    async def run(self, engine: Engine, peer: Peer) -> LogAddedReply:
        level = self.level if self.level in LEVELS else "info"
        await engine.backend.add_log(self.id, self.message, level)
        return LogAddedReply(data=LogAdded())


@command(LogsFound, category="Logs", http="GET /jobs/{id}/logs")
class GetLogs(Command[LogsFound], tag="GetLogs"):
    """The log of a job, or the lines from `start` to `end`, both included. An unknown job has none."""

    id: JobId
    start: Position | None = None
    end: Position | None = None

    async def run(self, engine: Engine, peer: Peer) -> LogsFound:
        logs = await engine.backend.logs(self.id)
        stop = None if self.end is None or self.end == -1 else self.end + 1
        return LogsFound(data=LogsData(logs[self.start : stop], len(logs)))


@command(Ok, category="Logs", flags=Flag.WRITE, http="DELETE /jobs/{id}/logs")
class ClearLogs(Command[Ok], tag="ClearLogs"):
    """Remove the log of a job, except its newest `keepLogs` lines."""

    id: JobId
    keep_logs: Count | None = None

    async def run(self, engine: Engine, peer: Peer) -> Ok:
        await engine.backend.clear_logs(self.id, self.keep_logs)
        return Ok()
