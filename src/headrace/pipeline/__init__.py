"""The data pipeline: job history as tables, and DataFrames in and out of queues (Spark).

    events ─ingest→ bronze ─silver→ jobs and attempts ─gold→ facts per minute, hour and day ─→ report

Reading order: `schemas` (every table), `silver` and `gold` (pure transforms), `lake` (folders and what is committed),
`runs` (the jobs that the command line starts), then `source` and its neighbours (Spark's data source `headrace`).

Rules. Importing this package imports no Spark. Transforms take and return DataFrames and know neither paths nor clocks.
Whatever a run writes becomes visible by a rename, and a repeated run writes it again in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("headrace")` and its three siblings known to a session.

    Filters on the queue or the state of jobs are then pushed down to the server, which Spark does only if that is
    enabled.
    """
    from headrace.pipeline.source import HeadraceSource

    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(HeadraceSource)
