"""`headrace job ID ACTION`: everything about one job. The id may be one of your own (`--job-id`).

To add an action: a function here and its line in ACTIONS; its first sentence is the help.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from headrace import notation
from headrace.cli.jobflags import read_data
from headrace.cli.jobs import attempt
from headrace.cli.output import (
    Cell,
    Column,
    Styled,
    note,
    payload_of,
    print_fields,
    print_json,
    print_json_line,
    print_line,
    print_payload,
    print_table,
    state_cell,
)
from headrace.cli.session import Exit, add_client_flags, advised, connected, require_server
from headrace.errors import HeadraceError, NotFound, Refused

if TYPE_CHECKING:
    from msgspec import Raw

    from headrace.client.client import Client
    from headrace.client.job import JobInfo, SyncJob
    from headrace.model import TimelineEntry

MAX_TREE: Final = 1000


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show one job, act on it, or wait for it."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "actions:\n" + "\n".join(f"  {name:9} {_summary(action)}" for name, action in ACTIONS.items())
    parser.add_argument("id", metavar="ID", help="id of the job: the generated one, or that of --job-id")
    parser.add_argument(
        "action", metavar="ACTION", nargs="?", default="show", choices=tuple(ACTIONS), help="see below (default: show)"
    )
    parser.add_argument("--timeout", metavar="SPAN", default="5m", help="wait: how long at most (default: 5m)")
    parser.add_argument("--token", metavar="TOKEN", help="ack, fail, discard: the token that `headrace pull` printed")
    parser.add_argument("--force", action="store_true", help="cancel: also a job that runs")
    parser.add_argument("--result", metavar="JSON", help="ack: the result")
    parser.add_argument("--error", metavar="TEXT", help="fail: what went wrong")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with connected(arguments) as client:
        return ACTIONS[arguments.action](_Subject(client, arguments)) or Exit.OK


class _Subject:
    """The job that is meant, as it was when it was asked for."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        from headrace.client.job import SyncJob, decode_job

        self.client = client
        self.arguments = arguments
        self.encoded: Raw = _find(client, arguments.id)
        self.info: JobInfo = decode_job(self.encoded)
        self.handle: SyncJob[Any] = SyncJob(client, self.info.id, self.info.queue, self.info.name)

    def done(self, what: str) -> None:
        """Say what was done to it."""
        if self.arguments.as_json:
            print_json({"id": self.info.id, "state": self.handle.state()})
        else:
            print_line(f"{what} {self.info.id}")

    def refuse(self, what: str, hint: str) -> HeadraceError:
        return advised(Refused(f"job {self.info.id} is {self.info.state}, so it cannot be {what}"), hint)


def _find(client: Client, job_id: str) -> Raw:
    from headrace.commands.queries import GetJob, GetJobByCustomId

    try:
        return client.ask_blocking(GetJob(id=job_id)).job
    except NotFound:
        pass
    try:
        return client.ask_blocking(GetJobByCustomId(custom_id=job_id)).job
    except NotFound:
        hint = "completed jobs are kept for a while only; `headrace jobs QUEUE` lists those that are there"
        raise advised(NotFound(f"there is no job {job_id}"), hint) from None


# -- looking -----------------------------------------------------------------------------------------------------------


def show(subject: _Subject) -> None:
    """everything known about it"""
    if subject.arguments.as_json:
        print_json(subject.encoded)
        return
    job = subject.info
    print_fields(_card(job, time.time() * 1000))
    _print_part("data", payload_of(job.encoded_data))
    if job.encoded_result:
        _print_part("result", payload_of(job.encoded_result))
    if job.failed_reason:
        _print_error(job)
    if job.timeline:
        print_line("\ntimeline", "bright_black")
        print_table(_TIMELINE, list(_timeline(job)))
    logs = subject.handle.logs()
    if logs:
        print_line(f"\nlog ({len(logs)})", "bright_black")
        _print_logs(logs[-10:])


def _card(job: JobInfo, now_ms: float) -> Iterator[tuple[str, Cell]]:
    yield "job", notation.one_line(job.id)
    yield "name", notation.one_line(job.name)
    yield "queue", job.queue
    yield "state", state_cell(job.state)
    yield "attempt", f"{attempt(job)} of {job.max_attempts}"
    yield "created", f"{notation.moment(job.created_at)} ({notation.age(job.created_at, now_ms)})"
    if job.state == "delayed":
        yield "runs", f"{notation.moment(job.run_at)} ({notation.age(job.run_at, now_ms)})"
    yield "priority", str(job.priority) if job.priority else ""
    yield "progress", _progress(job)
    yield "stalls", str(job.stall_count) if job.stall_count else ""
    yield "group", notation.one_line(job.group_id or "")
    yield "dedup", notation.one_line(job.unique_key or "")
    yield "tags", notation.one_line(", ".join(job.tags))
    yield "parent", notation.one_line(job.parent_id or "")
    tree = f"headrace job {notation.one_line(job.id)} tree"
    yield "children", f"{len(job.children_ids)} ({tree})" if job.children_ids else ""


def _progress(job: JobInfo) -> str:
    if not job.progress and not job.progress_message:
        return ""
    return f"{job.progress:g} % {notation.one_line(job.progress_message or '')}".rstrip()


def _print_part(title: str, value: Any) -> None:
    print_line(f"\n{title}", "bright_black")
    print_payload(value, "  ")


def _print_error(job: JobInfo) -> None:
    print_line("\nerror", "bright_black")
    for line in [job.failed_reason or "", *(job.stacktrace or ())]:
        for part in notation.harmless(line).split("\n"):
            print_line(f"  {part}", "red" if line == job.failed_reason else "")


_TIMELINE: Final = (
    Column("  AT"),
    Column("STATE"),
    Column("TOOK", is_number=True, spared=1),
    Column("ATTEMPT", is_number=True, spared=2),
    Column("ERROR", gives_way=12),
)


def _timeline(job: JobInfo) -> Iterator[list[Cell]]:
    """Each state with how long it lasted; the last one lasts until now, unless it is the end."""
    ends = [entry.timestamp for entry in job.timeline[1:]]
    last = None if job.state in ("completed", "failed") else time.time() * 1000
    for entry, end, number in zip(job.timeline, [*ends, last], _attempts(job.timeline), strict=True):
        yield [
            f"  {notation.clock_time(entry.timestamp)}",
            state_cell(entry.state),
            "" if end is None else notation.duration(max(0.0, end - entry.timestamp)),
            "" if number is None else str(number),
            Styled(notation.first_line(entry.error), "red"),
        ]


def _attempts(timeline: list[TimelineEntry]) -> Iterator[int | None]:
    """Which attempt each entry belongs to. Only failures and retries record it; one that runs goes by those before."""
    current, before = 1, ""
    for entry in timeline:
        if entry.attempt is not None:
            current = entry.attempt
        elif before in ("completed", "failed"):
            current = 1  # it was run again by hand, with fresh attempts
        yield current if entry.state in ("active", "completed") else entry.attempt
        before = entry.state


def state(subject: _Subject) -> None:
    """its state, in one word"""
    if subject.arguments.as_json:
        print_json({"id": subject.info.id, "state": subject.info.state})
    else:
        print_line(subject.info.state)


def result(subject: _Subject) -> None:
    """what it returned, as JSON"""
    job = subject.info
    if job.state == "failed":
        raise Refused(f"job {job.id} failed: {job.failed_reason or 'no reason was given'}")
    if job.state != "completed":
        raise subject.refuse("asked for its result", f"wait for it with: headrace job {job.id} wait")
    print_json(payload_of(job.encoded_result))


def logs(subject: _Subject) -> None:
    """its log lines"""
    found = subject.handle.logs()
    if subject.arguments.as_json:
        for log in found:
            print_json_line(log)
    elif found:
        _print_logs(found)
    else:
        note(f"job {notation.one_line(subject.info.id)} has no log lines")


def _print_logs(found: list[Any]) -> None:
    styles = {"warn": "yellow", "error": "red"}
    for log in found:
        text = notation.one_line(log.message)
        print_line(f"  {notation.clock_time(log.timestamp)}  {log.level:5}  {text}", styles.get(log.level, ""))


def tree(subject: _Subject) -> None:
    """the job and its children, with their states"""
    for depth, label, job_id, job in _family(subject.client, subject.info):
        if subject.arguments.as_json:
            told = {"id": job_id, "depth": depth, "state": "unknown" if job is None else job.state}
            print_json_line({**told, "parent": None if job is None else job.parent_id})
        elif job is None:
            print_line(f"{label}{notation.one_line(job_id)}  (not kept any more)", "bright_black")
        else:
            text = f"{label}{notation.one_line(job.name)}  {job.state}  {job.queue}  {notation.one_line(job.id)}"
            print_line(text, state_cell(job.state).style)


def _family(client: Client, root: JobInfo) -> Iterator[tuple[int, str, str, JobInfo | None]]:
    """The job and all below it, each with the lines that are drawn before it."""
    open_nodes = [(0, "", "", root.id)]
    for _ in range(MAX_TREE):
        if not open_nodes:
            return
        depth, label, indent, job_id = open_nodes.pop()
        job = root if not depth else _kept(client, job_id)
        yield depth, label, job_id, job
        children = [] if job is None else job.children_ids
        for child in reversed(children):
            branch, below = ("└─ ", "   ") if child == children[-1] else ("├─ ", "│  ")
            open_nodes.append((depth + 1, indent + branch, indent + below, child))
    if open_nodes:
        note(f"only the first {MAX_TREE:,} jobs are shown")


def _kept(client: Client, job_id: str) -> JobInfo | None:
    from headrace.client.job import decode_job

    try:
        return decode_job(_find(client, job_id))
    except NotFound:
        return None


# -- waiting and steering ----------------------------------------------------------------------------------------------


def wait(subject: _Subject) -> None:
    """wait until it has ended, print its result; exit code 1: it failed"""
    require_server(subject.arguments, "nobody can run the job while this command has the file open")
    print_json(subject.handle.result(subject.arguments.timeout))


def cancel(subject: _Subject) -> None:
    """remove it if it has not started; with --force also while it runs"""
    if not subject.handle.cancel(subject.arguments.force):
        has_ended = subject.info.state in ("completed", "failed")
        raise subject.refuse("cancelled", "it has ended already" if has_ended else "--force takes it from its worker")
    subject.done("cancelled")


def promote(subject: _Subject) -> None:
    """run a delayed job now"""
    if subject.info.state != "delayed":
        raise subject.refuse("promoted", "only delayed jobs can be")
    subject.handle.promote()
    subject.done("promoted")


def retry(subject: _Subject) -> None:
    """run it again after it failed or completed"""
    from headrace.client.queue import SyncQueue

    if subject.info.state == "failed":
        subject.handle.retry()
    elif subject.info.state == "completed":
        SyncQueue(subject.client, subject.info.queue).retry_completed(subject.info.id)
    else:
        raise subject.refuse("retried", "only jobs that have ended can be")
    subject.done("retried")


def discard(subject: _Subject) -> None:
    """make it a dead letter now; one that is leased needs its token"""
    from headrace.commands.control import Discard

    if subject.info.state in ("completed", "failed"):
        raise subject.refuse("discarded", "it has ended already")
    subject.client.ask_blocking(Discard(id=subject.info.id, token=subject.arguments.token))
    subject.done("discarded")


def remove(subject: _Subject) -> None:
    """remove it: a job that has not started, or a dead letter"""
    if subject.info.state == "failed":
        from headrace.client.queue import SyncDlq

        SyncDlq(subject.client, subject.info.queue).remove(subject.info.id)
    elif subject.info.state == "completed":
        raise subject.refuse("removed by itself", f"headrace queues clean {subject.info.queue} --state completed")
    elif not subject.handle.cancel():
        raise subject.refuse("removed", "a worker has it")
    subject.done("removed")


def ack(subject: _Subject) -> None:
    """complete it, with the token of a pull"""
    from headrace.client.payloads import encode_payload
    from headrace.commands.jobs import Acknowledge

    arguments = subject.arguments
    given = encode_payload(read_data(arguments.result, "--result"))
    _settle(subject, Acknowledge(id=subject.info.id, token=arguments.token, result=given))
    subject.done("completed")


def fail(subject: _Subject) -> None:
    """end its attempt as failed, with the token of a pull"""
    from headrace.commands.jobs import Fail

    arguments = subject.arguments
    _settle(subject, Fail(id=subject.info.id, token=arguments.token, error=arguments.error))
    subject.done("failed")


def _settle(subject: _Subject, command: Any) -> None:
    from msgspec import UNSET

    try:
        reply = subject.client.ask_blocking(command)
    except NotFound:  # the job is there: nobody has taken it, or no longer has it
        hint = f"`headrace pull {subject.info.queue}` takes jobs and prints their tokens"
        raise subject.refuse("settled", hint) from None
    if reply.data is not UNSET:
        raise subject.refuse("settled with this token", "its lease had ended: it may have run again")


ACTIONS: Final[dict[str, Callable[[_Subject], int | None]]] = {
    "show": show,
    "state": state,
    "result": result,
    "logs": logs,
    "tree": tree,
    "wait": wait,
    "cancel": cancel,
    "promote": promote,
    "retry": retry,
    "discard": discard,
    "remove": remove,
    "ack": ack,
    "fail": fail,
}


def _summary(action: Callable[..., Any]) -> str:
    return action.__doc__ or ""
