"""What every client command shares: which server is meant, the connection, exit codes and how errors read.

An error is told in two lines: what happened and why, then what to do. To give an error a hint or an exit code add its
class to _VERDICTS; the first row that fits wins.
"""

from __future__ import annotations

import argparse
import enum
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from headrace import errors

if TYPE_CHECKING:
    from headrace.client.client import Client

DEFAULT_URL: Final = "headrace://localhost:6789"
EMBEDDED: Final = ("sqlite", "memory")
BULK_S: Final = 600.0
"""How long a command that touches a whole queue may take."""
_CLOSING_S: Final = 10.0


class Exit(enum.IntEnum):
    """Exit codes. 2 is also argparse's for a command line that it does not understand."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NO_CONNECTION = 4
    INTERRUPTED = 130


EXIT_CODES: Final[dict[Exit, str]] = {
    Exit.OK: "done",
    Exit.FAILED: "refused or failed: the job failed, the state does not allow it, the server is not healthy",
    Exit.USAGE: "the command line or a value in it is wrong",
    Exit.NOT_FOUND: "no such job, schedule or dead letter",
    Exit.NO_CONNECTION: "no connection, no answer in time, or a token that is not accepted",
    Exit.INTERRUPTED: "interrupted with Ctrl-C",
}


class UsageError(errors.HeadraceError):
    """The command line asks for something that makes no sense."""

    code = "usage"


def advised(error: errors.HeadraceError, hint: str) -> errors.HeadraceError:
    """The error with a line that says what to do about it."""
    error.add_note(hint)
    return error


_NO_SERVER: Final = "start a server with `headrace serve`, or name another one with --url or HEADRACE_URL"
_NO_TOKEN: Final = (
    "use one of the tokens that the server was started with: in HEADRACE_TOKEN, or in the URL (?token=...)"
)
_FULL: Final = "nothing can be stored now: `headrace health` says whether that lasts"
_SILENCE: Final = "it may have been carried out anyway: check before you repeat it"

_VERDICTS: Final[tuple[tuple[type[Exception], Exit, str], ...]] = (
    (errors.NotAuthenticated, Exit.NO_CONNECTION, _NO_TOKEN),
    (errors.ConnectionLost, Exit.NO_CONNECTION, _NO_SERVER),
    (errors.CommandTimeout, Exit.NO_CONNECTION, _SILENCE),
    (errors.NotFound, Exit.NOT_FOUND, ""),
    (errors.InvalidCommand, Exit.USAGE, ""),
    (errors.ConfigError, Exit.USAGE, ""),
    (UsageError, Exit.USAGE, ""),
)


def verdict(error: errors.HeadraceError) -> tuple[Exit, list[str]]:
    """The exit code of an error, and what its reader can do."""
    own: list[str] = getattr(error, "__notes__", [])
    for kind, code, hint in _VERDICTS:
        if isinstance(error, kind):
            return code, own or [hint][: bool(hint)]
    return Exit.FAILED, own


def report(error: errors.HeadraceError, as_json: bool) -> int:
    """Tell of an error on stderr; the exit code that belongs to it."""
    code, hints = verdict(error)
    if as_json:
        told = {"error": str(error), "code": error.code, "exit": int(code), "hints": hints}
        import json

        print(json.dumps(told, ensure_ascii=False), file=sys.stderr)
        return code
    from headrace.notation import harmless

    print(f"headrace: {harmless(str(error))}", file=sys.stderr)
    for hint in hints:
        print(f"          {hint}", file=sys.stderr)
    return code


def prepare_streams() -> None:
    """JSON is UTF-8 and names may have any letter, whatever the locale can write; a stream that is closed is empty."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # or a socket would get its number
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def abandon_stdout() -> None:
    """What is still buffered must not raise once more when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- which server ------------------------------------------------------------------------------------------------------


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that talks to a server. Their defaults are those of the top parser."""
    shared = parser.add_argument_group("connection and output")
    shared.add_argument(
        "--url",
        metavar="URL",
        default=argparse.SUPPRESS,
        help=f"server or file (default: HEADRACE_URL, else {DEFAULT_URL}); sqlite:///jobs.db opens a file directly",
    )
    shared.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, dest="as_json", help="JSON for machines on stdout"
    )


def add_action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """A parser below that of the command, described by its summary."""
    description = f"{summary[0].upper()}{summary[1:]}."
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=description)
    return parser


def add_yes_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def url_of(arguments: argparse.Namespace) -> str:
    from headrace.client.urls import default_url

    return arguments.url or default_url()


def is_embedded(arguments: argparse.Namespace) -> bool:
    return _scheme(arguments) in EMBEDDED


def _scheme(arguments: argparse.Namespace) -> str:
    return url_of(arguments).partition("://")[0].lower()


def require_server(arguments: argparse.Namespace, why: str) -> None:
    """Some things make sense only when the server outlives this command."""
    if is_embedded(arguments):
        raise advised(UsageError(why), "run `headrace serve` on that file and leave --url out")


@contextmanager
def connected(
    arguments: argparse.Namespace, patience_s: float | None = None, *, may_create: bool = False
) -> Iterator[Client]:
    """A client that can be asked, closed in order at the end; `patience_s` bounds how long connecting may take.

    Only what adds something may create the file that it is added to: elsewhere its name is a mistake.
    """
    from headrace.client.urls import SERVER_SCHEMES
    from headrace.connect import file_of, open_client, release_client

    url = url_of(arguments)
    if _scheme(arguments) == "sqlite" and not may_create and not file_of(url).exists():
        missing = errors.NotFound(f"cannot open {file_of(url)}: there is no such file")
        raise advised(missing, "name another one with --url or HEADRACE_URL; `headrace push` makes a new one")
    options: dict[str, object] = {}
    if _scheme(arguments) in SERVER_SCHEMES:
        if "pool_size=" not in url:
            options["pool_size"] = 1  # a command asks one thing after the other
        if patience_s is not None:
            options["connect_timeout"] = patience_s
    client = open_client(url, **options)
    try:
        _connect(client, is_embedded(arguments))
        yield client
    except errors.StorageUnavailable as error:
        raise advised(error, _FULL) from None
    finally:
        if (closing := release_client(client)) is not None:
            with suppress(TimeoutError):  # the process ends now, and with it the connection
                closing.result(_CLOSING_S)


def _connect(client: Client, is_file: bool) -> None:
    try:
        client.connect().result()
    except errors.StorageUnavailable as error:  # a store that is asked without a server between
        if is_file:
            raise errors.Refused(str(error)) from None
        raise no_valkey(error) from None


def no_valkey(error: errors.StorageUnavailable) -> errors.HeadraceError:
    """What is told of a Valkey that cannot be worked with: one that answers need not be started."""
    from headrace.backends.valkey.connection import is_lasting

    lost = errors.ConnectionLost(str(error))
    if not is_lasting(error):
        return advised(lost, "start it, or name another one with --url")
    if re.search("NOAUTH|WRONGPASS", str(error)):
        return advised(lost, "name user and password in the URL: valkey://USER:PASSWORD@HOST:6379/0")
    return lost
