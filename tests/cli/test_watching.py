"""`headrace stats`, `workers`, `health`, `events`, `top`, `export` and `bench`: looking on, live and in bulk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.terminal import Cli, Terminal
from tests.cli.test_jobs import bury, complete, push
from tests.cli.test_queues import fill
from tests.integration.faultydisk import fill as fill_disk
from tests.integration.faultydisk import small_disk
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

# -- figures -----------------------------------------------------------------------------------------------------------


def test_stats_are_a_card_or_a_document(cli: Cli, client: Client, queue: str) -> None:
    fill(client, queue, 20_000)
    complete(client, f"{queue}-2")
    card = cli.ok("stats").out
    assert re.search(r"^waiting +2\d\.?\d? k$", card, re.MULTILINE), card
    document = cli.ok("stats", "--json").document
    assert document["stats"]["waiting"] >= 20_000
    assert document["metrics"]["totalCompleted"] >= 1


def test_workers_are_listed_with_what_they_do(cli: Cli, server: ServerProcess, queue: str) -> None:
    assert "headrace worker" in cli.ok("workers", "--queue", queue).err
    with server.client() as worker:
        known = worker.ok("RegisterWorker", name="mailer", queues=[queue], concurrency=4, hostname="box", pid=7)
        worker.ok("Heartbeat", id=known["data"]["workerId"], activeJobs=2, processed=1500, failed=3)
        line = cli.ok("workers", "--queue", queue).out.splitlines()[1]
        assert line.split() == ["mailer", queue, "2/4", "1,500", "3", "now", "box:7"]
        assert cli.ok("workers", "--queue", queue, "--json").document["processedJobs"] == 1500


def test_health_is_an_exit_code(cli: Cli, offline: Cli, server: ServerProcess) -> None:
    assert cli.ok("health").out == "healthy\n"
    assert cli.ok("health", "--json").document["healthy"] is True
    assert offline("health", "--url", "headrace://127.0.0.1:1").code == 4


def test_a_server_that_hangs_is_not_healthy(offline: Cli, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db") as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            done = offline("health", "--timeout", "300ms", "--url", f"headrace://127.0.0.1:{server.port}")
            assert done.code == 4
            assert "no answer within 0.3 s" in done.err
            assert time.monotonic() - began < 10
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_a_full_disk_is_told_with_1(offline: Cli, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8) as disk, ServerProcess(disk / "headrace.db") as server:
        url = ("--url", f"headrace://127.0.0.1:{server.port}")
        fill_disk(disk / "ballast")
        (tmp_path / "big.json").write_text(f'"{"x" * 300_000}"')
        deadline = time.monotonic() + 20
        while (refused := offline("push", "q", "n", "@big.json", *url)).code == 0:
            assert time.monotonic() < deadline
        assert refused.code == 1
        assert "headrace health" in refused.err
        ill = offline("health", *url)
        assert ill.code == 1
        assert "nothing can be stored: " in ill.out
        sentence = offline.ok("top", "--once", *url).out.splitlines()[0]
        assert sentence.startswith("✕ Nothing is accepted. Storage is full: ")
        assert sentence.endswith(" by itself.")
        (disk / "ballast").unlink()
        while offline("health", *url).code:
            assert time.monotonic() < deadline


# -- events ------------------------------------------------------------------------------------------------------------


def first_line(process: subprocess.Popen[str], client: Client, queue: str) -> str:
    """Push until the follower tells of it: then it listens."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        push(client, queue)
        line = process.stdout.readline()
        if line:
            return line
    raise AssertionError("nothing was told")


def test_events_of_all_queues_are_followed_until_ctrl_c(cli: Cli, client: Client, queue: str) -> None:
    follower = cli.start("events")
    assert re.match(rf"\d\d:\d\d:\d\d\.\d{{3}}  pushed +{re.escape(queue)}  ", first_line(follower, client, queue))
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=20)
    assert (follower.returncode, err) == (130, "")


def test_events_of_one_queue_end_after_a_count(cli: Cli, client: Client, queue: str) -> None:
    follower = cli.start("events", queue, "--json", "--count", "200")
    first_line(follower, client, queue)
    bury(client, f"{queue}-other", "x")
    for _ in range(200):
        push(client, queue)
    out, _ = follower.communicate(timeout=20)
    assert follower.returncode == 0
    assert f'"queue":"{queue}-other"' not in out
    assert cli.ok("events", queue, "--for", "100ms").out == ""


# -- top ---------------------------------------------------------------------------------------------------------------


def test_one_picture_as_text_names_the_worst_queue_first(cli: Cli, client: Client, queue: str) -> None:
    fill(client, queue, 40)
    client.ok("Pause", queue=queue)
    picture = cli.ok("top", "--once").out.splitlines()
    assert f"{queue} is paused with 40 waiting." in picture[0]
    assert picture[1].startswith("in ")
    assert picture[2].startswith("out ")
    assert picture[4].split()[:4] == ["QUEUE", "WAITING", "TREND", "ACTIVE"]
    assert picture[5].split()[:3] == ["‖", queue, "40"]
    assert "\x1b" not in "".join(picture)
    client.ok("Obliterate", queue=queue)
    document = cli.ok("top", "--json").document
    assert {"overview", "history"} == set(document)


def screen(terminal: Terminal) -> str:
    """The newest picture, without an escape sequence of which only the beginning has arrived."""
    return re.sub(r"\x1b\[?[0-9;?]*$", "", re.split(r"\x1b\[H", terminal.raw)[-1])


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_top_draws_fits_the_terminal_and_q_leaves(cli: Cli, client: Client, queue: str, columns: int) -> None:
    for n in range(40):
        push(client, f"{queue[:60]}-{n}")
    with cli.on_terminal("top", "--interval", "500ms", columns=columns, rows=24) as terminal:
        terminal.wait_for("q quits")
        push(client, f"{queue[:60]}-0")
        before = terminal.raw.count("q quits")
        began = time.monotonic()
        while terminal.raw.count("q quits") < before + 3:
            assert time.monotonic() - began < 20
            terminal.read()
        # Three more pictures at two a second at most.
        assert time.monotonic() - began >= 1.0
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen(terminal)).split("\n")
        assert len(lines) <= 25
        assert max(len(line.rstrip("\r")) for line in lines) <= columns
        assert "more queues" in terminal.text
        terminal.type("\x1b[A")  # an arrow is three characters, none of which may stand before the next key
        terminal.type("q")
        assert terminal.end() == 0
    # The screen of before is back, and the cursor.
    assert "\x1b[?1049l" in terminal.raw
    assert "\x1b[?25h" in terminal.raw
    for n in range(40):
        client.ok("Obliterate", queue=f"{queue[:60]}-{n}")


def test_top_tells_the_whole_sentence_on_a_narrow_terminal(offline: Cli, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db") as server, server.client() as client:
        long_ago = client.ok("Ping")["data"]["time"] - 900_000
        for name, later in (("customer-newsletter", 0), ("weekly-statistics", 5_000)):
            client.ok("PUSH", queue=name, data=1, timestamp=long_ago + later)
        url = f"headrace://127.0.0.1:{server.port}"
        with offline.on_terminal("top", "--url", url, columns=60, rows=24) as terminal:
            terminal.wait_for("q quits")
            words = " ".join(terminal.text.split())
            assert "customer-newsletter is stuck: 1 waiting, the oldest for 15 min, and no worker takes them." in words
            assert "1 more queue needs a look." in words
            terminal.type("q")
            assert terminal.end() == 0


def test_top_says_when_the_server_is_gone_and_goes_on_when_it_is_back(offline: Cli, tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "headrace.db").start()
    url = f"headrace://127.0.0.1:{server.port}"
    try:
        with offline.on_terminal("top", "--interval", "500ms", "--url", url) as terminal:
            terminal.wait_for("q quits")
            server.kill()
            terminal.wait_for("No answer: ")
            server.start()
            terminal.read()
            terminal.raw = ""
            deadline = time.monotonic() + 30
            while "q quits" not in terminal.text or "No answer" in terminal.text:
                assert time.monotonic() < deadline
                terminal.raw = ""
                terminal.read(0.7)
            terminal.type("q")
            assert terminal.end() == 0
    finally:
        server.kill()


def test_a_terminated_top_puts_the_terminal_back(cli: Cli) -> None:
    with cli.on_terminal("top") as terminal:
        terminal.wait_for("q quits")
        terminal.process.terminate()
        assert terminal.end() == 143
    assert "\x1b[?1049l" in terminal.raw


def test_colours_go_when_nobody_wants_them(cli: Cli, client: Client, queue: str) -> None:
    push(client, queue)
    with cli.on_terminal("jobs", queue, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
        assert "\x1b[33m" not in terminal.raw
        assert "waiting" in terminal.text


# -- export and progress -----------------------------------------------------------------------------------------------


def test_an_export_can_be_pushed_again(cli: Cli, client: Client, queue: str) -> None:
    number = scaled(9000, 50_000)
    jobs = [{"data": {"n": n}, "name": f"k{n % 2}", "priority": n % 3} for n in range(number)]
    client.ok("PUSHB", queue=queue, jobs=jobs)
    push(client, queue, delay=60_000)
    exported = cli.ok("export", queue, "--state", "waiting", "-o", "jobs.jsonl")
    assert exported.out == ""
    assert exported.err.startswith(f"exported {number:,} jobs of {queue} in ")
    columns = ("--name-column", "name", "--data-column", "data", "--priority-column", "priority")
    cli.ok("push", f"{queue}-copy", "--file", "jobs.jsonl", *columns)
    copies = client.ok("GetJobs", queue=f"{queue}-copy", limit=number)["jobs"]
    shown = ("data", "name", "priority")
    assert [{name: job[name] for name in shown} for job in copies] == jobs
    assert len(cli.ok("export", queue).lines) == number + 1
    assert cli("export", queue, "-o", "no/such/folder").code == 2


def test_jobs_too_large_for_one_page_are_exported_all_the_same(cli: Cli, client: Client, queue: str) -> None:
    big = "x" * 9_000_000
    for _ in range(9):
        push(client, queue, data=big)
    cli.ok("export", queue, "-o", "big.jsonl")
    with (cli.folder / "big.jsonl").open() as lines:
        assert sum(len(line) > 9_000_000 for line in lines) == 9
    client.ok("Obliterate", queue=queue)


def test_long_work_shows_a_bar_with_rate_and_ends_in_one_line(cli: Cli, client: Client, queue: str) -> None:
    number = scaled(30_000, 300_000)
    (cli.folder / "jobs.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(number)))
    with cli.on_terminal("push", queue, "--file", "jobs.jsonl", columns=100) as terminal:
        assert terminal.end() == 0
        drawn = terminal.text
        assert re.search(r"push test_watching.*… ━.*\d[\d,]* jobs +[\d.,]+( k)?/s +(\d\d:)?\d\d:\d\d", drawn)
        assert drawn.rstrip().splitlines()[-1].strip().startswith(f"added {number:,} jobs to {queue} in ")
    with cli.on_terminal("queues", "clean", queue, "--state", "waiting", "--yes", columns=100) as terminal:
        assert terminal.end() == 0
        assert "clean" in terminal.text
        assert f"removed {number:,} jobs of {queue}" in terminal.text


# -- bench -------------------------------------------------------------------------------------------------------------


def test_bench_measures_and_leaves_nothing_behind(cli: Cli, client: Client) -> None:
    results = cli.ok("bench", "--jobs", "100", "--json").lines
    assert [result["what"] for result in results] == [
        "push, one at a time",
        "push, 100 at once",
        "push many",
        "push, pull, complete",
    ]
    for result in results:
        assert result["perSec"] > 0
        assert 0 < result["p50Ms"] <= result["p95Ms"] <= result["p99Ms"]
    assert not [queue for queue in client.ok("ListQueues")["queues"] if "bench" in queue["name"]]
    table = cli.ok("bench", "--jobs", "20", "--url", "memory://").out
    assert table.splitlines()[0].split() == ["WHAT", "JOBS", "JOBS/S", "P50", "P95", "P99"]
    assert cli("bench", "--jobs", "0").code == 2
