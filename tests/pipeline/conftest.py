"""One Spark session for all tests of the pipeline, and a real history that they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.history import tell_story
from tests.scale import scaled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Two cores; a task may be tried three times (local[2] alone would not try again)."""
    from headrace.pipeline.session import start_session

    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        "spark.sql.adaptive.enabled": "false",  # with a handful of rows, planning anew costs more than it saves
    }
    session = start_session("tests", master="local[2,3]", settings=settings)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture folder of an eventful day."""
    return tell_story(tmp_path_factory.mktemp("story"), steps=scaled(3_000, 30_000), seed=11)
