"""What differs from SQLite: the one list, shown in docs/valkey.md and read by the conformance suite."""

from __future__ import annotations

from typing import Final, NoReturn

from headrace.errors import NotSupported

NOT_SUPPORTED: Final[dict[str, str]] = {
    "search": "finding jobs by text would read every job of the queue over the network",
    "scans of jobs that have not ended": "only results, dead letters and jobs that have ended are numbered, by when "
    "they ended",
    "event log": "the log of a broker holds what that broker did; `headrace capture` keeps the streams",
    "families across queues in a cluster": "parents, children and dependencies must be in one queue, because a call "
    "reaches one slot only",
    "workflows across queues in a cluster": "a workflow, its steps and its decisions are changed by one call, which "
    "reaches one slot only; on one server, or one with replicas, they work",
    "durable without an append-only file": "`durable: true` waits for the append-only file of the server: it needs "
    "`appendonly yes` and Valkey, or Redis 7.2",
}
"""Refused by name with `not supported on this backend`, and why."""

DIFFERENT: Final[dict[str, str]] = {
    "payload size": "data, results and log lines have at most 1 MB (1,048,576 bytes)",
    "claims": "are stored: a broker that dies keeps its jobs active until their leases expire",
    "time": "leases and limits follow the wall clock of the brokers, which must agree within some milliseconds",
    "batches": "a batch of more than 500 jobs without a family is checked as a whole, then stored 500 at a time, each "
    "part whole",
    "completed jobs": "the number kept is per queue and not over all queues",
    "ended workflows": "the number kept is per workflow and not over all of them",
    "figures": "totals, minutes and durations are those of one broker; counts by state are those of all",
    "workers": "each broker lists those that are connected to it; a run of a schedule with `skipIfNoWorker` is skipped "
    "when a second later no broker that has a worker for it has pushed its job",
    "events": "each broker numbers and logs what it did itself; who listens also hears what other brokers and Node "
    "processes did to these queues (pushed, progress, completed, failed, removed, stalled), of up to 1,000 queues at a "
    "time; after more events at once than a stream keeps comes a `gap`",
    "scans": "number jobs by when they ended and not by when they were pushed; jobs of one number are never parted, so "
    "a page may have a few more than its limit",
    "acknowledgements of several queues": "in a cluster a batch is all or none for each queue",
    "late acknowledgements": "of jobs that were removed when they ended are ignored for an hour (with a custom id for "
    "a minute, in a cluster not at all) and then refused, and with them a batch as a whole",
    "job ids": "jobs of Node producers go by `<queue>:<number>`",
    "order of commands": "commands that a client sends without awaiting replies are under way together: one that needs "
    "several calls may be overtaken, and replies come as they are done (clients match them by `reqId`)",
    "statistics": "counts over all queues are some seconds old; with more than 200 queues up to ten",
    "TrimEvents": "cuts the queue's event stream on Valkey, which Node's QueueEvents reads",
}
"""Behaves otherwise."""


def refuse(what: str) -> NoReturn:
    raise NotSupported(f"not supported on this backend: {what} ({NOT_SUPPORTED[what]})")
