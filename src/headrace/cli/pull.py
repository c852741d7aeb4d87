"""`headrace pull`: take jobs out of a queue by hand.

With --ack a job is completed after it was printed, so nothing is lost when the printing fails. Without, it stays leased
to whoever has the token that is printed, until the lease ends.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from headrace import notation
from headrace.cli.jobflags import read_data
from headrace.cli.output import note, payload_of, print_fields, print_json_line, print_line, print_payload
from headrace.cli.session import Exit, UsageError, add_client_flags, advised, connected, require_server

if TYPE_CHECKING:
    from msgspec import Raw

    from headrace.client.client import Client
    from headrace.commands.jobs import Pull, Pulled

_LONGEST_POLL_S: Final = 60.0


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Take jobs out of a queue and print them. Without --ack they stay leased, and `headrace job ID ack --token T` "
        "or `... fail --token T` settles them. Exit code 3: there was no job."
    )
    parser.add_argument("queue", metavar="QUEUE", help="queue to take from")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="how many at most (default: 1)")
    parser.add_argument(
        "--wait", metavar="SPAN", default="0s", help="wait this long for the first one (default: do not wait)"
    )
    parser.add_argument("--ack", action="store_true", help="complete each one once it has been printed")
    parser.add_argument("--result", metavar="JSON", help="with --ack: the result to complete it with")
    parser.add_argument("--lease", metavar="SPAN", default="5m", help="how long the token holds (default: 5m)")
    add_client_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.ack:
        require_server(arguments, "a lease ends when this command closes the file: add --ack to complete the job")
    if arguments.count < 1:
        raise UsageError("--count must be at least 1")
    if arguments.result is not None and not arguments.ack:
        raise advised(
            UsageError("--result is for --ack: without it the job stays leased"),
            "add --ack, or give the result later: headrace job ID ack --token T --result JSON",
        )
    result = read_data(arguments.result, "--result")
    from headrace.durations import milliseconds, seconds

    wait, lease = seconds(arguments.wait, "--wait"), milliseconds(arguments.lease, "--lease")
    with connected(arguments) as client:
        for taken in range(arguments.count):
            pulled = _pull(client, arguments, lease, wait if taken == 0 else 0)
            if pulled is None:
                if not taken and not arguments.as_json:
                    note(f"no job of {notation.one_line(arguments.queue)} is ready; `headrace queues` shows all")
                return Exit.OK if taken else Exit.NOT_FOUND
            _show(pulled, arguments)
            if arguments.ack:
                _complete(client, pulled, result)
    return Exit.OK


def _pull(client: Client, arguments: argparse.Namespace, lease_ms: float, wait_s: float) -> Pulled | None:
    from headrace.model import NIL

    deadline = time.monotonic() + wait_s
    while True:
        poll = min(_LONGEST_POLL_S, max(0.0, deadline - time.monotonic()))
        pulled = client.ask_blocking(_command(arguments, lease_ms, poll), poll + client.timeout)
        if bytes(pulled.job) != NIL:
            return pulled
        if time.monotonic() >= deadline:
            return None


def _command(arguments: argparse.Namespace, lease_ms: float, poll_s: float) -> Pull:
    from headrace.commands.jobs import Pull

    return Pull(
        queue=arguments.queue,
        timeout=int(poll_s * 1000),
        owner=f"headrace-pull@{socket.gethostname()}:{os.getpid()}",
        lock_ttl=lease_ms,
        detach=not arguments.ack,
    )


def _show(pulled: Pulled, arguments: argparse.Namespace) -> None:
    if arguments.as_json:
        print_json_line({"job": pulled.job, **({} if arguments.ack else {"token": pulled.token})})
    else:
        _print_job(pulled.job, "" if arguments.ack else str(pulled.token))
    sys.stdout.flush()


def _print_job(encoded: Raw, token: str) -> None:
    from headrace.client.job import decode_job

    job = decode_job(encoded)
    attempt = f"{job.attempts + 1} of {job.max_attempts}"
    job_id = notation.one_line(job.id)
    print_fields([("id", job_id), ("name", notation.one_line(job.name)), ("attempt", attempt), ("token", token)])
    print_payload(payload_of(job.encoded_data))
    if token:
        print_line(f"complete it with: headrace job {job_id} ack --token {token}", "bright_black")


def _complete(client: Client, pulled: Pulled, result: Any) -> None:
    from headrace.client.job import decode_job
    from headrace.client.payloads import encode_payload
    from headrace.commands.jobs import Acknowledge

    token = pulled.token if isinstance(pulled.token, str) else None
    client.ask_blocking(Acknowledge(id=decode_job(pulled.job).id, token=token, result=encode_payload(result)))
