"""Fixtures that every part of the suite shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.scale import IS_FULL
from tests.serverprocess import ServerProcess
from tests.wireclient import Client

# Tests that share something that takes seconds of CPU to start, so one worker runs them all: a Spark session, which is
# also quicker at what it has done before, and Chromium. The other tests of the pipeline need neither.
SHARING = (
    tuple(
        f"tests/pipeline/test_{name}.py"
        for name in (
            "cluster", "redrive", "source", "two_lakes", "commands", "second_opinion", "silver", "odd_lakes", "gold",
        )
    ),
    ("tests/browser/",),
)  # fmt: skip
# What takes longest begins first, or one worker would still be at it when the others have nothing left to do.
LONGEST = (
    "tests/pipeline/",
    "tests/examples/test_demo.py",
    "tests/conformance/test_machine.py",
    "tests/http/test_webhooks.py",
    "tests/worker/test_faults.py",
    "tests/workflows/test_contract.py",
    "tests/workflows/test_distributed.py",
    "tests/interop/test_bun_client.py",
    "tests/browser/",
)

ALONE = "pytest.mark.alone"

_took_their_worker_down: list[str] = []

# Property tests: the same examples on every machine, however slow it is; at full scale others each time.
settings.register_profile(
    "suite",
    deadline=None,
    database=None,
    derandomize=not IS_FULL,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("suite")


class Scheduling(LoadFileScheduling):
    """A worker takes a file at a time, because the tests of a file share a server, or a group of SHARING."""

    def _split_scope(self, nodeid: str) -> str:
        group = next((group for group in SHARING if nodeid.startswith(group)), None)
        return group[0] if group else super()._split_scope(nodeid)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which a phase runs nothing is not even collected: that takes time, and schemathesis seconds."""
    if not collection_path.match("test_*.py"):
        return None
    match config.option.markexpr:
        case "alone":
            return ALONE not in collection_path.read_text() or None
        case "not alone":
            return f"\npytestmark = {ALONE}" in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _refuse_namesakes(items)
    _refuse_hidden(items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def _refuse_hidden(items: list[pytest.Item]) -> None:
    """An `alone` test of whose file nobody would think: neither phase would run it."""
    files = {item.path for item in items if item.get_closest_marker("alone")}
    hidden = [path.name for path in files if ALONE not in path.read_text()]
    if hidden:
        raise pytest.UsageError(f"mark tests with @{ALONE} in their own file: {', '.join(hidden)}")


def _refuse_namesakes(items: list[pytest.Item]) -> None:
    """Of tests with one id a worker runs one only, and a second try forgets one that failed when another passed."""
    names = Counter(item.nodeid for item in items)
    namesakes = [name for name, count in names.items() if count > 1]
    if namesakes:
        raise pytest.UsageError(f"several tests have the same id: {', '.join(namesakes)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str) -> None:
    _took_their_worker_down.append(crashitem)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that ends its process was not merely too slow: tools/test.sh gives no second try then."""
    if _took_their_worker_down:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server on a real file for a whole test module; tests use queues of their own."""
    with ServerProcess(Path(tmp_path_factory.mktemp("server")) / "headrace.db") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with server.client() as connected:
        yield connected


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """A queue name that no other test uses."""
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in request.node.name)
    return f"{request.module.__name__.rsplit('.', 1)[-1]}.{name}"[:200]
