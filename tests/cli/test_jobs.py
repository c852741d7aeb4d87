"""`headrace pull`, `job` and `jobs`: taking jobs by hand, looking at them, steering them."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from tests.cli.terminal import Cli
from tests.wireclient import Client


def push(client: Client, queue: str, **options: Any) -> str:
    return str(client.ok("PUSH", queue=queue, **{"data": {"n": 1}, **options})["id"])


def state(client: Client, job_id: str) -> str:
    return str(client.ok("GetState", id=job_id)["state"])


def bury(client: Client, queue: str, error: str, **options: Any) -> str:
    """A dead letter."""
    job_id = push(client, queue, **options)
    token = client.ok("PULL", queue=queue, owner="w")["token"]
    client.ok("FAIL", id=job_id, token=token, error=error, stack=["at step 2"], unrecoverable=True)
    return job_id


def complete(client: Client, queue: str, **options: Any) -> str:
    result = options.pop("result", None)
    job_id = push(client, queue, **options)
    client.ok("ACK", id=job_id, token=client.ok("PULL", queue=queue, owner="w")["token"], result=result)
    return job_id


# -- pull --------------------------------------------------------------------------------------------------------------


def test_a_pulled_job_stays_leased_until_its_token_settles_it(cli: Cli, client: Client, queue: str) -> None:
    first, second = push(client, queue, name="send"), push(client, queue)
    pulled = cli.ok("pull", queue, "--count", "5", "--json").lines
    assert [line["job"]["id"] for line in pulled] == [first, second]
    # The command has ended and its connection is closed: the lease holds all the same.
    assert state(client, first) == "active"
    cli.ok("job", first, "ack", "--token", pulled[0]["token"], "--result", '{"sent": true}')
    assert cli.ok("job", first, "result").document == {"sent": True}
    cli.ok("job", second, "fail", "--token", pulled[1]["token"], "--error", "no such address")
    assert client.ok("GetJob", id=second)["job"]["attempts"] == 1
    assert cli("job", first, "ack", "--token", pulled[0]["token"]).code == 1


def test_the_card_of_a_pulled_job_says_how_to_complete_it(cli: Cli, client: Client, queue: str) -> None:
    job_id = push(client, queue, name="send", data={"to": "ada"})
    card = cli.ok("pull", queue, "--lease", "1m").out
    assert card.startswith(f"id       {job_id}\nname     send\nattempt  1 of 3\ntoken    ")
    assert '"to": "ada"' in card
    assert f"headrace job {job_id} ack --token " in card


def test_ack_completes_what_was_printed(cli: Cli, client: Client, queue: str) -> None:
    job_id = push(client, queue)
    printed = cli.ok("pull", queue, "--ack", "--result", "42", "--json").document
    assert printed["job"]["id"] == job_id
    assert "token" not in printed
    assert client.ok("GetResult", id=job_id)["result"] == 42


def test_an_empty_queue_ends_with_3_after_the_wait(cli: Cli, queue: str) -> None:
    empty = cli("pull", queue)
    assert (empty.code, empty.out) == (3, "")
    assert f"no job of {queue} is ready" in empty.err
    assert cli("pull", queue, "--json").err == ""
    began = time.monotonic()
    assert cli("pull", queue, "--wait", "700ms").code == 3
    assert time.monotonic() - began >= 0.7


def test_a_count_that_takes_nothing_is_refused(cli: Cli, queue: str) -> None:
    assert cli("pull", queue, "--count", "0").code == 2


def test_a_result_without_ack_is_refused_before_a_job_is_leased(cli: Cli, client: Client, queue: str) -> None:
    job_id = push(client, queue)
    refused = cli("pull", queue, "--result", "42")
    assert refused.code == 2
    assert "add --ack" in refused.err
    assert state(client, job_id) == "waiting"


@pytest.mark.parametrize("words", [("ack",), ("ack", "--token", "t"), ("fail", "--error", "e")])
def test_a_job_that_nobody_took_cannot_be_settled(cli: Cli, client: Client, queue: str, words: tuple[str, ...]) -> None:
    job_id = push(client, queue)
    refused = cli("job", job_id, *words)
    assert refused.code == 1
    assert f"job {job_id} is waiting, so it cannot be settled" in refused.err
    assert f"headrace pull {queue}" in refused.err


def test_a_job_without_log_lines_says_so_beside_stdout(cli: Cli, client: Client, queue: str) -> None:
    told = cli.ok("job", push(client, queue), "logs")
    assert (told.out, "has no log lines" in told.err) == ("", True)


def test_a_letter_without_an_error_is_called_the_same_in_both_lists(cli: Cli, client: Client, queue: str) -> None:
    cli.ok("job", push(client, queue), "discard")
    for flags in ((), ("--each",)):
        assert "(no error text)" in cli.ok("dlq", queue, *flags).out


def test_wait_takes_a_job_that_comes_later(cli: Cli, client: Client, queue: str) -> None:
    waiting = cli.start("pull", queue, "--wait", "20s", "--ack", "--json")
    job_id = push(client, queue, delay=300)
    out, err = waiting.communicate(timeout=20)
    assert waiting.returncode == 0, err
    assert job_id in out


def test_on_a_file_of_its_own_a_lease_makes_no_sense(offline: Cli) -> None:
    url = ("--url", "sqlite:///own.db")
    offline.ok("push", "mail", "n", "7", *url)
    refused = offline("pull", "mail", *url)
    assert refused.code == 2
    assert "--ack" in refused.err
    assert offline.ok("pull", "mail", "--ack", "--json", *url).document["job"]["data"] == 7


# -- job ---------------------------------------------------------------------------------------------------------------


def test_the_card_of_a_dead_letter_tells_its_story(cli: Cli, client: Client, queue: str) -> None:
    job_id = bury(client, queue, "the bank\nis closed", name="charge", data={"amount": 12}, tags=["a", "b"], priority=4)
    client.ok("AddLog", id=job_id, message="asking the bank", level="warn")
    card = cli.ok("job", job_id).out
    for line in ("state     failed", "name      charge", f"queue     {queue}", "priority  4", "tags      a, b"):
        assert line in card
    assert '"amount": 12' in card
    assert "  the bank\n  is closed\n  at step 2\n" in card
    assert "warn   asking the bank" in card
    timeline = [line.split()[1] for line in card.split("timeline\n")[1].splitlines()[1:4]]
    assert timeline == ["waiting", "active", "failed"]
    assert cli.ok("job", job_id, "--json").document["failedReason"] == "the bank\nis closed"


def test_the_timeline_counts_every_attempt_from_the_first(cli: Cli, client: Client, queue: str) -> None:
    job_id = push(client, queue, maxAttempts=2, backoff=1)
    for _ in range(2):
        token = client.ok("PULL", queue=queue, owner="w", timeout=5000)["token"]
        client.ok("FAIL", id=job_id, token=token, error="no")
    client.ok("RetryDlq", queue=queue, jobId=job_id)
    client.ok("ACK", id=job_id, token=client.ok("PULL", queue=queue, owner="w", timeout=5000)["token"])
    header, *rows = cli.ok("job", job_id).out.split("timeline\n")[1].splitlines()
    at = header.index("ATTEMPT")
    assert [(row.split()[1], row[at : at + len("ATTEMPT")].strip()) for row in rows] == [
        ("waiting", ""), ("active", "1"), ("failed", "1"),
        ("waiting", "2"), ("active", "2"), ("failed", "2"),
        ("waiting", ""), ("active", "1"), ("completed", "1"),
    ]  # fmt: skip


def test_a_job_may_be_named_by_an_id_of_ones_own(cli: Cli, client: Client, queue: str) -> None:
    push(client, queue, jobId="order-77", delay=60_000)
    assert cli.ok("job", "order-77", "state").out == "delayed\n"
    assert "runs" in cli.ok("job", "order-77").out


def test_text_from_outside_cannot_command_the_terminal(cli: Cli, client: Client, queue: str) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07 and \x9b31m"
    push(client, queue, jobId=f"{queue}{evil}")
    printed = cli.ok("pull", queue, "--lease", "1m").out
    assert not {"\x1b", "\x07", "\x9b"} & set(printed)
    job_id = bury(client, queue, evil, name=f"n{evil}", data={"k": evil, "x": "\u2028"})
    for words in (("job", job_id), ("jobs", queue), ("dlq", queue), ("dlq", queue, "--each")):
        printed = cli.ok(*words)
        assert not {"\x1b", "\x07", "\x9b"} & set(printed.out + printed.err), words
    assert cli.ok("job", job_id, "--json").document["data"] == {"k": evil, "x": "\u2028"}
    with cli.on_terminal("job", job_id, NO_COLOR="1") as terminal:
        assert terminal.end() == 0
        assert "]0;owned\x07" not in terminal.raw
        assert "\x1b[2J" not in terminal.raw


def test_wait_and_result_follow_the_end_of_a_job(cli: Cli, client: Client, queue: str) -> None:
    done, failed, open_job = complete(client, queue, result=[1]), bury(client, queue, "broken"), push(client, queue)
    assert cli.ok("job", done, "wait").document == [1]
    assert cli.ok("job", done, "result", "--json").document == [1]
    for action in ("wait", "result"):
        refused = cli("job", failed, action)
        assert (refused.code, refused.out) == (1, "")
        assert "broken" in refused.err
    assert cli("job", open_job, "wait", "--timeout", "100ms").code == 1
    assert f"headrace job {open_job} wait" in cli("job", open_job, "result").err


def test_each_action_moves_the_job(cli: Cli, client: Client, queue: str) -> None:
    delayed = push(client, queue, delay=60_000)
    assert cli.ok("job", delayed, "promote", "--json").document == {"id": delayed, "state": "waiting"}
    assert cli.ok("job", delayed, "discard").out == f"discarded {delayed}\n"
    assert state(client, delayed) == "failed"
    cli.ok("job", delayed, "retry")
    assert state(client, delayed) == "waiting"
    cli.ok("job", delayed, "cancel")
    assert state(client, delayed) == "unknown"


def test_completed_jobs_run_again_and_dead_letters_go(cli: Cli, client: Client, queue: str) -> None:
    done = complete(client, queue)
    cli.ok("job", done, "retry")
    assert state(client, done) == "waiting"
    cli.ok("job", done, "remove")
    dead = bury(client, queue, "x")
    cli.ok("job", dead, "remove")
    assert [state(client, job_id) for job_id in (done, dead)] == ["unknown", "unknown"]


@pytest.mark.parametrize(
    ("action", "hint"),
    [
        ("promote", "only delayed"),
        ("retry", "only jobs that have ended"),
        ("cancel", "--force"),
        ("remove", "worker"),
    ],
)
def test_what_the_state_does_not_allow_is_refused_with_1(
    cli: Cli, client: Client, queue: str, action: str, hint: str
) -> None:
    job_id = push(client, queue)
    client.ok("PULL", queue=queue, owner="w")
    refused = cli("job", job_id, action)
    assert refused.code == 1
    assert f"job {job_id} is active, so it cannot be" in refused.err
    assert hint in refused.err


def test_force_cancels_a_job_that_runs(cli: Cli, client: Client, queue: str) -> None:
    job_id = push(client, queue)
    token = client.ok("PULL", queue=queue, owner="w")["token"]
    assert cli("job", job_id, "cancel").code == 1
    assert cli.ok("job", job_id, "cancel", "--force", "--json").document == {"id": job_id, "state": "unknown"}
    assert not client.call("JobHeartbeat", id=job_id, token=token)["ok"]


@pytest.mark.parametrize("flags", [(), ("--force",)], ids=str)
def test_a_job_that_has_ended_cannot_be_cancelled(cli: Cli, client: Client, queue: str, flags: tuple[str, ...]) -> None:
    done = complete(client, queue)
    refused = cli("job", done, "cancel", *flags)
    assert refused.code == 1
    assert f"job {done} is completed, so it cannot be cancelled" in refused.err
    assert "--force" not in refused.err


def test_a_job_that_is_not_there_ends_with_3(cli: Cli) -> None:
    missing = cli("job", "nobody")
    assert missing.code == 3
    assert "there is no job nobody" in missing.err


def test_the_tree_shows_a_family_with_its_states(cli: Cli, client: Client, queue: str) -> None:
    # A flow names its ids itself.
    ids = [f"{queue}-{n}" for n in range(4)]
    parent, left, right, leaf = ids

    def member(job_id: str, name: str, children: list[str], above: str | None) -> dict[str, Any]:
        links = {"childrenIds": children, "dependsOn": children, **({"parentId": above} if above else {})}
        return {"id": job_id, "queue": queue, "input": {"name": name, "data": 1, **links}}

    client.ok(
        "PUSHF",
        jobs=[
            member(parent, "report", [left, right], None),
            member(left, "page", [leaf], parent),
            member(right, "cover", [], parent),
            member(leaf, "picture", [], left),
        ],
    )
    drawn = cli.ok("job", parent, "tree").out.splitlines()
    assert [line.split("  ")[0] if not line.startswith("│") else line[:13].rstrip() for line in drawn] == [
        "report",
        "├─ page",
        "│  └─ picture",
        "└─ cover",
    ]
    assert [line["state"] for line in cli.ok("job", parent, "tree", "--json").lines] == [
        "waiting-children",
        "waiting-children",
        "waiting",
        "waiting",
    ]


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_the_table_shows_what_a_person_recognises(cli: Cli, client: Client, queue: str) -> None:
    waiting = push(client, queue, name="send", data={"to": "ada@example.com", "copies": 2})
    failed = bury(client, f"{queue}-2", "no such address\nsecond line", name="send")
    header, row = cli.ok("jobs", queue).out.splitlines()
    assert header.split() == ["STATE", "AGE", "TRY", "NAME", "ABOUT", "ID"]
    assert row.startswith("waiting")
    assert "1/3  send  to: ada@example.com, copies: 2" in row
    assert row.endswith(waiting)
    row = cli.ok("jobs", f"{queue}-2").out.splitlines()[1]
    assert row.startswith("failed")
    assert "no such address" in row
    assert "second line" not in row
    assert row.endswith(failed)


def test_states_limit_and_order_choose_the_jobs(cli: Cli, client: Client, queue: str) -> None:
    ids = [push(client, queue, delay=60_000 if n % 2 else 0) for n in range(6)]

    def shown(*flags: str) -> list[str]:
        return [job["id"] for job in cli.ok("jobs", queue, "--json", *flags).lines]

    assert shown() == ids
    assert shown("--state", "delayed") == ids[1::2]
    assert shown("--newest", "--limit", "2") == [ids[5], ids[4]]
    assert shown("--offset", "4") == ids[4:]
    assert shown("--state", "delayed", "--state", "waiting", "--limit", "3") == ids[:3]
    assert cli.ok("jobs", queue, "--state", "failed").err == f"{queue} has no failed jobs\n"


def test_a_text_finds_the_jobs_that_have_it(cli: Cli, client: Client, queue: str) -> None:
    number = 1300
    client.ok("PUSHB", queue=queue, jobs=[{"data": {"to": f"user{n}@example.com"}} for n in range(number)])
    found = cli.ok("jobs", queue, "--search", "user77@", "--json").lines
    assert [job["data"] for job in found] == [{"to": "user77@example.com"}]
    assert len(cli.ok("jobs", queue, "--search", "example.com", "--limit", "1200", "--json").lines) == 1200
    assert cli.ok("jobs", queue, "--search", "nowhere").err == f"{queue} has no such jobs with 'nowhere' in them\n"


def test_on_a_narrow_terminal_a_row_stays_one_line_with_its_whole_id(cli: Cli, client: Client, queue: str) -> None:
    job_id = push(client, queue, name="a-rather-long-name", data={"text": "and much data " * 20})
    with cli.on_terminal("jobs", queue, columns=80) as terminal:
        assert terminal.end() == 0
        lines = [line.rstrip() for line in terminal.text.splitlines() if line.strip()]
    assert len(lines) == 2
    assert len(lines[1]) <= 80
    assert lines[1].endswith(job_id)
    assert "…" in lines[1]
    assert "\x1b[33mwaiting" in terminal.raw


@pytest.mark.parametrize(
    ("packed", "shown"),
    [
        (b"\x81\x80\x01", "{}"),  # a map as a key
        (b"\x81\xd6\xff\0\0\0\0\x01", "1970"),  # a date as a key
        (b"\xa2o\xff", "o"),  # a text that is no UTF-8
        (b"\xd7\xff" + b"\xff" * 8, ""),  # a date that is none
    ],
)
def test_data_that_python_cannot_hold_is_shown_all_the_same(
    cli: Cli, client: Client, queue: str, packed: bytes, shown: str
) -> None:
    command = {"cmd": "PUSH", "queue": queue, "data": {"odd": msgspec.Raw(packed)}}
    client.send_frame(msgspec.msgpack.encode(command))
    job_id = client.recv()["id"]
    (row,) = [line for line in cli.ok("jobs", queue).out.splitlines() if job_id in line]
    assert "odd: " in row
    assert shown in row
    assert '"odd": ' in cli.ok("job", job_id).out
    assert '"odd": ' in cli.ok("pull", queue).out


def test_a_reader_that_leaves_early_is_no_fault(cli: Cli, client: Client, queue: str) -> None:
    client.ok("PUSHB", queue=queue, jobs=[{"data": "x" * 500} for _ in range(1000)])
    process = cli.start("jobs", queue, "--limit", "1000", "--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(20) == 1


def test_jobs_and_dead_letters_are_listed_whatever_they_carry(cli: Cli, client: Client, queue: str) -> None:
    image = {"of": "Ada", "image": "x" * 5_000_000}
    for _ in range(14):
        bury(client, queue, "too large", name="shrink", data=image)
    assert "Reply exceeds 64 MB" in cli("jobs", queue, "--json").err
    assert cli.ok("jobs", queue).out.count("too large") == 14
    assert cli.ok("dlq", queue, "--each").out.count("too large") == 14
    assert cli.ok("dlq", queue, "retry", "--error", "too large").out == f"retried 14 dead letters of {queue}\n"
    assert cli.ok("jobs", queue, "--search", "Ada").out.count("shrink") == 14
