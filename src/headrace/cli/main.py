"""The parser and the exit code. Each command is a module of this package with the command's name.

Only the module of the command that is asked for is imported, so help and commands start fast. To add a command: its
line in COMMANDS, and a module `headrace/cli/<name>.py` with `prepare(parser)` that describes it, adds its arguments and
sets `run`, a function that takes the parsed arguments and returns the exit code. Heavy imports belong into `run`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from typing import Final, NoReturn

from headrace import __version__
from headrace.cli.session import Exit, UsageError, abandon_stdout, advised, prepare_streams, report
from headrace.errors import HeadraceError

COMMANDS: Final[dict[str, str]] = {
    "serve": "run a server in the foreground",
    "worker": "run the tasks of an app",
    "push": "add a job, or many from a file",
    "pull": "take jobs and print them",
    "job": "show one job, act on it, wait for it",
    "jobs": "list the jobs of a queue",
    "queues": "list queues; pause, resume, limit, drain, clean, obliterate them",
    "dlq": "dead letters of a queue: list by error, retry, remove",
    "cron": "schedules: list, add, delete; show when an expression runs next",
    "workers": "list the workers",
    "events": "follow what happens, live",
    "top": "watch queues and workers in the terminal",
    "stats": "totals, rates, memory and disk of the server",
    "health": "exit code 0 if the server is healthy, for probes",
    "export": "write the jobs of a queue as JSON lines",
    "bench": "measure how fast a server responds from here",
    "call": "send any command of the protocol",
    "flow": "workflows: list, show, cancel, signal, retry",
    "pipeline": "job history to facts and reports, with Spark",
    "capture": "keep the history of queues on Valkey, for the pipeline",
    "doctor": "check a database file",
    "backup": "copy a database file while its server keeps running",
    "valkey": "prepare a Valkey server, or print our function libraries",
}


EXTRAS: Final = {"valkey": "valkey", "libvalkey": "valkey", "pyspark": "spark", "pyarrow": "spark", "pandas": "spark"}
"""Modules that come with an extra of the package, and its name."""

_any_width: Final = partial(argparse.HelpFormatter, width=80)
"""Good enough to check arguments with: argparse makes a formatter for each, and the usual one asks the terminal."""


class _Parser(argparse.ArgumentParser):
    """Errors read like all others, without a page of usage before them."""

    explained_by = ""
    """Whose help says more, if not its own: what a command does not know is noticed here, after it."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.search(
            r"argument (COMMAND|ACTION|JOB): invalid choice: '(.*?)' \(choose from (.*)\)", message
        ):
            kind, word, choices = unknown.groups()
            from difflib import get_close_matches

            near = get_close_matches(word, re.findall(r"[\w-]+", choices), 1)
            if near or kind == "COMMAND":
                message = f"there is no {kind.lower()} {word}" + (f"; did you mean {near[0]}?" if near else "")
        raise advised(UsageError(message), f"`{self.explained_by or self.prog} --help` shows how to use it")


def _parser(wanted: Collection[str]) -> argparse.ArgumentParser:
    """The parser, complete for the commands that are named; when there are none, all are listed."""
    parser = _Parser(
        prog="headrace",
        description="A job queue that speaks the bunqueue protocol and loses nothing it acknowledged.",
        epilog='Try `headrace serve`, then `headrace push mail welcome \'{"to": "ada"}\'` in another terminal. '
        "`headrace COMMAND --help` explains one.",
        formatter_class=_any_width,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    parser.set_defaults(url=None, as_json=False)
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, prog="headrace")
    known = [name for name in COMMANDS if name in wanted]
    if len(known) == 1:
        parser.explained_by = f"headrace {known[0]}"
    for name in known or COMMANDS:
        summary = COMMANDS[name]
        description = f"{summary[0].upper()}{summary[1:]}."
        command = subcommands.add_parser(name, help=summary, description=description, formatter_class=_any_width)
        if known:
            import_module(f"headrace.cli.{name}").prepare(command)
            if command.formatter_class is _any_width:
                command.formatter_class = argparse.HelpFormatter
    parser.formatter_class = argparse.HelpFormatter
    return parser


def _told(error: OSError) -> str:
    """Without the number, which means nothing to most."""
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    prepare_streams()
    if not words:
        _parser(()).print_help(sys.stderr)
        return Exit.USAGE
    try:
        flag = words[0].partition("=")[0]
        if flag in ("--url", "--json"):  # argparse would take the URL for the command
            usage = f"headrace COMMAND {flag}{' URL' * (flag == '--url')}"
            raise advised(UsageError(f"{flag} stands before the command"), f"write it behind: {usage}")
        arguments = _parser(words[:1]).parse_args(words)
    except UsageError as error:
        return report(error, "--json" in words)
    try:
        code = int(arguments.run(arguments) or 0)
        sys.stdout.flush()
        return code
    except HeadraceError as error:
        return report(error, arguments.as_json)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        told = f'{missing} is missing: pip install "headrace[{EXTRAS[missing]}]"'
        return report(HeadraceError(told), arguments.as_json)
    except UnicodeEncodeError as error:
        return report(UsageError(f"{error.object!r} is not UTF-8"), arguments.as_json)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except OSError as error:  # nobody reads any more (`| head`), or what is printed cannot be written
        abandon_stdout()
        return (
            Exit.FAILED
            if isinstance(error, BrokenPipeError)
            else report(HeadraceError(_told(error)), arguments.as_json)
        )
