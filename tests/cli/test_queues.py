"""`headrace queues`, `dlq` and `cron`: watching and steering whole queues."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.cli.terminal import Cli
from tests.cli.test_jobs import bury, complete, push, state
from tests.scale import scaled
from tests.wireclient import Client


def fill(client: Client, queue: str, number: int, **options: Any) -> None:
    for start in range(0, number, 10_000):
        jobs = [{"data": 1, **options}] * min(10_000, number - start)
        client.ok("PUSHB", queue=queue, jobs=jobs)


def row(cli: Cli, queue: str) -> dict[str, Any]:
    (found,) = [line for line in cli.ok("queues", "--json").lines if line["name"] == queue]
    return dict(found)


# -- queues ------------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_queue_with_its_depths(cli: Cli, client: Client, queue: str) -> None:
    fill(client, queue, 1234)
    push(client, queue, delay=60_000)
    header, *rows = cli.ok("queues").out.splitlines()
    assert header.split()[:7] == ["QUEUE", "WAITING", "ACTIVE", "DELAYED", "FAILED", "DONE", "OLDEST"]
    (line,) = [line.split() for line in rows if line.startswith(queue)]
    assert line[:6] == [queue, "1,234", "0", "1", "0", "0"]
    assert {name: row(cli, queue)[name] for name in ("waiting", "delayed", "paused", "waitingChildren")} == {
        "waiting": 1234,
        "delayed": 1,
        "paused": False,
        "waitingChildren": 0,
    }


def test_more_queues_than_a_page_are_all_listed(cli: Cli, client: Client, queue: str) -> None:
    number = scaled(520, 1600)
    for n in range(number):
        client.send("PUSH", queue=f"{queue}-{n}", data=1, reqId=n)
    for _ in range(number):
        assert client.recv()["ok"]
    shown = [line["name"] for line in cli.ok("queues", "--json").lines if line["name"].startswith(f"{queue}-")]
    assert len(shown) == len(set(shown)) == number
    for n in range(number):
        client.send("Obliterate", queue=f"{queue}-{n}", reqId=n)
    for _ in range(number):
        assert client.recv()["ok"]


def test_pause_resume_and_limits_are_set_and_shown(cli: Cli, client: Client, queue: str) -> None:
    push(client, queue)
    assert cli.ok("queues", "pause", queue).out == f"paused {queue}\n"
    assert client.ok("IsPaused", queue=queue)["paused"]
    assert "‖ paused" in cli.ok("queues").out
    cli.ok("queues", "limit", queue, "--rate", "30/m", "--concurrency", "5")
    card = cli.ok("queues", "show", queue).out
    assert "rate limit    30 per 1 min" in card
    assert "at once       5" in card
    assert "paused        yes" in card
    lifted = cli.ok("queues", "limit", queue, "--rate", "off", "--concurrency", "off", "--json").document
    assert (lifted["limits"]["rateLimit"], lifted["limits"]["concurrencyLimit"]) == (None, None)
    assert cli.ok("queues", "resume", queue, "--json").document == {"queue": queue, "paused": False}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "limit what?"),
        (("--rate", "0/s"), "--rate 0/s would let no job through"),
        (("--concurrency", "0"), "to lift the limit: --concurrency off"),
        (("--rate", "fast"), "--rate 'fast' is not understood"),
        (("--rate", "5/fortnight"), "is not understood"),
        (("--concurrency", "many"), "not a whole number"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(cli: Cli, queue: str, flags: tuple[str, ...], said: str) -> None:
    done = cli("queues", "limit", queue, *flags)
    assert done.code == 2
    assert said in done.err


def test_a_queue_that_is_not_there_ends_with_3(cli: Cli) -> None:
    assert cli("queues", "show", "nowhere").code == 3


@pytest.mark.parametrize(
    "action", ["pause", "resume", "drain --yes", "clean --yes", "obliterate --yes", "limit --rate 1/s"]
)
def test_a_name_that_no_queue_has_is_pointed_out(cli: Cli, client: Client, queue: str, action: str) -> None:
    push(client, queue)
    mistyped = f"{queue}x"
    done = cli.ok("queues", *action.split(), mistyped, "--json")
    assert done.err == f"there is no queue {mistyped} yet; did you mean {queue}?\n"
    assert cli.ok("queues", *action.split(), queue).err == ""
    client.ok("Obliterate", queue=mistyped)


def test_what_cannot_be_undone_wants_a_yes(cli: Cli, client: Client, queue: str) -> None:
    fill(client, queue, 3)
    for action in ("drain", "clean", "obliterate"):
        refused = cli("queues", action, queue)
        assert refused.code == 2
        assert "3 jobs" in refused.err
        assert "add --yes" in refused.err
    assert row(cli, queue)["waiting"] == 3
    assert cli.ok("queues", "drain", queue, "--yes").out == f"removed 3 jobs of {queue}\n"
    assert row(cli, queue)["waiting"] == 0


def test_on_a_terminal_it_asks_and_takes_no_for_an_answer(cli: Cli, client: Client, queue: str) -> None:
    fill(client, queue, 2)
    with cli.on_terminal("queues", "obliterate", queue) as terminal:
        terminal.wait_for("[y/N]")
        assert f"Remove {queue} with all its 2 jobs, limits and settings?" in terminal.text.replace("\n", "")
        terminal.type("n\n")
        assert terminal.end() == 1
        assert "nothing was done" in terminal.text
    with cli.on_terminal("queues", "drain", queue) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("\x04")  # Ctrl-D
        assert terminal.end() == 1
        assert "Traceback" not in terminal.text
    assert row(cli, queue)["waiting"] == 2
    with cli.on_terminal("queues", "obliterate", queue) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("y\n")
        assert terminal.end() == 0
    assert queue not in [line["name"] for line in cli.ok("queues", "--json").lines]


def test_clean_removes_by_state_and_age_in_several_steps(cli: Cli, client: Client, queue: str) -> None:
    number = scaled(12_000, 120_000)
    fill(client, queue, number)
    push(client, queue, delay=60_000)
    assert cli.ok("queues", "clean", queue, "--older-than", "1h", "--yes", "--json").document["removed"] == 0
    unclear = cli("queues", "clean", queue, "--state", "failed", "--older-than", "long", "--yes")
    assert (unclear.code, "--older-than 'long'" in unclear.err) == (2, True)
    assert cli("queues", "clean", queue, "--state", "active", "--yes").code == 2, "workers have them: they would stay"
    assert cli.ok("queues", "clean", queue, "--state", "waiting", "--limit", "7", "--yes").out.startswith("removed 7 ")
    cleaned = cli.ok("queues", "clean", queue, "--state", "waiting", "--yes", "--json").document
    assert cleaned == {"queue": queue, "removed": number - 7}
    assert row(cli, queue)["delayed"] == 1


# -- dlq ---------------------------------------------------------------------------------------------------------------


def test_dead_letters_are_grouped_by_what_went_wrong(cli: Cli, client: Client, queue: str) -> None:
    for n in range(3):
        bury(client, queue, f"the bank did not answer within {n} s")
    bury(client, queue, "no such customer")
    lines = cli.ok("dlq", queue).out.splitlines()
    assert lines[0].split() == ["COUNT", "LAST", "ERROR"]
    assert lines[1].split(maxsplit=2)[2] == "no such customer"
    assert lines[2].split()[0] == "3"
    assert "the bank did not answer within 2 s" in lines[2]
    groups = cli.ok("dlq", queue, "--json").lines
    assert [(group["count"], group["signature"]) for group in groups] == [
        (1, "no such customer"),
        (3, "the bank did not answer within # s"),
    ]
    each = cli.ok("dlq", queue, "--each", "--limit", "2")
    assert len(each.out.splitlines()) == 3
    assert "2 of 4" in each.err


def test_dead_letters_run_again_or_go(cli: Cli, client: Client, queue: str) -> None:
    ids = [bury(client, queue, f"error {n}") for n in range(5)]
    assert cli.ok("dlq", queue, "retry", ids[0]).out == f"retried 1 dead letter of {queue}\n"
    assert state(client, ids[0]) == "waiting"
    missing = cli("dlq", queue, "remove", ids[1], "nobody")
    assert missing.code == 3
    assert "nobody" in missing.err
    assert state(client, ids[1]) == "unknown"
    assert cli.ok("dlq", queue, "retry", "--limit", "1", "--json").document["retried"] == 1
    assert cli("dlq", queue, "purge").code == 2
    for chosen in ((ids[2],), ("--error", "error 2"), ("--limit", "1")):
        refused = cli("dlq", queue, "purge", *chosen, "--yes")
        assert refused.code == 2
        assert "`remove`" in refused.err
    assert cli.ok("dlq", queue, "purge", "--yes").out == f"removed 2 dead letters of {queue}\n"
    assert cli.ok("dlq", queue).err == f"{queue} has no dead letters\n"
    assert cli("dlq", queue, "remove").code == 2


def test_one_kind_of_error_can_be_retried_or_removed_alone(cli: Cli, client: Client, queue: str) -> None:
    ids = [bury(client, queue, f"the bank did not answer within {n} s") for n in range(3)]
    other = bury(client, queue, "no such customer")
    shown = cli.ok("dlq", queue, "--each", "--error", "customer", "--json").lines
    assert [letter["job"]["id"] for letter in shown] == [other]
    assert cli.ok("dlq", queue, "retry", "--error", "bank").out == f"retried 3 dead letters of {queue}\n"
    assert {state(client, job_id) for job_id in ids} == {"waiting"}
    assert cli.ok("dlq", queue, "remove", "--error", "bank", "--yes", "--json").document["removed"] == 0
    assert state(client, other) == "failed"
    asked = cli("dlq", queue, "remove", "--error", "customer")
    assert asked.code == 2
    assert "Remove 1 dead letter" in asked.err
    assert cli.ok("dlq", queue, "remove", "--error", "customer", "--yes", "--json").document["removed"] == 1


def test_a_choice_of_dead_letters_is_heeded_or_refused(cli: Cli, client: Client, queue: str) -> None:
    job_id = bury(client, queue, "the bank did not answer")
    for words, told in (
        (("retry", "--error", "bank", "--reason", "stalled"), "--error and --reason"),
        (("retry", job_id, "--reason", "stalled"), "ID and --reason"),
        (("retry", "--error", "bank", "--limit", "-1"), "--limit must be at least 1"),
        (("remove", job_id, "--reason", "stalled"), "remove does not take --reason"),
        (("list", "--reason", "stalled"), "list does not take --reason"),
        (("list", "--error", "customer"), "add --each"),
        (("list", "--each", "--limit", "-1"), "--limit must be at least 1"),
        (("list", job_id), "list does not take ID"),
    ):
        refused = cli("dlq", queue, *words)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert told in refused.err
    assert state(client, job_id) == "failed"


# -- cron --------------------------------------------------------------------------------------------------------------


def test_next_runs_are_told_without_a_server_across_a_clock_change(offline: Cli) -> None:
    runs = offline.ok("cron", "next", "30 2 * * *", "--tz", "Europe/Berlin", "-n", "400", "--json").lines
    zone = ZoneInfo("Europe/Berlin")
    days = [datetime.fromtimestamp(run["at"] / 1000, zone) for run in runs]
    assert len({day.date() for day in days}) == 400
    # Once a year there is no 02:30: it runs when the gap ends.
    assert {day.strftime("%H:%M") for day in days} == {"02:30", "03:00"}
    shown = offline.ok("cron", "next", "@hourly", "--tz", "UTC", "-n", "2").out.splitlines()
    assert len(shown) == 2
    assert shown[0].endswith(("min", "now", " s"))
    assert "UTC  in " in shown[1]


def test_an_expression_or_zone_that_makes_no_sense_ends_with_2(offline: Cli) -> None:
    assert "must have 5 fields" in offline("cron", "next", "* * *").err
    wrong_zone = offline("cron", "next", "@daily", "--tz", "Mars/Base")
    assert wrong_zone.code == 2
    assert "Mars/Base" in wrong_zone.err


def test_schedules_are_added_listed_and_deleted(cli: Cli, client: Client, queue: str) -> None:
    timing = ("--schedule", "0 9 * * mon", "--tz", "Europe/Berlin")
    added = cli.ok("cron", "add", "weekly", queue, *timing, "--data", '{"report": 1}', "--job-name", "report").out
    assert added.startswith(f"weekly pushes to {queue}, next Mon ")
    assert client.ok("CronGet", name="weekly")["cron"]["jobName"] == "report"
    cli.ok("cron", "add", "often", queue, "--every", "90s", "--limit", "3")
    table = cli.ok("cron", "list", "--queue", queue).out
    assert "0 9 * * mon  Europe/Berlin" in table
    assert "every 1m30s" in table
    assert "0 of 3" in table
    assert [cron["name"] for cron in cli.ok("cron", "list", "--queue", queue, "--json").lines] == ["weekly", "often"]
    for name in ("weekly", "often"):
        cli.ok("cron", "delete", name)
    assert cli("cron", "delete", "weekly").code == 3
    assert cli("cron", "add", "bad", queue, "--schedule", "nonsense").code == 2
    assert cli("cron", "add", "bad", queue).code == 2


def test_a_completed_job_shows_in_the_counts(cli: Cli, client: Client, queue: str) -> None:
    complete(client, queue)
    assert row(cli, queue)["completed"] == 1


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_narrow_terminal_costs_columns_but_not_names(cli: Cli, client: Client, queue: str, columns: int) -> None:
    name = "payments.refunds.europe-west"
    client.ok("PUSH", queue=name, name="refund", data={"n": 1})
    client.ok("RegisterWorker", name="mailer-europe", queues=["emails", name], hostname="mail-1.example.net")
    client.ok("Cron", name="nightly-report", queue=name, schedule="0 3 * * *", data={}, timezone="Europe/Vienna")
    client.ok("FlowStart", id="0199aaaa-bbbb-7ccc-8ddd-eeeeffff0000", workflow="order-fulfilment", queue="flows")
    asked = {
        ("queues",): "payments.refund",
        ("jobs", name): "refund",
        ("workers",): "mailer-",
        ("cron", "list"): "nightly-report",
        ("flow", "list"): "order-ful",
    }
    try:
        for words, recognised in asked.items():
            with cli.on_terminal(*words, columns=columns) as terminal:
                assert terminal.end() == 0
            table, _, note = terminal.text.partition("left out, as the terminal is narrow: ")
            assert recognised in table, terminal.text
            assert max(map(len, table.splitlines())) <= columns
            assert not (note and columns == 120), terminal.text
    finally:
        client.ok("CronDelete", name="nightly-report")
        client.ok("Obliterate", queue=name)
