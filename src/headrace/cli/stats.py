"""`headrace stats`: the figures of the whole server on one card."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace import notation
from headrace.cli.output import Cell, Styled, print_fields, print_json, state_cell
from headrace.cli.session import add_client_flags, connected

if TYPE_CHECKING:
    from headrace.commands.monitoring import ServerMetrics, ServerStats


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Jobs of all queues by state, rates, totals since the file was created, memory and disk."
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.commands.monitoring import Metrics, Stats

    with connected(arguments) as client:
        stats = client.ask_blocking(Stats()).stats
        metrics = client.ask_blocking(Metrics()).metrics
    if arguments.as_json:
        print_json({"stats": stats, "metrics": metrics})
    else:
        print_fields(_card(stats, metrics))  # type: ignore[arg-type]
    return 0


def _card(stats: ServerStats, metrics: ServerMetrics) -> Iterator[tuple[str, Cell]]:
    for state, number in (
        ("waiting", stats.waiting),
        ("active", stats.active),
        ("delayed", stats.delayed),
        ("completed", stats.completed),
        ("failed", stats.dlq),
    ):
        yield state, Styled(notation.count(number), state_cell(state).style if number else "")
    unit = notation.rate_unit(max(stats.push_per_sec, stats.pull_per_sec))
    yield "in", f"{notation.rate(stats.push_per_sec, unit)}/{unit}"
    yield "out", f"{notation.rate(stats.pull_per_sec, unit)}/{unit}"
    yield "pushed in all", notation.count(metrics.total_pushed)
    yield "completed in all", notation.count(metrics.total_completed)
    yield "failed in all", notation.count(metrics.total_failed)
    yield "connections", notation.count(metrics.active_connections)
    yield "memory", f"{metrics.memory_usage_mb:,.0f} MB"
    yield "file", f"{metrics.sqlite_size_mb:,.1f} MB"
    yield "up", notation.duration(stats.uptime)
