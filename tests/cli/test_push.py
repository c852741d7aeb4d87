"""`headrace push`: one job with all its options, and files of them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.jobflags import JOB_FLAGS
from headrace.client.options import Options
from tests.cli.terminal import Cli
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.wireclient import Client


def job(client: Client, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = client.ok("GetJob", id=job_id)["job"]
    return found


def counts(client: Client, queue: str) -> dict[str, int]:
    found: dict[str, int] = client.ok("GetJobCounts", queue=queue)["counts"]
    return found


# -- one job -----------------------------------------------------------------------------------------------------------


def test_a_push_prints_the_id_alone_so_that_scripts_can_use_it(cli: Cli, client: Client, queue: str) -> None:
    printed = cli.ok("push", queue, "welcome", '{"to": "ada"}').out
    found = job(client, printed.strip())
    assert printed == f"{found['id']}\n"
    assert (found["name"], found["data"], found["queue"]) == ("welcome", {"to": "ada"}, queue)


def test_data_comes_from_a_file_or_stdin_and_the_name_may_be_left_out(cli: Cli, client: Client, queue: str) -> None:
    (cli.folder / "data.json").write_text('{"from": "file"}')
    from_file = cli.ok("push", queue, "@data.json").out.strip()
    from_stdin = cli.ok("push", queue, "-", stdin='["from", "stdin"]').out.strip()
    assert job(client, from_file)["data"] == {"from": "file"}
    assert job(client, from_stdin)["data"] == ["from", "stdin"]
    assert job(client, from_stdin)["name"] == "default"


def test_every_option_of_a_job_has_a_flag() -> None:
    assert set(JOB_FLAGS) == set(Options.__annotations__)


def test_options_reach_the_job(cli: Cli, client: Client, queue: str) -> None:
    flags = "--priority 7 --delay 1h30m --attempts 9 --backoff exponential:2s:1m --timeout 20s --ttl 2d --group g"
    flags += " --tag a --tag b --durable --lifo --keep-logs 4 --stall-timeout 9s --dedup key --job-id order-7"
    flags += " --remove-on-complete --remove-on-fail --dedup-mode throttle --dedup-ttl 3m"
    before = time.time() * 1000
    found = job(client, cli.ok("push", queue, "n", "1", *flags.split(), "--json").document["id"])
    wanted = {"id": "order-7", "customId": "order-7", "priority": 7, "maxAttempts": 9, "timeout": 20_000}
    wanted |= {"ttl": 2 * 86_400_000, "groupId": "g", "tags": ["a", "b"], "durable": True, "lifo": True, "keepLogs": 4}
    wanted |= {"stallTimeout": 9000, "uniqueKey": "key", "deduplicationTtl": 180_000, "state": "delayed"}
    wanted |= {"removeOnComplete": True, "removeOnFail": True}
    wanted |= {"backoffConfig": {"type": "exponential", "delay": 2000, "maxDelay": 60_000}}
    assert {name: found[name] for name in wanted} == wanted
    assert 5_400_000 <= found["runAt"] - before < 5_460_000


def test_a_moment_is_taken_in_the_zone_it_names(cli: Cli, client: Client, queue: str) -> None:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 7200))
    utc = job(client, cli.ok("push", queue, "n", "1", "--at", f"{moment}Z").out.strip())
    local = job(client, cli.ok("push", queue, "n", "1", "--at", moment, env={"TZ": "Etc/GMT-1"}).out.strip())
    assert utc["runAt"] - utc["createdAt"] == pytest.approx(7_200_000, abs=10_000)
    assert local["runAt"] - local["createdAt"] == pytest.approx(3_600_000, abs=10_000)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("n", "{oops"), "DATA is not JSON"),
        (("n", "@missing.json"), "cannot read missing.json: No such file"),
        (("n", "1", "--delay", "soon"), "delay 'soon' is not understood"),
        (("n", "1", "--backoff", "sometimes:1s"), "--backoff 'sometimes:1s' is not understood"),
        (("n", "1", "--at", "0001-01-01"), "--at '0001-01-01' is not a time"),
        (("n", "1", "--at", "tomorrow"), "--at 'tomorrow' is not a time"),
        (("n", "1", "--priority", "9999999"), "priority must be at most 1000000"),
        (("n", "1", "--at", "2999-01-01T00:00"), "--at '2999-01-01T00:00' is more than a year away"),
        (("n", "1", "--at", "2027-03-01", "--delay", "1s"), "--delay and --at both say when"),
        (("n", "1", "--dedup", "k", "--dedup-mode", "debounce"), "needs a ttl"),
        (("n", "1", "--dedup-mode", "simple"), "name it with --dedup"),
        (("n", "1", "--dedup-ttl", "1m"), "name it with --dedup"),
        (("n", "1", "--once"), "give one with --job-id"),
        (("n", "1", "--skip", "3"), "--skip is about a file of jobs"),
        (("n", "1", "--id-column", "order"), "--id-column is about a file of jobs"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_2(cli: Cli, queue: str, words: tuple[str, ...], said: str) -> None:
    done = cli("push", queue, *words)
    assert done.code == 2
    assert said in done.err
    assert done.out == ""


def finish_next(server: ServerProcess, queue: str, **outcome: Any) -> threading.Thread:
    """A worker for one job."""

    def work() -> None:
        with server.client(timeout=30) as worker:
            pulled = worker.ok("PULL", queue=queue, timeout=20_000, owner="w")
            command = "FAIL" if "error" in outcome else "ACK"
            worker.ok(command, id=pulled["job"]["id"], token=pulled["token"], **outcome)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_wait_prints_the_result(cli: Cli, server: ServerProcess, queue: str) -> None:
    worker = finish_next(server, queue, result={"sum": 3})
    assert cli.ok("push", queue, "add", "[1, 2]", "--wait").document == {"sum": 3}
    worker.join()


def test_wait_ends_with_1_when_the_job_fails_or_takes_too_long(cli: Cli, server: ServerProcess, queue: str) -> None:
    worker = finish_next(server, queue, error="no bank answers", unrecoverable=True)
    failed = cli("push", queue, "charge", "1", "--wait")
    worker.join()
    assert (failed.code, failed.out) == (1, "")
    assert "no bank answers" in failed.err
    late = cli("push", queue, "charge", "1", "--wait", "--wait-timeout", "200ms")
    assert late.code == 1
    assert "did not end within 200ms; it goes on" in late.err


def test_a_file_of_its_own_takes_jobs_but_cannot_be_waited_for(offline: Cli) -> None:
    url = ("--url", "sqlite:///own.db")
    job_id = offline.ok("push", "mail", "welcome", '{"a": 1}', *url).out.strip()
    assert offline.ok("job", job_id, "state", *url).out == "waiting\n"
    refused = offline("push", "mail", "welcome", "1", "--wait", *url)
    assert refused.code == 2
    assert "headrace serve" in refused.err


# -- files -------------------------------------------------------------------------------------------------------------


def write_lines(path: Path, records: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path.name


def test_json_lines_become_jobs_in_their_order(cli: Cli, client: Client, queue: str) -> None:
    number = scaled(2500, 100_000)
    records = [{"n": n, "kind": f"k{n % 3}", "p": n % 5} for n in range(number)]
    name = write_lines(cli.folder / "jobs.jsonl", records)
    done = cli.ok("push", queue, "--file", name, "--name-column", "kind", "--attempts", "2")
    assert done.out.startswith(f"added {number:,} jobs to {queue} in ")
    found = client.ok("GetJobs", queue=queue, limit=5, offset=number - 5)["jobs"]
    assert [job["data"] for job in found] == records[-5:]
    assert [job["name"] for job in found] == [record["kind"] for record in records[-5:]]
    assert {job["maxAttempts"] for job in found} == {2}
    assert counts(client, queue)["waiting"] == number


def test_csv_rows_become_jobs_with_all_columns(cli: Cli, client: Client, queue: str) -> None:
    text = '\ufeffid,to,note,wait\na-1,ada@example.com,"two\nlines, one comma",30s\na-2,grace@example.com,,0\n'
    (cli.folder / "mail.csv").write_text(text, encoding="utf-8")
    columns = ("--id-column", "id", "--delay-column", "wait", "--priority", "3")
    summary = cli.ok("push", queue, "send", "--file", "mail.csv", *columns, "--json").document
    assert {name: summary[name] for name in ("read", "added", "known")} == {"read": 2, "added": 2, "known": 0}
    first, second = job(client, "a-1"), job(client, "a-2")
    assert first["data"] == {"id": "a-1", "to": "ada@example.com", "note": "two\nlines, one comma", "wait": "30s"}
    assert (first["state"], second["state"], first["priority"]) == ("delayed", "waiting", 3)


def test_a_file_with_ids_may_be_pushed_again_and_tells_what_was_new(cli: Cli, client: Client, queue: str) -> None:
    records = [{"order": f"{queue}-{n}", "payload": n} for n in range(1500)]
    half = write_lines(cli.folder / "half.jsonl", records[:700])
    whole = write_lines(cli.folder / "whole.jsonl", records)
    columns = ("--id-column", "order", "--data-column", "payload")
    cli.ok("push", queue, "--file", half, *columns)
    again = cli.ok("push", queue, "--file", whole, *columns)
    assert again.out.startswith(f"added 800 jobs to {queue} in ")
    assert again.out.endswith("; 700 were there already\n")
    assert counts(client, queue)["waiting"] == 1500
    assert job(client, f"{queue}-3")["data"] == 3


def test_a_file_may_come_through_a_pipe(cli: Cli, client: Client, queue: str) -> None:
    assert cli.ok("push", queue, "--file", "-", stdin='\ufeff1\n\n{"two": 2}\n').out.startswith("added 2 jobs")
    assert cli.ok("push", queue, "--file", "-", "--format", "csv", stdin="a,b\n1,2\n").out.startswith("added 1 job ")
    found = client.ok("GetJobs", queue=queue)["jobs"]
    assert [job["data"] for job in found] == [1, {"two": 2}, {"a": "1", "b": "2"}]


@pytest.mark.parametrize(
    ("line", "flags", "said"),
    [
        ("{oops", (), "not JSON"),
        ('{"id": ""}', ("--id-column", "id"), "its id is empty"),
        ('{"x": 1}', ("--id-column", "id"), "it has no column 'id'; there are: x"),
        ("[1]", ("--id-column", "id"), "it is not an object"),
        ('{"id": "x", "p": 2000000}', ("--priority-column", "p"), "priority must be at most 1000000"),
        ('{"id": "x", "n": 123456789012345678901}', (), "job data holds an integer that is too large"),
    ],
)
def test_a_bad_line_is_named_and_the_way_on_is_told(
    cli: Cli, client: Client, queue: str, line: str, flags: tuple[str, ...], said: str
) -> None:
    good = [json.dumps({"id": f"{queue}{n}", "p": 1}) for n in range(1200)]
    (cli.folder / "jobs.jsonl").write_text("\n".join([*good[:1100], line, *good[1100:]]))
    done = cli("push", queue, "--file", "jobs.jsonl", *flags)
    assert done.code == 2
    assert f"line 1101: {said}" in done.err
    assert counts(client, queue)["waiting"] == 1000
    if "--id-column" in flags:
        assert "push the same file again" in done.err
    else:
        assert "--skip 1000" in done.err


def test_skip_goes_on_behind_what_was_added(cli: Cli, client: Client, queue: str) -> None:
    name = write_lines(cli.folder / "jobs.jsonl", list(range(10)))
    cli.ok("push", queue, "--file", name, "--skip", "7")
    assert [job["data"] for job in client.ok("GetJobs", queue=queue)["jobs"]] == [7, 8, 9]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--file", "jobs.txt"), "JSON lines or CSV?"),
        (("--file", "gone.jsonl"), "cannot read gone.jsonl: No such file"),
        (("n", "1", "--file", "jobs.jsonl"), "takes neither DATA nor --wait"),
        (("--file", "jobs.jsonl", "--job-id", "x"), "--id-column"),
    ],
)
def test_a_file_that_cannot_be_pushed_is_refused(cli: Cli, queue: str, words: tuple[str, ...], said: str) -> None:
    done = cli("push", queue, *words)
    assert done.code == 2
    assert said in done.err


def test_an_upload_with_ids_goes_on_when_the_server_comes_back(offline: Cli, tmp_path: Path) -> None:
    number = scaled(20_000, 200_000)
    name = write_lines(tmp_path / "jobs.jsonl", [{"id": f"o{n}"} for n in range(number)])
    server = ServerProcess(tmp_path / "headrace.db").start()
    try:
        url = f"headrace://127.0.0.1:{server.port}?command_timeout=20s"
        upload = offline.start("push", "orders", "--file", name, "--id-column", "id", "--url", url)
        with server.client() as watcher:
            deadline = time.monotonic() + 20
            while not counts(watcher, "orders")["waiting"]:
                assert time.monotonic() < deadline
        server.kill()
        assert upload.poll() is None
        server.start()
        out, err = upload.communicate(timeout=60)
        assert upload.returncode == 0, err
        assert out.startswith("added ")
        with server.client() as client:
            assert counts(client, "orders")["waiting"] == number
    finally:
        server.kill()


def test_an_interrupted_upload_says_how_to_go_on(cli: Cli, client: Client, queue: str) -> None:
    os.mkfifo(cli.folder / "pipe")
    upload = cli.start("push", queue, "--file", "pipe", "--format", "jsonl")
    with (cli.folder / "pipe").open("w") as pipe:
        for n in range(2001):
            pipe.write(f"{n}\n")
        pipe.flush()
        deadline = time.monotonic() + 20
        while counts(client, queue)["waiting"] < 2000:
            assert time.monotonic() < deadline
        upload.send_signal(signal.SIGINT)
        _, err = upload.communicate(timeout=20)
    assert upload.returncode == 130
    # The answer to the second batch may have been on its way.
    told = re.search(r"interrupted: ([12]),000 jobs of pipe were added; go on behind them with --skip ([12])000; ", err)
    assert told is not None, err
    assert told[1] == told[2]
