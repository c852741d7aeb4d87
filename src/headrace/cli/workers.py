"""`headrace workers`: who works, on what, and when it was last heard of."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Final

from headrace import notation
from headrace.cli.output import Cell, Column, Styled, note, print_json_line, print_table, state_cell
from headrace.cli.session import add_client_flags, connected

if TYPE_CHECKING:
    from headrace.commands.workers import WorkerView

COLUMNS: Final = (
    Column("WORKER", gives_way=12),
    Column("QUEUES", gives_way=8, spared=3),
    Column("BUSY", is_number=True, spared=1),
    Column("DONE", is_number=True, spared=5),
    Column("FAILED", is_number=True, spared=4),
    Column("HEARD", is_number=True, spared=2),
    Column("WHERE", gives_way=8, spared=6),
)


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the registered workers."
    parser.add_argument("--queue", metavar="QUEUE", help="only those that serve this queue")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.commands.workers import ListWorkers

    with connected(arguments) as client:
        found = client.ask_blocking(ListWorkers(queue=arguments.queue)).data.workers
    if arguments.as_json:
        for worker in found:
            print_json_line(worker)
    elif not found:
        note("no workers are known; start one with: headrace worker MODULE:APP")
    else:
        print_table(COLUMNS, [row_of(worker, time.time() * 1000) for worker in found])
    return 0


def row_of(worker: WorkerView, now_ms: float) -> list[Cell]:
    is_stale = worker.status == "stale"
    heard = notation.age(worker.last_seen, now_ms)
    return [
        notation.one_line(worker.name),
        notation.one_line(", ".join(worker.queues)),
        Styled(f"{worker.active_jobs}/{worker.concurrency}", state_cell("active").style if worker.active_jobs else ""),
        notation.count(worker.processed_jobs),
        Styled(notation.count(worker.failed_jobs), "red" if worker.failed_jobs else ""),
        Styled(f"{heard}, stale" if is_stale else heard, "red" if is_stale else ""),
        notation.one_line(f"{worker.hostname}:{worker.pid}"),
    ]
