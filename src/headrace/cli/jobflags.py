"""The options of a job as flags, and values as people write them on a command line.

JOB_FLAGS has one entry for every option of `headrace.client.options.Options`; a test keeps the two equal.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.cli.session import UsageError, advised

if TYPE_CHECKING:
    from headrace.client.options import Options

JOB_FLAGS: Final[dict[str, dict[str, Any]]] = {
    "priority": {"type": int, "metavar": "N", "help": "higher goes first (default: 0)"},
    "delay": {"metavar": "SPAN", "help": "run it after this time: 250ms, 30s, 10m, 1h30m, 7d"},
    "at": {
        "metavar": "TIME",
        "help": "run it then, within a year: 2027-03-01T18:00, or with a zone: 2027-03-01T18:00+01:00",
    },
    "attempts": {"type": int, "metavar": "N", "help": "how often it is tried in all (default: 3)"},
    "backoff": {"metavar": "HOW", "help": "pause between attempts: fixed:5s, exponential:1s or exponential:1s:10m"},
    "timeout": {"metavar": "SPAN", "help": "how long one attempt may take"},
    "ttl": {"metavar": "SPAN", "help": "how long it may wait before it is too late to run it"},
    "job_id": {"metavar": "ID", "help": "an id of your own; adding it again returns the job that is there"},
    "once": {"action": "store_true", "help": "with --job-id: add no new job even if the one with this id has ended"},
    "dedup": {"metavar": "KEY", "help": "no second job with this key while the first one has not ended"},
    "group": {"metavar": "NAME", "help": "jobs of a group share limits"},
    "tags": {"flag": "--tag", "action": "append", "metavar": "TAG", "help": "a word to find it by; repeatable"},
    "lifo": {"action": "store_true", "help": "run it before the waiting jobs of the same priority"},
    "durable": {"action": "store_true", "help": "reply only once it is synced to disk: survives a power cut"},
    "depends_on": {"action": "append", "metavar": "ID", "help": "wait for this job; may be given several times"},
    "parent": {"metavar": "ID", "help": "the job that waits for this one"},
    "remove_on_complete": {"action": "store_true", "help": "do not keep it once it has completed"},
    "remove_on_fail": {"action": "store_true", "help": "do not keep it once it has failed for good"},
    "keep_logs": {"type": int, "metavar": "N", "help": "how many log lines to keep"},
    "stall_timeout": {"metavar": "SPAN", "help": "silence after which its worker counts as lost"},
}


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of the job")
    for name, settings in JOB_FLAGS.items():
        rest = {key: value for key, value in settings.items() if key != "flag"}
        group.add_argument(settings.get("flag", f"--{name.replace('_', '-')}"), dest=name, default=None, **rest)
    group.add_argument(
        "--dedup-mode",
        choices=("simple", "throttle", "debounce"),
        help="throttle: no second job within --dedup-ttl; debounce: the newest job replaces the waiting one",
    )
    group.add_argument("--dedup-ttl", metavar="SPAN", help="how long the key is kept (throttle, debounce)")


def job_options(arguments: argparse.Namespace) -> Options:
    """The options that were given."""
    given: Any = {name: getattr(arguments, name) for name in JOB_FLAGS if getattr(arguments, name) is not None}
    _check_company(arguments)
    if arguments.at is not None:
        given["at"] = _moment(arguments.at)
    if arguments.backoff is not None:
        given["backoff"] = _backoff(arguments.backoff)
    if arguments.dedup is not None:
        from headrace.client.options import Dedup

        given["dedup"] = Dedup(arguments.dedup, arguments.dedup_mode or "simple", arguments.dedup_ttl)
    return given  # type: ignore[no-any-return]


def _check_company(arguments: argparse.Namespace) -> None:
    """Flags that mean nothing without another one, or beside it, are mistakes: nobody would notice them."""
    if arguments.delay is not None and arguments.at is not None:
        raise UsageError("--delay and --at both say when the job runs: leave one out")
    if arguments.once and arguments.job_id is None and getattr(arguments, "id_column", None) is None:
        raise UsageError("--once is about the id of a job: give one with --job-id")
    if arguments.dedup is None and (arguments.dedup_mode is not None or arguments.dedup_ttl is not None):
        raise UsageError("--dedup-mode and --dedup-ttl are about a key: name it with --dedup")


def _moment(text: str) -> datetime:
    from headrace.model import YEAR_MS

    try:
        moment = datetime.fromisoformat(text)
        moment = moment if moment.tzinfo is not None else moment.astimezone()
        if moment.timestamp() - time.time() > YEAR_MS / 1000:
            raise UsageError(f"--at {text!r} is more than a year away, which is the longest delay of a job")
        return moment
    except (ValueError, OverflowError):
        raise UsageError(
            f"--at {text!r} is not a time: write for example 2027-03-01T18:00 or 2027-03-01T18:00Z"
        ) from None


def _backoff(text: str) -> Any:
    from headrace.client.options import Backoff

    kind, *spans = text.split(":")
    if not spans:
        return text
    if kind == "fixed" and len(spans) == 1:
        return Backoff.fixed(spans[0])
    if kind == "exponential" and len(spans) <= 2:
        return Backoff.exponential(*spans)
    raise UsageError(f"--backoff {text!r} is not understood: write fixed:5s, exponential:1s or exponential:1s:10m")


# -- values ------------------------------------------------------------------------------------------------------------


def looks_like_data(text: str) -> bool:
    """Whether somebody who left the name out means this as data."""
    return text == "-" or text[:1] in ("{", "[", '"', "@")


def read_data(text: str | None, what: str = "DATA") -> Any:
    """The JSON value of an argument: the text itself, a file (@file) or stdin (-)."""
    import msgspec

    if text is None:
        return None
    content = sys.stdin.buffer.read() if text == "-" else _file(text[1:]) if text.startswith("@") else text
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeError) as error:
        hint = "write JSON, and text with its quotes: '\"like this\"'; @FILE reads a file, - reads stdin"
        raise advised(UsageError(f"{what} is not JSON: {error}"), hint) from None


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
