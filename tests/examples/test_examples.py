"""The programs in examples/: each runs as written and prints what its story says, wherever its jobs are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import pages
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

OWN = {
    "quickstart.py": [
        "'hi' sent to ada@example.com",
        "'welcome' sent to ada@example.com",
        "state: delayed",
        "'hi' sent to grace@example.com",
        "counted: [1, 2]",
        "progress: 2 of 2",
    ],
    "retries.py": [
        "attempt 1 of 3",
        "attempt 2 of 3",
        "attempt 3 of 3",
        "failed: ConnectionError: the bank does not answer",
        "failed: amount must not be negative",
        "after the retry: charged 12",
        "dead letters: 1",
    ],
    "flow.py": ["before: waiting-children", "daily: 2 pages, 45 characters", "after: completed"],
    "cron.py": [
        "tick 1",
        "tick 2",
        "tick 3",
        "examples-nightly 30 2 * * * Europe/Berlin",
        "examples-tick every 100ms",
    ],
    "process_task.py": ["primes: 9592", "the endless one was stopped"],
}

OFFICIAL = {
    "bunqueue/produce_and_consume.py": [
        "result {'sent': 'ada@example.com'}",
        "result {'sent': 'grace@example.com'}",
        "result {'sent': 'edsger@example.com'}",
        "completed 3",
    ],
    "bunqueue/retries_and_dead_letters.py": [
        "attempt 1 of 12: the bank does not answer",
        "attempt 2 of 12: the bank does not answer",
        "attempt 3 of 12: the bank does not answer",
        "attempt 1 of -5: amount must not be negative",
        "dead letter 12: the bank does not answer (attempts: 3)",
        "dead letter -5: amount must not be negative (attempts: 1)",
        "after the retry: charged 12",
        "left in the dead-letter queue: 1",
    ],
    "bunqueue/flow.py": ["before: waiting-children", "report: 2 pages, 45 characters", "after: completed"],
}

ELSEWHERE = {"web.py", "polyglot/shop.py"}
"""Told by tests of their own, here and in tests/ecosystem."""


def lines_of(name: str, environment: dict[str, str], folder: Path) -> list[str]:
    command = [sys.executable, str(pages.ROOT / "examples" / name)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=pages.LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_every_example_has_a_test_and_a_line_in_the_list() -> None:
    folder = pages.ROOT / "examples"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    assert there == {*OWN, *OFFICIAL, *ELSEWHERE}
    listed = (folder / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name})" in listed for name in there)


@pytest.mark.parametrize("place", ["memory", "sqlite"])
@pytest.mark.parametrize("name", OWN)
def test_an_example_tells_its_story_without_a_server(name: str, place: str, tmp_path: Path) -> None:
    environment = pages.environment()
    if place == "sqlite":
        environment["HEADRACE_URL"] = f"sqlite:///{tmp_path}/jobs.db"
    assert lines_of(name, environment, tmp_path) == OWN[name]


@pytest.mark.parametrize("name", [*OWN, *OFFICIAL])
def test_an_example_tells_its_story_on_a_server_and_tidies_up(
    name: str, server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    environment = pages.environment(server.port) | {"HEADRACE_URL": f"headrace://127.0.0.1:{server.port}"}
    assert lines_of(name, environment, tmp_path) == (OWN | OFFICIAL)[name]
    left = [queue for queue in client.call("ListQueues")["queues"] if "examples-" in str(queue)]
    assert left == []
    assert client.call("CronList")["crons"] == []


def test_an_example_can_be_run_twice(server: ServerProcess, tmp_path: Path) -> None:
    environment = pages.environment(server.port) | {"HEADRACE_URL": f"headrace://127.0.0.1:{server.port}"}
    for _ in range(2):
        assert lines_of("flow.py", environment, tmp_path) == OWN["flow.py"]


def test_python_and_bun_give_work_to_each_other(server: ServerProcess, client: Client, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(pages.ROOT / "tests/interop/node_modules")
    (tmp_path / "mailer.ts").write_text((pages.ROOT / "examples/polyglot/mailer.ts").read_text())
    bun = pages.run([str(pages.ROOT / "tools/bun.sh")], pages.ROOT).strip()
    environment = pages.environment(server.port)
    mailer = subprocess.Popen([bun, "mailer.ts"], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL)
    try:
        assert lines_of("polyglot/shop.py", environment, tmp_path) == [
            "python resizes logo.png to 64",
            "bun answered: mail to ada@example.com with logo.png@64",
        ]
        assert mailer.wait(10) == 0
    finally:
        mailer.kill()
        mailer.wait()
    for queue in ("examples-mails", "examples-images"):
        assert client.call("Count", queue=queue)["count"] == 0
