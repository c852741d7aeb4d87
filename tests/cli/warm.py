"""A process that has everything imported and forks for each command: real processes without the cost of their start.

It reads requests as JSON lines and answers with exit codes. It has one thread and no connections, so a fork of it is as
good as a new process. `python -m headrace` itself is run by the tests of terminals and signals.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import headrace.client.events
import headrace.client.flow
import headrace.connect
import headrace.embedded
import headrace.server.jsonwire
import headrace.wire  # noqa: F401 - so that no child has to import it
from headrace.cli import main as run_command


def become(request: dict[str, Any]) -> int:
    """In the child: be the command."""
    os.dup2(os.open(request["in"], os.O_RDONLY), 0)
    for number, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["folder"])
    try:
        return run_command(request["words"])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 70  # what nobody caught
            try:
                code = become(json.loads(line))
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
