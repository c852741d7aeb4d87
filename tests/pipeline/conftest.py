"""One Spark session for all tests of the pipeline, and a real history that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.pipeline.lake import Lake
from tests.pipeline.history import Story, rig_at, seal
from tests.scale import IS_FULL, scaled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.pipeline.runs import FactsSummary


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """At full scale a fixture may take minutes. A test that is cut off while it talks to Java leaves the answer behind
    for the next one, and then every test of this session fails."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(scaled(300, 1800)))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores; a task may be tried three times (local[2] alone would not try again). At full scale with the settings
    for many rows, else with those for few."""
    from headrace.pipeline.session import start_session

    settings = {
        "spark.driver.memory": f"{scaled(1, 3)}g",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    session = start_session("tests", master="local[2,3]", settings=settings, is_quick=not IS_FULL)
    yield session
    session.stop()


@dataclass
class Chronicle:
    """A captured history, the lake that was made of it in two runs, and what those runs said."""

    log: Path
    lake: Lake
    runs: list[FactsSummary]


@pytest.fixture(scope="session")
def chronicle(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Chronicle:
    from headrace.pipeline import runs

    folder = tmp_path_factory.mktemp("chronicle")
    lake = Lake(folder / "lake")
    rig = rig_at(folder)
    story = Story(rig, seed=11)
    source = {"path": str(folder / "log"), "maxEventsPerTrigger": "1500"}
    said = []
    for _ in range(2):
        story.go(scaled(1_500, 15_000))
        seal(rig)
        runs.ingest(spark, lake, source)
        said.append(runs.derive(spark, lake, sla_ms={"mail": 2_000, "*": 60_000}))
    rig.close()
    return Chronicle(folder / "log", lake, said)
