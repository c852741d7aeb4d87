"""The wheel as users get it: in an environment that holds nothing but what it asks for."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.examples import pages

NAMED = {"msgspec", "apsw", "cronsim", "zstandard", "httptools", "wsproto", "uvloop", "tzdata", "rich"}
"""What `pip install headrace` may bring, besides what these need themselves."""
CLOSURE = NAMED | {"h11", "markdown-it-py", "mdurl", "pygments"}


def test_the_lock_pins_everything_that_development_needs_within_what_the_project_allows() -> None:
    lock = (pages.ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
    pinned = dict(line.split("==") for line in lock.splitlines() if not line.startswith("#"))
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [text for texts in project["optional-dependencies"].values() for text in texts]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras) if not text.startswith("headrace[")]
    assert [str(one) for one in wanted if not one.specifier.contains(pinned[canonicalize_name(one.name)])] == []
    assert "://" not in lock


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(pages.ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(pages.ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True, timeout=60)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel and the distributions it names, copied from where the tests run."""
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=False)
    interpreter = folder / "bin/python"
    command = [sys.executable, "-m", "pip", "--python", interpreter, "install", "-qq", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True, timeout=60)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in CLOSURE:
        copy_distribution(name, packages)
    return interpreter


def copy_distribution(name: str, packages: Path) -> None:
    for file in importlib.metadata.files(name) or ():
        if not file.parts[0].startswith(".."):
            (packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), packages / file)


def run(python: Path, program: str, folder: Path) -> str:
    done = subprocess.run([python, "-I", "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def requirements(distribution: str) -> set[str]:
    """Names that are required whatever extras are asked for."""
    found = importlib.metadata.requires(distribution) or []
    return {re.split(r"[^\w-]", need)[0].lower() for need in found if "extra ==" not in need}


def test_it_asks_for_the_named_distributions_and_no_others(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (metadata,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        lines = files.read(metadata).decode().splitlines()
    needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    assert {re.split(r"[^\w-]", need)[0] for need in needs if "extra ==" not in need} == NAMED
    assert set().union(*map(requirements, CLOSURE)) <= CLOSURE


def test_it_has_all_files_that_are_no_modules(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        packed = set(files.namelist())
    there = [
        path for path in (pages.ROOT / "src/headrace").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    missing = [path for path in there if str(path.relative_to(pages.ROOT / "src")) not in packed]
    assert not missing
    assert "headrace/py.typed" in packed


def test_the_first_program_of_the_readme_runs_in_it(python: Path, tmp_path: Path) -> None:
    program = pages.block_with("README.md", "python", "asyncio.run")
    assert run(python, program, tmp_path) == "sent to ada@example.com\n"


OPTIONAL = {"opentelemetry", "pytest", "pyspark", "pandas", "pyarrow", "valkey", "libvalkey"}
"""What modules that are made for another package may miss: the extras, and pytest."""


def test_row_24_every_other_module_can_be_imported_without_extras(python: Path, tmp_path: Path) -> None:
    program = """
import importlib, pkgutil, headrace
for module in pkgutil.walk_packages(headrace.__path__, "headrace.", onerror=lambda name: None):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
            print("imported")
        except ModuleNotFoundError as error:
            print(error.name)
"""
    outcomes = run(python, program, tmp_path).splitlines()
    assert outcomes.count("imported") > 80
    assert {name.split(".")[0] for name in outcomes} - {"imported"} <= OPTIONAL


def test_who_misses_the_tracing_extra_reads_how_to_install_it(python: Path, tmp_path: Path) -> None:
    program = """
try:
    import headrace.contrib.otel
except ImportError as error:
    print(error)
"""
    assert run(python, program, tmp_path) == 'OpenTelemetry is not installed: pip install "headrace[otel]"\n'


COSTS = """
from time import process_time
started = process_time()
import asyncio, msgspec
beneath = process_time()
import headrace
package = process_time()
from headrace import Headrace
print(beneath - started, package - beneath, process_time() - package)
"""


@pytest.mark.alone
def test_importing_it_costs_at_most_30_ms_more_than_what_it_stands_on(python: Path, tmp_path: Path) -> None:
    run(python, COSTS, tmp_path)  # writes the bytecode
    runs = [[float(cost) for cost in run(python, COSTS, tmp_path).split()] for _ in range(5)]
    beneath, package, app = (statistics.median(costs) for costs in zip(*runs, strict=True))
    assert package < 0.030
    # The whole library, measured in what asyncio and msgspec cost on the same machine in the same moment.
    assert app < 5 * beneath
