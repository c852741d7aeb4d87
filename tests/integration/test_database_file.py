"""One file, one owner: what `serve` and `doctor` say about files that are taken, foreign or damaged."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from headrace.backends.local.journal import schema_scripts
from tests.serverprocess import ServerProcess
from tests.wireclient import Client


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def doctor(path: Path) -> subprocess.CompletedProcess[str]:
    return headrace("doctor", "--data-path", str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with five jobs in it, and nobody's."""
    data_path = tmp_path / "jobs.db"
    with ServerProcess(data_path) as server, server.client() as client:
        for number in range(5):
            client.ok("PUSH", queue="mail", data={"n": number}, name=f"job {number}")
        client.ok("Pause", queue="mail")
    return data_path


def damage(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()


def test_the_second_server_on_a_file_is_sent_to_the_first(path: Path) -> None:
    with ServerProcess(path) as server:
        second = headrace("serve", "--tcp-port", "0", "--http-port", "0", "--data-path", str(path))
        assert second.returncode == 1
        assert f"process {server.pid}" in second.stderr
        assert "`headrace serve`" in second.stderr
        assert "Traceback" not in second.stderr
        with server.client() as client:
            assert client.ok("Count", queue="mail")["count"] == 5


def test_a_file_is_free_again_after_kill_9(path: Path) -> None:
    with ServerProcess(path) as server:
        server.kill()
        server.start()
        with server.client() as client:
            assert client.ok("Count", queue="mail")["count"] == 5


def test_a_file_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    damage(path, "PRAGMA user_version=99")
    refused = headrace("serve", "--tcp-port", "0", "--http-port", "0", "--data-path", str(path))
    assert refused.returncode == 1
    assert "newer Headrace (schema 99" in refused.stderr
    assert "Traceback" not in refused.stderr
    examined = doctor(path)
    assert examined.returncode == 1
    assert "newer Headrace (schema 99" in examined.stdout
    damage(path, f"PRAGMA user_version={len(schema_scripts())}")
    assert doctor(path).returncode == 0


def test_a_file_that_is_no_database_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Sir or Madam, " * 500)
    for ran in (headrace("serve", "--tcp-port", "0", "--http-port", "0", "--data-path", str(path)), doctor(path)):
        assert ran.returncode == 1
        assert str(path) in ran.stdout + ran.stderr
        assert "Traceback" not in ran.stderr
    assert path.read_text().startswith("Dear Sir")


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "jobs.db"
    refused = headrace("serve", "--tcp-port", "0", "--http-port", "0", "--data-path", str(path))
    assert refused.returncode == 2
    assert str(path.parent) in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET settings = x'ff00ff' WHERE seq = 3",
        "UPDATE job SET links = x'93010203' WHERE seq = 3",
        "UPDATE job SET history = x'c1' WHERE seq = 3",
    ],
    ids=["settings", "links", "history"],
)
def test_a_row_that_cannot_be_read_is_named_and_the_rest_is_served(path: Path, statement: str) -> None:
    damage(path, statement)
    examined = doctor(path)
    assert examined.returncode == 1
    assert "job row 3" in examined.stdout
    with ServerProcess(path) as server:
        with server.client() as client:
            client.ok("Resume", queue="mail")
            served = [client.ok("PULL", queue="mail")["job"]["data"]["n"] for _ in range(4)]
            assert served == [0, 1, 3, 4]
            new = client.ok("PUSH", queue="mail", data={"n": 5})["id"]
            assert client.ok("GetJob", id=new)["job"]["data"] == {"n": 5}
        assert "job row 3" in server.stop()


def test_settings_that_cannot_be_read_are_named_and_the_queue_is_served(path: Path) -> None:
    damage(path, "UPDATE record SET value = x'c1' WHERE kind = 'queue'")
    with ServerProcess(path) as server:
        with server.client() as client:
            assert client.ok("PULL", queue="mail")["job"]["data"] == {"n": 0}
        assert "settings of queue mail" in server.stop()


def test_the_doctor_finds_a_healthy_file_healthy_and_tells_what_is_in_it(path: Path) -> None:
    examined = doctor(path)
    assert examined.returncode == 0, examined.stdout
    assert "queue mail: 5 waiting" in examined.stdout
    assert "paused" in examined.stdout
    assert examined.stdout.rstrip().endswith("healthy")


def test_the_doctor_changes_nothing_that_a_server_left_when_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "killed.db"
    with ServerProcess(path) as server, server.client() as client:
        for number in range(20):
            client.ok("PUSH", queue="mail", data=number)
        server.kill()
        assert doctor(path).returncode == 0
        assert doctor(path).returncode == 0
        server.start()
        with server.client() as again:
            assert again.ok("Count", queue="mail")["count"] == 20


def test_the_doctor_says_that_a_file_is_missing_without_making_it(tmp_path: Path) -> None:
    examined = doctor(tmp_path / "missing.db")
    assert examined.returncode == 1
    assert "does not exist" in examined.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_does_not_touch_a_file_in_use(path: Path) -> None:
    with ServerProcess(path) as server:
        examined = doctor(path)
        assert examined.returncode == 1
        assert f"process {server.pid}" in examined.stdout


def test_the_doctor_names_a_payload_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "large.db"
    with ServerProcess(path) as server, server.client() as client:
        client.ok("PUSH", queue="mail", data="x" * 50_000)
    damage(path, "DELETE FROM payload")
    examined = doctor(path)
    assert examined.returncode == 1
    assert "lost their payload" in examined.stdout


@pytest.mark.parametrize(
    "statement",
    ["UPDATE mark SET totals = x'c1'", "INSERT INTO clearing VALUES ('mail', 999, 0, 5, x'90')"],
    ids=["mark", "clearing"],
)
def test_damage_without_which_nothing_can_be_served_is_told_by_server_and_doctor(path: Path, statement: str) -> None:
    damage(path, statement)
    refused = headrace("serve", "--tcp-port", "0", "--http-port", "0", "--data-path", str(path))
    for told in (refused.stderr, doctor(path).stdout):
        assert f"{path} is damaged" in told
        assert "Traceback" not in told


def test_a_workflow_that_cannot_be_read_is_named_and_the_rest_is_served(path: Path) -> None:
    with ServerProcess(path) as server, server.client() as client:
        client.ok("FlowStart", id="f", workflow="w", queue="w", steps=[{"kind": "started", "body": 1}], jobs=[])
    damage(path, "UPDATE flow SET status = 'odd'")
    with ServerProcess(path) as server:
        with server.client() as client:
            assert client.ok("Count", queue="mail")["count"] == 5
        assert "workflow f is unreadable" in server.stop()


@pytest.mark.parametrize(("kind", "field"), [("queue", "pausedGroups"), ("cron", "queue"), ("webhook", "url")])
def test_settings_with_damaged_text_are_named_and_the_rest_is_served(path: Path, kind: str, field: str) -> None:
    value = msgspec.msgpack.encode({field: ["~~"] if kind == "queue" else "~~"}).replace(b"~~", b"\xff\xff")
    damage(path, f"INSERT INTO record VALUES ('{kind}', 'odd', x'{value.hex()}')")
    with ServerProcess(path) as server:
        with server.client() as client:
            assert client.ok("Count", queue="mail")["count"] == 5
        assert "odd" in server.stop()


def test_a_write_ahead_log_without_its_file_is_left_alone(tmp_path: Path) -> None:
    """SQLite deletes it when it makes a new file of that name: with it all jobs that are not in the file yet."""
    path, aside = tmp_path / "jobs.db", tmp_path / "aside"
    with ServerProcess(path) as server, server.client() as client:
        job_id = client.ok("PUSH", queue="mail", data=1)["id"]
        server.kill()
        path.rename(aside)
        with pytest.raises(RuntimeError, match=r"its write-ahead log .*jobs.db-wal is there"):
            server.start()
        aside.rename(path)
        server.start()
        with server.client() as again:
            assert again.ok("GetState", id=job_id)["state"] == "waiting"


def make_last_event_later(segment: Path) -> None:
    """By six seconds, so that it cannot be of the same tick as those before."""
    *lines, last = segment.read_text().splitlines() or [""]
    if last:
        event = json.loads(last)
        segment.write_text("".join(f"{line}\n" for line in [*lines, json.dumps({**event, "ts": event["ts"] + 6000})]))


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_jobs_that_were_lost_with_the_write_ahead_log_are_told_by_doctor_and_server(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / "jobs.db"
    with ServerProcess(path) as server:
        with server.client() as client:
            client.ok("PUSH", queue="mail", data=1)
        server.stop()
        shutil.copy(path, tmp_path / "copy.db")
        server.start()
        with server.client() as client:
            client.ok("PUSH", queue="mail", data=2)
            client.ok("PUSH", queue="mail", data=3)
        getattr(server, ending)()
        for segment in (tmp_path / "jobs.db-events" / "shard=0").glob(".open-*"):
            make_last_event_later(segment)
        (tmp_path / "jobs.db-wal").unlink(missing_ok=True)
        (tmp_path / "jobs.db-shm").unlink(missing_ok=True)
        shutil.copy(tmp_path / "copy.db", path)
        examined = doctor(path)
        assert examined.returncode == 1
        assert "! the event log has events 2..3, which were committed, but the database does not" in examined.stdout
        server.start()
        assert "events 2..3 were committed, but the database does not have what they tell of" in server.stop()
    assert doctor(path).stdout.endswith("\nhealthy\n")


def test_a_new_database_beside_the_log_of_another_is_refused_by_doctor_and_server(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with ServerProcess(path) as server:
        with server.client() as client:
            client.ok("PUSH", queue="mail", data=1)
        server.stop()
        path.unlink()
        refused = f"{path} has no events yet, but {path}-events has those of another database, up to event 1: put that"
        with pytest.raises(RuntimeError, match=refused):
            server.start()
    examined = doctor(path)
    assert (examined.returncode, f"! {refused}" in examined.stdout) == (1, True)


def test_damaged_pages_are_told_and_no_server_starts_on_them(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * 4096)
    examined = doctor(path)
    assert examined.returncode == 1
    assert "!" in examined.stdout
    refused = headrace("serve", "--tcp-port", "0", "--http-port", "0", "--data-path", str(path))
    assert refused.returncode == 1
    assert str(path) in refused.stderr
    assert "Traceback" not in examined.stderr + refused.stderr


def test_a_backup_of_a_busy_server_holds_everything_acknowledged_before_it(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    with ServerProcess(path) as server, server.client() as client, server.client() as other:
        before = [client.ok("PUSH", queue="mail", data={"n": n})["id"] for n in range(50)]
        with writing(other):
            made = headrace("backup", str(copy), "--data-path", str(path), "--json")
        assert made.returncode == 0, made.stderr
    assert not copy.with_name("copy.db.part").exists()
    assert doctor(copy).returncode == 0
    with ServerProcess(copy) as server, server.client() as client:
        assert {client.ok("GetState", id=job_id)["state"] for job_id in before} == {"waiting"}
        assert client.ok("IsPaused", queue="mail")["paused"]
        count = client.ok("Count", queue="mail")["count"] + client.ok("Count", queue="meanwhile")["count"]
    assert json.loads(made.stdout)["jobs"] == count


@contextmanager
def writing(client: Client) -> Iterator[None]:
    """Push all the time, as fast as one connection can."""
    is_over = threading.Event()

    def push() -> None:
        while not is_over.is_set():
            client.ok("PUSH", queue="meanwhile", data="x" * 1000)

    thread = threading.Thread(target=push)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(10)


def test_a_backup_overwrites_nothing(path: Path, tmp_path: Path) -> None:
    (tmp_path / "there.db").write_text("precious")
    refused = headrace("backup", str(tmp_path / "there.db"), "--data-path", str(path))
    assert refused.returncode != 0
    assert "there.db exists" in refused.stderr
    assert (tmp_path / "there.db").read_text() == "precious"


def test_a_backup_that_cannot_be_made_leaves_nothing(path: Path, tmp_path: Path) -> None:
    for target, data_path in ((tmp_path / "no" / "folder.db", path), (tmp_path / "copy.db", tmp_path / "missing.db")):
        failed = headrace("backup", str(target), "--data-path", str(data_path))
        assert failed.returncode != 0
        assert "Traceback" not in failed.stderr
        assert not target.exists()
    assert sorted(file.name for file in tmp_path.glob("*.part")) == []
