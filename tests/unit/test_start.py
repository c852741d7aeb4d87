"""A server starts fast: what it does not need to listen is loaded later, and nobody notices."""

from __future__ import annotations

import subprocess
import sys

import msgspec


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines()


def test_a_server_listens_before_it_loads_calendars_http_and_rare_commands() -> None:
    """What argparse and asyncio load themselves depends on the version of Python and does not count."""
    (loaded,) = run(
        "import sys, argparse, asyncio\nbefore = set(sys.modules)\n"
        "import headrace.cli.serve, headrace.server.app\nprint(*set(sys.modules) - before)"
    )
    later = ("tomllib", "zoneinfo", "cronsim", "httptools", "wsproto", "dataclasses", "hmac", "json", "shutil")
    ours = ("headrace.schedules", "headrace.server.http", "headrace.commands.webhooks", "headrace.commands.families")
    assert [name for name in loaded.split() if name.startswith((*later, *ours))] == []


def test_a_rare_command_is_understood_even_as_the_first_one() -> None:
    frame = msgspec.msgpack.encode({"cmd": "ListWebhooks", "reqId": 1})
    assert run(f"from headrace.wire import decode_command\nprint(type(decode_command({frame!r})).__name__)") == [
        "ListWebhooks"
    ]


def test_rare_commands_in_a_row_are_understood_even_as_the_first_ones() -> None:
    frames = [msgspec.msgpack.encode({"cmd": name, "reqId": 1}) for name in ("Ping", "ListWebhooks")]
    code = (
        "from headrace.wire import decode_command, decode_commands\n"
        f"frames = {frames!r}\n"
        "try:\n    decode_commands(frames)\n"
        "except Exception:\n    print(*[type(decode_command(frame)).__name__ for frame in frames])\n"
        "print(*[type(command).__name__ for command in decode_commands(frames)])"
    )
    assert run(code) == ["Ping ListWebhooks", "Ping ListWebhooks"]


def test_an_unknown_first_command_is_refused_by_name() -> None:
    frame = msgspec.msgpack.encode({"cmd": "Nonsense", "reqId": 1})
    code = f"from headrace.wire import decode_command\ntry:\n    decode_command({frame!r})\n"
    assert run(f"{code}except Exception as error:\n    print(error)") == ["Unknown command: Nonsense"]
