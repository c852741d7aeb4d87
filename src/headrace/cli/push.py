"""`headrace push`: one job from the command line, or as many as a file has.

A file is read as it is sent, in batches that are whole each: when something goes wrong, everything before is in the
queue, and the message says how to go on. With ids (--id-column) the same file may simply be pushed again.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace import notation
from headrace.cli.jobflags import add_job_flags, job_options, looks_like_data, read_data
from headrace.cli.output import Advance, is_terminal, note, print_json, print_line, print_payload, progress
from headrace.cli.session import Exit, UsageError, add_client_flags, connected, require_server

if TYPE_CHECKING:
    from headrace.cli.records import Record
    from headrace.client.client import Client
    from headrace.client.queue import NewJob, SyncQueue

DEFAULT_NAME: Final = "default"
COLUMNS: Final = ("name", "id", "data", "priority", "group", "delay")
_FILE_FLAGS: Final = ("format", "skip", *(f"{column}_column" for column in COLUMNS))
_TRIES: Final = 3


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Add a job and print its id, or add many from a file of JSON lines or CSV. Unless you name columns, the whole "
        "record is the data of its job."
    )
    parser.add_argument("queue", metavar="QUEUE", help="queue to add it to; its first job creates it")
    parser.add_argument("name", metavar="NAME", nargs="?", help=f"name of the job (default: {DEFAULT_NAME})")
    parser.add_argument("data", metavar="DATA", nargs="?", help="JSON, @FILE with JSON, or - for stdin")
    parser.add_argument("--wait", action="store_true", help="wait until the job has ended and print its result")
    parser.add_argument("--wait-timeout", metavar="SPAN", default="5m", help="how long at most (default: 5m)")
    bulk = parser.add_argument_group("many jobs")
    bulk.add_argument("--file", metavar="FILE", help="JSON lines or CSV with a header; - for stdin")
    bulk.add_argument("--format", choices=("jsonl", "csv"), help="format of the file, if its name does not say")
    bulk.add_argument("--skip", type=int, default=0, metavar="N", help="skip the first N records")
    for column in COLUMNS:
        bulk.add_argument(f"--{column}-column", metavar="COLUMN", help=_COLUMN_HELP[column])
    add_job_flags(parser)
    add_client_flags(parser)
    parser.set_defaults(run=run)


_COLUMN_HELP: Final = {
    "name": "column with the name of the job",
    "id": "column with its id: a record whose id is already known is not added again",
    "data": "column with its data, if that is not the whole record",
    "priority": "column with its priority",
    "group": "column with its group",
    "delay": "column with its delay: 30s, or a number of seconds",
}


def run(arguments: argparse.Namespace) -> int:
    if arguments.file is not None:
        return _push_file(arguments)
    if idle := [flag for flag in _FILE_FLAGS if getattr(arguments, flag)]:
        raise UsageError(f"--{idle[0].replace('_', '-')} is about a file of jobs: name it with --file")
    if arguments.data is None and arguments.name is not None and looks_like_data(arguments.name):
        arguments.name, arguments.data = None, arguments.name
    if arguments.wait:
        require_server(arguments, "nobody can run the job while this command has the file open")
    return _push_one(arguments)


def _push_one(arguments: argparse.Namespace) -> int:
    data, options = read_data(arguments.data), job_options(arguments)
    from headrace.client.queue import SyncQueue

    with connected(arguments, may_create=True) as client:
        job = SyncQueue(client, arguments.queue).add(arguments.name or DEFAULT_NAME, data, **options)
        if arguments.wait:
            result = job.result(arguments.wait_timeout)
            if arguments.as_json:
                print_json({"id": job.id, "queue": arguments.queue, "result": result})
            else:
                print_payload(result)
        elif arguments.as_json:
            print_json({"id": job.id, "queue": arguments.queue})
        else:
            print_line(f"added {job.id} to {arguments.queue}" if is_terminal() else job.id)
    return Exit.OK


# -- a file ------------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A job to be, and the record it comes from."""

    job: NewJob
    size: int
    record: Record


def _push_file(arguments: argparse.Namespace) -> int:
    if arguments.data is not None or arguments.wait:
        raise UsageError("--file takes neither DATA nor --wait: the data of each job comes from the file")
    if arguments.job_id is not None:
        raise UsageError("--job-id gives all jobs the same id: name the column that has it with --id-column")
    from headrace.cli.records import format_of, open_records, read_records

    kind = format_of(arguments.file, arguments.format)
    options = job_options(arguments)
    with open_records(arguments.file) as source, connected(arguments, may_create=True) as client:
        plan = (_planned(record, arguments, options) for record in _skipped(read_records(source, kind), arguments.skip))
        total = os.fstat(source.fileno()).st_size or None  # a pipe does not know
        upload = _Upload(arguments, client)
        with progress(f"push {arguments.queue}", total) as advance:
            upload.run(plan, advance)
        upload.summarize()
    return Exit.OK


def _skipped(records: Iterator[Record], number: int) -> Iterator[Record]:
    for _ in range(number):
        if next(records, None) is None:
            break
    yield from records


def _planned(record: Record, arguments: argparse.Namespace, base: Any) -> Planned:
    from headrace.cli.records import at_line
    from headrace.client.payloads import encode_payload
    from headrace.client.queue import NewJob
    from headrace.errors import InvalidCommand

    try:
        name = _cell(record.value, arguments.name_column, str) or arguments.name or DEFAULT_NAME
        data = record.value if arguments.data_column is None else _cell(record.value, arguments.data_column, _as_is)
        options: Any = dict(base)
        for option, column, convert in (
            ("job_id", arguments.id_column, _identifier),
            ("priority", arguments.priority_column, int),
            ("group", arguments.group_column, str),
            ("delay", arguments.delay_column, _span),
        ):
            if column is not None:
                options[option] = _cell(record.value, column, convert)
        job = NewJob(name=name, data=data, options=options)
        return Planned(job, len(encode_payload(data)), record)
    except (InvalidCommand, ValueError) as error:
        raise at_line(record.line, error) from None


def _cell(value: Any, column: str | None, convert: Any) -> Any:
    if column is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"it is not an object, so it has no column {column!r}")
    if column not in value:
        raise ValueError(f"it has no column {column!r}; there are: {', '.join(map(str, value)) or 'none'}")
    cell = value[column]
    return None if cell is None else convert(cell)


def _as_is(value: Any) -> Any:
    return value


def _identifier(value: Any) -> str:
    if value == "":
        raise ValueError("its id is empty")
    return str(value)


def _span(value: Any) -> Any:
    try:
        return float(value)
    except ValueError:
        return value


class _Upload:
    """Sends batches one after the other and knows how far it got."""

    def __init__(self, arguments: argparse.Namespace, client: Client) -> None:
        from headrace.client.queue import SyncQueue

        self._arguments = arguments
        self._client = client
        self._queue: SyncQueue = SyncQueue(client, arguments.queue)
        self._has_ids = arguments.id_column is not None
        self._sent = 0
        self._known = self._duplicates()
        self._began = time.monotonic()

    def run(self, plan: Iterable[Planned], advance: Advance) -> None:
        from headrace.client.payloads import batches
        from headrace.errors import ClientError, HeadraceError

        try:
            # Cut as `add_many` would cut them, so that a number in an error counts within the batch.
            for batch in batches(plan, lambda planned: planned.size):
                self._send(batch)
                self._sent += len(batch)
                advance(batch[-1].record.end, self._sent)
        except HeadraceError as error:
            error.add_note(self._how_to_go_on(is_unsure=isinstance(error, ClientError)))
            raise
        except KeyboardInterrupt:
            note(f"\ninterrupted: {self._how_to_go_on(is_unsure=True)}")
            raise

    def _send(self, batch: list[Planned]) -> None:
        from headrace.errors import CommandTimeout, ConnectionLost, InvalidCommand

        for left in reversed(range(_TRIES if self._has_ids else 1)):
            try:
                self._queue.add_many([planned.job for planned in batch])
                return
            except (ConnectionLost, CommandTimeout):
                if not left:  # with ids a batch may be repeated, whatever became of it
                    raise
            except InvalidCommand as error:
                raise _blamed(error, batch) from None

    def _how_to_go_on(self, *, is_unsure: bool) -> str:
        done = self._arguments.skip + self._sent
        told = f"{notation.jobs(self._sent)} of {self._arguments.file} were added"
        if self._has_ids:
            return f"{told}; push the same file again: what is there is not added twice"
        doubt = "; the batch that was under way may be there too" if is_unsure else ""
        return f"{told}; go on behind them with --skip {done}{doubt}"

    def _duplicates(self) -> int:
        """How many pushes to the queue met a job that was there already, as far as the server remembers."""
        if not self._has_ids:
            return 0
        from headrace.commands.monitoring import Prometheus

        text = self._client.ask_blocking(Prometheus()).data.metrics
        sample = re.search(
            rf'^bunqueue_queue_duplicates_total{{queue="{re.escape(self._queue.name)}"}} (\d+)', text, re.M
        )
        return int(sample[1]) if sample else 0

    def summarize(self) -> None:
        seconds = time.monotonic() - self._began
        added = self._sent - min(self._duplicates() - self._known, self._sent)
        if self._arguments.as_json:
            summary = {"queue": self._queue.name, "read": self._sent, "added": added, "known": self._sent - added}
            print_json({**summary, "skipped": self._arguments.skip, "seconds": round(seconds, 3)})
            return
        speed = f"in {notation.duration(seconds * 1000)} ({notation.count(self._sent / max(seconds, 0.001))}/s)"
        known_text = f"; {self._sent - added:,} were there already" if self._has_ids else ""
        print_line(f"added {notation.jobs(added)} to {self._queue.name} {speed}{known_text}")


def _blamed(error: Exception, batch: list[Planned]) -> Exception:
    """The error of a batch, told of the line that is to blame."""
    from headrace.cli.records import at_line

    found = re.match(r"jobs\[(\d+)\]:? ?(.*)", str(error), re.S)
    return at_line(batch[int(found[1])].record.line, found[2]) if found else error
