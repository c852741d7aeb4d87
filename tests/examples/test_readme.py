"""README and docs/operations.md: what they tell the reader to type works, and gives what they say it gives."""

from __future__ import annotations

import ast
import configparser
import functools
import importlib
import inspect
import re
import shlex
import ssl
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

import headrace
from headrace import Backoff, Headrace, Job, JobContext, Queue, SyncHeadrace, Task
from headrace.cli.main import _parser
from headrace.client.queue import Dlq
from headrace.commands import REGISTRY
from headrace.config import Settings
from tests.examples import pages
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

HAND_WRITTEN = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"]
PAGES = [*HAND_WRITTEN, *(f"docs/{path.name}" for path in sorted((pages.ROOT / "docs").glob("*.md")))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pages.prepare(tmp_path)


def text_of(page: str) -> str:
    return (pages.ROOT / page).read_text(encoding="utf-8")


# -- README ------------------------------------------------------------------------------------------------------------


def test_the_tour_starts_a_server_runs_both_clients_and_examines_the_file(folder: Path) -> None:
    with pages.serving(pages.block_with("README.md", "sh", "headrace serve"), folder) as line:
        port = pages.port_of(line)
        promised = "headrace listens on headrace://127.0.0.1:6789 and http://127.0.0.1:6790 (headrace.db)"
        assert promised in text_of("README.md")
        # The tests run servers side by side, so HTTP is off here and its part of the line is missing.
        assert line.replace(str(port), "6789") == promised.replace(" and http://127.0.0.1:6790", "")
        shown = pages.run_shell(pages.block_with("README.md", "sh", "headrace push"), folder, port)
        assert shown.startswith("first\nQUEUE  WAITING")
        assert shown.count("ada@example.com") == 2
        ours = pages.block_with("README.md", "python", "app.sync()")
        assert pages.run([".venv/bin/python", "-c", ours], folder, port) == "delayed\n"
        official = pages.block_with("README.md", "python", "from bunqueue")
        assert pages.run([".venv/bin/python", "-c", official], folder, port) == "sent to ada@example.com\n"
        assert run_bun(pages.blocks("README.md", "ts"), folder, port) == "sent to ada@example.com\n"
    examined = pages.run_shell(pages.block_with("README.md", "sh", "headrace doctor"), folder).splitlines()
    assert "  queue mail: 0 waiting, 0 delayed, 0 blocked, 2 completed, 0 failed" in examined
    assert "  queue mail-ts: 0 waiting, 0 delayed, 0 blocked, 1 completed, 0 failed" in examined
    assert examined[-1] == "healthy"


def run_bun(blocks: list[str], folder: Path, port: int) -> str:
    (block,) = blocks
    (folder / "node_modules").symlink_to(pages.ROOT / "tests/interop/node_modules")
    (folder / "mail.ts").write_text(block, encoding="utf-8")
    bun = pages.run([str(pages.ROOT / "tools/bun.sh")], folder).strip()
    return pages.run([bun, "mail.ts"], folder, port)


def test_the_first_program_runs_as_it_stands_in_an_empty_folder(folder: Path) -> None:
    program = pages.blocks("README.md", "python")[0]
    for _ in range(2):  # the second time the file is there already
        assert pages.run([".venv/bin/python", "-c", program], folder) == "sent to ada@example.com\n"
    assert (folder / "jobs.db").exists()


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    described = re.findall(r"^(make \w+)\s+# ", text_of("README.md"), re.MULTILINE)
    assert described == ["make run", "make test"]
    for command in described:
        planned = subprocess.run(
            [*command.split(), "--dry-run"], cwd=pages.ROOT, capture_output=True, text=True, check=True
        )
        assert "tools/setup.sh" in planned.stdout


def test_the_number_of_commands_is_the_real_one() -> None:
    assert f"all {len(REGISTRY)} commands" in text_of("README.md")


# -- docs/tasks.md and docs/ecosystem.md -------------------------------------------------------------------------------


def test_the_page_about_tasks_is_a_program_that_does_what_it_says(folder: Path) -> None:
    (folder / "page.py").write_text("\n".join(pages.blocks("docs/tasks.md", "python")), encoding="utf-8")
    printed = pages.run([".venv/bin/python", "page.py"], folder).splitlines()
    assert printed[0] == "7: 2 items, wrapped"
    assert printed[1].startswith("completed 0 [")
    assert printed[2:] == [
        "{'a.png@64': 64, 'a.png@128': 128}",
        "charged 12 at attempt 3",
        "failed: amount must not be negative",
        "['amount must not be negative'] 1",
        "sizes: [1, 2]",
        "waiting True",
    ]


@pytest.mark.parametrize("words", ["FastAPI", "instrument", "JobFields"])
def test_the_blocks_about_other_packages_run(folder: Path, words: str) -> None:
    program = pages.block_with("docs/ecosystem.md", "python", words)
    assert pages.run([".venv/bin/python", "-c", program], folder) == ""


# -- pages for those who come from elsewhere ---------------------------------------------------------------------------

OWNERS = {
    "app": Headrace,
    "sync": SyncHeadrace,
    "queue": Queue,
    "dlq": Dlq,
    "job": Job,
    "ctx": JobContext,
    "send": Task,
    "Backoff": Backoff,
}


@pytest.mark.parametrize("name", ["celery", "rq", "bullmq"])
def test_what_a_migration_page_offers_exists(name: str) -> None:
    rows = re.findall(r"^\| (.+) \| (.+) \|$", text_of(f"docs/migrate-{name}.md"), re.MULTILINE)
    offered = [code for _, ours in rows for code in re.findall(r"`([^`]+)`", ours)]
    uses = {use for code in offered for use in re.findall(r"\b(\w+)\.(\w+)", code) if use[0] in OWNERS}
    app = Headrace("memory://")
    unknown = [use for use in uses if not hasattr(app if use[0] == "app" else OWNERS[use[0]], use[1])]
    assert len(uses) > 10
    assert not [use for use in unknown if use != ("ctx", "state")]
    help_text = pages.run([".venv/bin/headrace", "worker", "--help"], pages.ROOT)
    flags = {flag for code in offered for flag in re.findall(r"--[a-z][a-z-]+", code)}
    assert not [flag for flag in flags if flag not in help_text]


# -- docs/operations.md ------------------------------------------------------------------------------------------------

OPERATIONS = "docs/operations.md"


def serve_blocks() -> list[str]:
    return [block for block in pages.blocks(OPERATIONS, "sh") if "headrace serve" in block]


def test_every_way_to_start_a_server_works(folder: Path) -> None:
    pages.run_shell(pages.block_with(OPERATIONS, "sh", "openssl"), folder)
    plain, guarded, encrypted = serve_blocks()
    with pages.serving(plain, folder) as line, Client(pages.port_of(line)) as client:
        assert client.call("Ping")["ok"]
    with pages.serving(guarded, folder) as line, Client(pages.port_of(line)) as client:
        assert line.startswith("headrace listens on headrace://0.0.0.0:")
        assert client.call("Ping")["error"] == "Not authenticated"
        assert client.call("Auth", token="second-token")["ok"]
        assert client.call("Ping")["ok"]
    with pages.serving(encrypted, folder) as line:
        assert line.startswith("headrace listens on headraces://")
        certificate = ssl.get_server_certificate(("127.0.0.1", pages.port_of(line)))
        assert certificate.strip() == (folder / "cert.pem").read_text().strip()
        asked = pages.block_with(OPERATIONS, "sh", "SSL_CERT_FILE").replace("6789", str(pages.port_of(line)))
        assert pages.run_shell(asked, folder) == "healthy\n"
        astray = pages.run_shell(f"{asked.strip().replace('localhost', '127.0.0.1')} 2>&1 || true", folder)
        assert "the certificate is for another name" in astray


def test_a_backup_is_a_healthy_database(folder: Path) -> None:
    server = ServerProcess(folder / "headrace.db")
    with server, server.client() as client:
        for number in range(20):
            assert client.call("PUSH", queue="mail", data=number)["ok"]
        pages.run_shell(pages.block_with(OPERATIONS, "sh", "headrace backup headrace-copy.db"), folder)
        assert client.call("PUSH", queue="mail", data="after the copy")["ok"]
    assert examine(folder, "headrace-copy.db") == ["queue mail: 20 waiting", "healthy"]
    assert examine(folder, "headrace.db") == ["queue mail: 21 waiting", "healthy"]


def examine(folder: Path, path: str) -> list[str]:
    command = pages.block_with(OPERATIONS, "sh", "headrace doctor")
    lines = pages.run_shell(command.replace("headrace.db", path), folder).splitlines()
    return [line.strip().split(",")[0] for line in lines[1:]]


def test_the_server_can_be_watched_as_described(folder: Path, server: ServerProcess) -> None:
    (python,) = pages.blocks(OPERATIONS, "python")
    shown = pages.run([".venv/bin/python", "-c", python], folder, server.port)
    assert shown.startswith("{'diskFull': False, 'error': None, 'since': None}\n")
    assert "# TYPE " in shown


def test_alerts_speak_of_metrics_that_are_there(server: ServerProcess) -> None:
    named = set(re.findall(r"bunqueue_\w+", text_of(OPERATIONS).partition("Alerts worth having")[2]))
    with server.client() as client:
        client.ok("PUSH", queue="mail", data=1)
        scraped = client.ok("Prometheus")["data"]["metrics"]
    assert len(named) >= 6
    assert named <= set(re.findall(r"^bunqueue_\w+", scraped, re.M))


def test_the_systemd_unit_starts_a_server_and_gives_it_time_to_stop() -> None:
    (block,) = pages.blocks(OPERATIONS, "ini")
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "headrace"
    assert _parser(["serve"]).parse_args(arguments).data_path == "/var/lib/headrace/headrace.db"
    assert int(unit["Service"]["TimeoutStopSec"]) * 1000 > Settings().shutdown_timeout_ms


# -- all pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text_of(page))
    missing = [link for link in links if not (pages.ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def anchors_of(page: Path) -> set[str]:
    """Where links into a page may lead: its headings as GitHub names them, and anchors that it sets itself."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES)
def test_links_into_a_page_lead_to_a_place_in_it(page: str) -> None:
    here = pages.ROOT / page
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text_of(page))
    missing = [(to, anchor) for to, anchor in links if anchor not in anchors_of(here.parent / to if to else here)]
    assert not missing


@pytest.mark.parametrize(("page", "least"), [("docs/architecture.md", 70), ("CONTRIBUTING.md", 2)])
def test_files_classes_and_functions_that_are_named_exist(page: str, least: int) -> None:
    """Names in code font: a file, Class.member, or a function. Somebody renames them some day."""
    text = text_of(page)
    # A table row may go on with bare names from the folder of the first one.
    named_files = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", text)}
    files = [path for folder in ("src/**", "tests", "tests/*", "tools") for path in pages.ROOT.glob(f"{folder}/*.py")]
    assert named_files <= {path.name for path in files}
    members, defined = _definitions()
    named = re.findall(r"`([A-Z]\w+)\.(?!md`)(\w+)`", text)
    assert len(named) >= least
    assert [f"{owner}.{name}" for owner, name in named if name not in members.get(owner, ())] == []
    functions = set(re.findall(r"`(_?[a-z]+_\w+|_[A-Z_]+|[A-Z]+_[A-Z_]+)(?:\(.*?\))?`", text))
    assert functions - defined <= NO_FUNCTIONS


NO_FUNCTIONS = {"tmp_path", "HEADRACE_TEST_WORKERS", "test_a_stalled_job_goes_to_the_next_worker"}


@functools.cache
def _definitions() -> tuple[dict[str, set[str]], set[str]]:
    """What each class has, with what it inherits, and every name that is defined anywhere."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (pages.ROOT / "src").rglob("*.py")]
    classes = defaultdict(list)
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        classes[node.name].append(node)

    def inherited(name: str) -> set[str]:
        bases = {
            ast.unparse(base).partition("[")[0].rpartition(".")[2] for node in classes[name] for base in node.bases
        }
        own = set().union(*map(_names_in, classes[name]))
        return own.union(*(inherited(base) for base in bases & classes.keys() - {name}))

    return {name: inherited(name) for name in classes}, set().union(*map(_names_in, trees))


def _names_in(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


@pytest.mark.parametrize("package", ["headrace", "headrace.events", "headrace.workflows", "headrace.workflows.testing"])
def test_every_public_name_says_what_it_is_for(package: str) -> None:
    module = importlib.import_module(package)
    named = {name: getattr(module, name) for name in module.__all__}
    documented = {
        name for name, value in named.items() if not callable(value) or vars(value).get("__doc__", value.__doc__)
    }
    assert set(named) - documented == set()
    reference = text_of("docs/reference.md")
    assert [name for name in named if not name.startswith("__") and f"### {name}\n" not in reference] == []


OUR_OWN = {
    "carry_out", "definition_of", "look", "wait_change", "wait_end",  # of Workflows, for its handles
    "envelope", "filter", "plan", "provider", "wire",
}  # fmt: skip


def test_the_reference_tells_of_every_method_that_programs_call() -> None:
    """The reference leaves out what says nothing of itself."""
    silent = set()
    for kind in (getattr(headrace, name) for name in headrace.__all__):
        for name in dir(kind) if isinstance(kind, type) else ():
            member = inspect.getattr_static(kind, name)
            member = getattr(member, "__wrapped__", getattr(member, "__func__", member))
            home = str(getattr(getattr(member, "fget", member), "__module__", ""))
            if name[0] != "_" and home.startswith("headrace") and not member.__doc__:
                silent.add(name)
    assert silent <= OUR_OWN
    assert "| `progress(percent, message=None)` |" in text_of("docs/reference.md")


def test_every_module_has_its_place_in_the_reading_order() -> None:
    text = text_of("docs/architecture.md").partition("## Files in reading order")[2].partition("\n## ")[0]
    package = pages.ROOT / "src/headrace"
    modules = [path.relative_to(package) for path in package.rglob("*.py") if not path.name.startswith("__")]
    folders = ("cli/", "commands/")  # told as a whole: "the other modules of the package"
    untold = [str(path) for path in modules if path.name not in text and not str(path).startswith(folders)]
    assert not untold
