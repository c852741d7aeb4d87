"""`headrace call`, and what all commands share: which server is meant, exit codes, errors, how fast they start."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import COMMANDS, _parser
from headrace.cli.session import EXIT_CODES, Exit
from headrace.commands import REGISTRY, Flag
from tests.cli.terminal import COMMAND, Cli, environment
from tests.cli.test_jobs import push
from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

# -- call --------------------------------------------------------------------------------------------------------------


def test_any_command_can_be_sent_with_typed_fields(cli: Cli, client: Client, queue: str) -> None:
    (cli.folder / "data.json").write_text('{"from": "file"}')
    fields = (f"queue={queue}", "data=@data.json", "name=1", "priority=5", 'tags=["a","b"]', "durable=true")
    pushed = cli.ok("call", "PUSH", *fields).document
    job = client.ok("GetJob", id=pushed["id"])["job"]
    assert (job["data"], job["name"], job["priority"], job["tags"]) == ({"from": "file"}, "1", 5, ["a", "b"])
    listed = cli.ok("call", "getjobs", f"queue={queue}", "state=waiting", "limit=1").document
    assert [found["id"] for found in listed["jobs"]] == [pushed["id"]]
    wide = cli.ok("call", "PUSH", f"queue={queue}", "data=12345678901").document
    assert client.ok("GetJob", id=wide["id"])["job"]["data"] == 12345678901


def test_a_command_that_waits_may_wait_longer_than_others(cli: Cli, queue: str) -> None:
    url = f"{cli.url}?command_timeout=300ms"
    assert cli.ok("call", "PULL", f"queue={queue}", "timeout=900", "--url", url).document["job"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("PUSH", "queue=q", "data=1", "priority=high"), "priority must be a number"),
        (("PUSH", "queue=q", "data=1", "priority=1.5"), "priority must be an integer"),
        (("PUSH", "data=1"), "Queue name is required"),
        (("PUSH", "queue=q"), "`headrace call PUSH --fields` shows what it takes"),
        (("PUSH", "queue=q", "data={oops"), "data is not JSON"),
        (("PUSH", "queue=a b", "data=1"), "Queue name contains invalid characters"),
        (("PUSH", "nix=1"), "PUSH takes: data, queue, name"),
        (("PUSH", "queue"), "'queue' is not a field of PUSH"),
        (("PUSSH",), "did you mean PUSH"),
        (("SubscribeEvents", "queue=q"), "headrace events"),
        (("Ping", "x=1"), "Ping takes: no fields"),
    ],
)
def test_what_is_wrong_with_a_field_is_told_in_its_name(cli: Cli, words: tuple[str, ...], said: str) -> None:
    done = cli("call", *words)
    assert done.code == 2
    assert said in done.err


def test_the_registry_is_listed_and_every_command_describes_itself(offline: Cli) -> None:
    listed = {line["command"]: line for line in offline.ok("call", "--json").lines}
    assert set(listed) == set(REGISTRY)
    assert all(line["summary"] for line in listed.values())
    sendable = [name for name, spec in REGISTRY.items() if not spec.flags & (Flag.CONNECTION | Flag.OPEN)]
    for name in sendable[:: scaled(10, 1)]:
        fields = {line["field"] for line in offline.ok("call", name, "--fields", "--json").lines}
        declared = set(REGISTRY[name].type.__struct_encode_fields__) - {"reqId"}
        assert fields == declared


# -- which server ------------------------------------------------------------------------------------------------------


def test_a_token_comes_from_the_environment_or_the_url(offline: Cli, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "headrace.db", "--auth-tokens", "secret-1") as server:
        url = f"headrace://127.0.0.1:{server.port}"
        without = offline("stats", "--url", url)
        assert without.code == 4
        assert "HEADRACE_TOKEN" in without.err
        wrong = offline("stats", "--url", f"{url}?token=secret-2")
        assert wrong.code == 4
        assert "secret-2" not in wrong.err
        assert offline("stats", "--url", url, env={"HEADRACE_TOKEN": "secret-1"}).code == 0
        assert offline("stats", env={"HEADRACE_TOKEN": "wrong", "HEADRACE_URL": f"{url}?token=secret-1"}).code == 0
        assert offline("flow", "list", "--url", url, env={"HEADRACE_TOKEN": "secret-1"}).code == 0


def test_the_flag_wins_over_the_environment_before_and_behind_an_action(cli: Cli, queue: str) -> None:
    nowhere = {"HEADRACE_URL": "headrace://127.0.0.1:1"}
    assert cli.url is not None
    assert cli("queues", env=nowhere).code == 4
    assert cli("queues", "--url", cli.url, env=nowhere).code == 0
    assert cli("queues", "--url", cli.url, "pause", queue, env=nowhere).code == 0
    assert cli("queues", "resume", queue, "--url", cli.url, "--json", env=nowhere).document["paused"] is False


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("headrace://127.0.0.1:1", Exit.NO_CONNECTION, "headrace serve"),
        ("headrace://127.0.0.1:notaport", Exit.USAGE, "is not an address"),
        ("valkey://127.0.0.1:1", Exit.NO_CONNECTION, "cannot be reached"),
        ("amqp://127.0.0.1", Exit.USAGE, "is not the URL of a queue"),
        ("headrace://[::1", Exit.USAGE, "is not an address"),
        ("sqlite://jobs.db", Exit.USAGE, "two slashes"),
        ("headrace://127.0.0.1:1?pool=4", Exit.USAGE, "unknown connection option 'pool'"),
    ],
)
def test_a_server_that_cannot_be_had_is_told(offline: Cli, url: str, code: Exit, said: str) -> None:
    done = offline("stats", "--url", url)
    assert done.code == code
    assert said in done.err


def test_two_commands_cannot_have_one_file_open(offline: Cli, server: ServerProcess) -> None:
    done = offline("stats", "--url", f"sqlite:///{server.data_path}")
    assert done.code == 1
    assert str(server.pid) in done.err
    assert "disk" not in done.err


def test_a_file_that_is_not_there_is_not_made_by_looking_at_it(offline: Cli) -> None:
    for words in (
        ("queues",),
        ("jobs", "mail"),
        ("pull", "mail", "--ack"),
        ("cron", "list"),
        ("queues", "pause", "mail"),
    ):
        done = offline(*words, "--url", "sqlite:///typo.db")
        assert (done.code, "typo.db" in done.err) == (Exit.NOT_FOUND, True)
    assert list(offline.folder.glob("typo.db*")) == []
    offline.ok("cron", "add", "nightly", "mail", "--schedule", "0 3 * * *", "--url", "sqlite:///new.db")
    assert "nightly" in offline.ok("cron", "list", "--url", "sqlite:///new.db").out


def test_doctor_tells_machines_too(offline: Cli) -> None:
    offline.ok("push", "mail", "n", "1", "--url", "sqlite:///own.db")
    report = offline.ok("doctor", "--data-path", "own.db", "--json").document
    assert report["healthy"] is True
    assert any("mail: 1 waiting" in fact for fact in report["facts"])
    assert offline("doctor", "--data-path", "gone.db", "--json").code == 1


# -- errors ------------------------------------------------------------------------------------------------------------


def test_with_json_an_error_is_json_too(cli: Cli) -> None:
    done = cli("job", "nobody", "--json")
    told = json.loads(done.err)
    assert (done.code, done.out) == (3, "")
    assert (told["error"], told["code"], told["exit"]) == ("there is no job nobody", "not_found", 3)
    assert told["hints"]


def test_output_that_cannot_be_written_is_told(cli: Cli) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "stats"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(cli.url), timeout=30
        )
    assert (done.returncode, done.stderr) == (1, "headrace: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("json_flag", [(), ("--json",)])
def test_any_locale_will_do(cli: Cli, client: Client, queue: str, json_flag: tuple[str, ...]) -> None:
    push(client, queue, name="grüße", data="…")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*COMMAND, "jobs", queue, *json_flag], capture_output=True, env=environment(cli.url, **ascii_only), timeout=30
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "grüße" in done.stdout.decode()
    assert "…" in done.stdout.decode()


def test_an_argument_that_is_no_text_is_refused(cli: Cli, queue: str) -> None:
    for words in (("caf\udce9", "1"), ("n", "1", "--url", "sqlite:///caf\udce9.db")):
        done = cli("push", queue, *words)
        assert done.code == 2
        assert "utf-8" in done.err.lower()


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-"])
def test_a_closed_stream_is_an_empty_one(cli: Cli, queue: str, closed: str) -> None:
    command = f"exec {sys.executable} -m headrace push {queue} name - {closed}"
    stdin = None if closed == "<&-" else subprocess.DEVNULL
    done = subprocess.run(
        ["sh", "-c", command], stdin=stdin, capture_output=True, text=True, env=environment(cli.url), timeout=30
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m headrace queues {closed}"],
        capture_output=True,
        text=True,
        env=environment(cli.url),
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_exit_code_is_described_on_the_page() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()
    for code, meaning in EXIT_CODES.items():
        assert f"| {int(code)} | {meaning} |" in page


def test_a_wrong_command_line_is_told_like_any_error(offline: Cli) -> None:
    done = offline("push", "mail", "--attempts", "many")
    assert done.code == 2
    assert done.err.splitlines() == [
        "headrace: argument --attempts: invalid int value: 'many'",
        "          `headrace push --help` shows how to use it",
    ]
    assert offline("serve", "--tcp-prot", "1").err.splitlines() == [
        "headrace: unrecognized arguments: --tcp-prot 1",
        "          `headrace serve --help` shows how to use it",
    ]
    assert offline("dlq").err.splitlines()[0] == "headrace: the following arguments are required: QUEUE"
    told = json.loads(offline("queues", "pause", "--json").err)
    assert (told["code"], told["exit"]) == ("usage", 2)
    assert "required: NAME" in told["error"]


def test_an_unknown_command_ends_with_2(offline: Cli) -> None:
    assert offline("pusch").code == 2
    assert offline().code == 2
    assert offline("queues", "explode", "q").code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--log-level", "loud"), "debug, info"),
        (("--lease", "0s"), "too short"),
        (("--queues", ",,"), "names no queue"),
        (("--processes", "0"), "at least 1"),
        (("--max-jobs-per-child", "0"), "at least 1"),
    ],
)
def test_a_worker_with_options_that_make_no_sense_is_refused(offline: Cli, words: tuple[str, ...], said: str) -> None:
    (offline.folder / "shop.py").write_text(
        "from headrace import Headrace\napp = Headrace('memory://shop')\n\n\n@app.task()\ndef buy() -> None: ...\n"
    )
    done = offline("worker", "shop:app", *words)
    assert (done.code, "Traceback" in done.err) == (2, False)
    assert said in done.err.replace("'", "")


def test_a_check_shows_the_queues_that_are_meant_and_names_one_without_tasks(offline: Cli) -> None:
    (offline.folder / "shop.py").write_text(
        "from headrace import Headrace\napp = Headrace('memory://shop')\n\n\n"
        "@app.task(queue='mail')\ndef send() -> None: ...\n\n\n"
        "@app.cron('30 2 * * *', tz='Europe/Berlin', queue='night')\ndef sweep() -> None: ...\n"
    )
    done = offline.ok("worker", "shop:app", "--check", "--queues", "night,mial")
    assert [line.split() for line in done.out.splitlines()[1:]] == [
        ["night", "sweep", "thread", "30", "2", "*", "*", "*", "Europe/Berlin"]
    ]
    assert "no task of shop:app is of the queue mial; queues of its tasks: mail, night" in done.err


@pytest.mark.parametrize(
    "url",
    [
        "headrace://host:6789?token=secret",
        "valkey://me:secret@host:6379/0",
        "valkey://me:top/secret@host:6379/0",
    ],
)
def test_a_check_shows_no_secrets(offline: Cli, url: str) -> None:
    (offline.folder / "shop.py").write_text(
        f"from headrace import Headrace\napp = Headrace({url!r})\n\n\n@app.task()\ndef send() -> None: ...\n"
    )
    shown = offline.ok("worker", "shop:app", "--check").out
    assert "//host:6" in shown
    assert "secret" not in shown


def test_no_command_at_all_shows_the_help(offline: Cli) -> None:
    done = offline()
    assert (done.code, done.out) == (2, "")
    assert "run a server in the foreground" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("psh",), "there is no command psh; did you mean push?"),
        (("frobnicate",), "there is no command frobnicate"),
        (("queues", "pasue"), "there is no action pasue; did you mean pause?"),
        (("queues", "mail"), "(choose from "),
        (("--url", "headrace://queue.example.com", "queues"), "--url stands before the command"),
    ],
)
def test_a_misspelled_command_is_answered_with_the_nearest(offline: Cli, words: tuple[str, ...], said: str) -> None:
    done = offline(*words)
    assert done.code == 2
    assert said in done.err.splitlines()[0]


@pytest.mark.parametrize("place", [":app", ".shop:app", ""])
def test_an_app_without_a_module_is_refused(offline: Cli, place: str) -> None:
    done = offline("worker", place)
    assert done.code == 2
    assert "names no module" in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--data-path", "/"),
        ("serve", "--data-path", "/nowhere/jobs.db"),
        ("valkey", "init", "--url", "valkey://127.0.0.1:1"),
        ("jobs", "q", "--url", "sqlite:////nowhere/jobs.db"),
    ],
)
def test_a_store_that_cannot_be_opened_is_not_called_a_full_disk_of_a_server(
    offline: Cli, words: tuple[str, ...]
) -> None:
    done = offline(*words)
    assert done.code != 0
    assert "cannot" in done.err
    assert "refuses writes" not in done.err


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("libvalkey", ("serve", "--backend", "valkey://127.0.0.1:1", "--tcp-port", "0"), "valkey"),
        ("libvalkey", ("valkey", "init"), "valkey"),
        ("libvalkey", ("capture", "log", "--backend", "valkey://127.0.0.1:1"), "valkey"),
        ("pyarrow", ("pipeline", "report"), "spark"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(
    tmp_path: Path, missing: str, words: tuple[str, ...], extra: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{missing!r}] = None\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [*COMMAND, *words],
        env=environment(None, PYTHONPATH=path),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=30,
    )
    assert done.returncode == 1
    assert done.stderr == f'headrace: {missing} is missing: pip install "headrace[{extra}]"\n'


# -- starting ----------------------------------------------------------------------------------------------------------


def test_every_command_explains_itself(offline: Cli) -> None:
    for name in COMMANDS:
        shown = offline.ok(name, "--help").out
        assert shown.startswith(f"usage: headrace {name}")
    shown = offline.ok("--help").out
    assert all(f"    {name} " in shown for name in COMMANDS)


def test_every_argument_says_what_it_is_for() -> None:
    waiting = [_parser(COMMANDS)]
    while waiting:
        parser = waiting.pop()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                waiting += action.choices.values()
            else:
                assert action.help, (parser.prog, action.dest)


def test_every_client_command_takes_json() -> None:
    parser = _parser(COMMANDS)
    (actions,) = [action for action in parser._actions if hasattr(action, "choices") and action.choices]
    for name, command in actions.choices.items():  # type: ignore[union-attr]
        if name in ("serve", "worker", "capture", "valkey", "pipeline"):
            continue
        below = [one for one in command._actions if name in ("cron", "flow") and one.choices]  # type: ignore[attr-defined]
        for asked in below[0].choices.values() if below else [command]:
            assert "--json" in asked.format_help(), asked.prog


def spent(words: list[str]) -> float:
    """CPU seconds of a command, from its start to its end."""
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environment(None)) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used.ru_utime + used.ru_stime


@pytest.mark.alone
def test_help_costs_less_than_120_ms() -> None:
    assert statistics.median(spent([sys.executable, "-m", "headrace", "--help"]) for _ in range(5)) < 0.120


def test_rich_is_loaded_on_terminals_only(cli: Cli, client: Client, queue: str) -> None:
    push(client, queue)
    program = "import sys; from headrace.cli import main; main(sys.argv[1:]); print('rich' in sys.modules)"
    for words in (["queues"], ["jobs", queue], ["top", "--once"], ["job", push(client, queue)]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env=environment(cli.url),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stdout.splitlines()[-1] == "False", words
    loaded = "import sys, headrace, headrace.connect, headrace.client.queue; print('rich' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", loaded], text=True).strip() == "False"
