"""All commands. Modules are loaded when they are first accessed (`commands.queues`), and all of them by
whoever takes REGISTRY or BY_TYPE from here.

Reading order: `_base` (what a command is), `jobs` (the core), then any of the others. To add a module: put it into this
folder, give it a docstring and name it below for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.commands import _base
from headrace.commands._base import ABSENT, Command, ErrorReply, Flag, Ok, Reply, Route, Spec

if TYPE_CHECKING:
    from headrace.commands import connection as connection
    from headrace.commands import control as control
    from headrace.commands import cron as cron
    from headrace.commands import dashboard as dashboard
    from headrace.commands import dedup as dedup
    from headrace.commands import dlq as dlq
    from headrace.commands import eventlog as eventlog
    from headrace.commands import families as families
    from headrace.commands import flows as flows
    from headrace.commands import groups as groups
    from headrace.commands import jobs as jobs
    from headrace.commands import limits as limits
    from headrace.commands import logs as logs
    from headrace.commands import monitoring as monitoring
    from headrace.commands import queries as queries
    from headrace.commands import queues as queues
    from headrace.commands import scans as scans
    from headrace.commands import webhooks as webhooks
    from headrace.commands import workers as workers
    from headrace.commands._base import BY_TYPE, REGISTRY

__all__ = ["ABSENT", "BY_TYPE", "REGISTRY", "Command", "ErrorReply", "Flag", "Ok", "Reply", "Route", "Spec"]


def __getattr__(name: str) -> Any:
    """A client needs few commands and starts quickly; a server needs all of them."""
    import pkgutil
    from importlib import import_module

    names = [module.name for module in pkgutil.iter_modules(__path__)]
    if name in names:
        return import_module(f"{__name__}.{name}")
    if name not in ("REGISTRY", "BY_TYPE"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for found in names:
        import_module(f"{__name__}.{found}")
    return getattr(_base, name)
