"""Everything that can be asked. Importing this package fills REGISTRY.

Reading order: `_base` (what a command is), `jobs` (the core), then any of the others. To add a module: give
it a docstring and add it to the import below.
"""

from __future__ import annotations

from headrace.commands import (
    connection,
    control,
    cron,
    dashboard,
    dedup,
    dlq,
    eventlog,
    families,
    groups,
    jobs,
    limits,
    logs,
    monitoring,
    queries,
    queues,
    scans,
    webhooks,
    workers,
)
from headrace.commands._base import (
    ABSENT,
    BY_TYPE,
    REGISTRY,
    Command,
    ErrorReply,
    Flag,
    Ok,
    Reply,
    Route,
    Spec,
)

__all__ = [
    "ABSENT",
    "BY_TYPE",
    "REGISTRY",
    "Command",
    "ErrorReply",
    "Flag",
    "Ok",
    "Reply",
    "Route",
    "Spec",
    "connection",
    "control",
    "cron",
    "dashboard",
    "dedup",
    "dlq",
    "eventlog",
    "families",
    "groups",
    "jobs",
    "limits",
    "logs",
    "monitoring",
    "queries",
    "queues",
    "scans",
    "webhooks",
    "workers",
]
