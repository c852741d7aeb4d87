"""From the event log to bronze: the same events, with columns that make them easier to query. Pure."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from headrace.model import EVENT_WORDS
from headrace.pipeline.schemas import BRONZE, conform

SCHEMA_VERSION: Final = 1
_ERROR_TYPE: Final = r"^\s*(?:Uncaught\s+)?([A-Za-z_][\w.]*(?:Error|Exception|Timeout|Warning|Interrupt))\b"


def bronze_of(events: DataFrame) -> DataFrame:
    codes = f.create_map(*(f.lit(part) for name, word in EVENT_WORDS.items() for part in (word, int(name))))
    error_type = f.regexp_extract("error", _ERROR_TYPE, 1)
    return conform(
        events.select(
            "*",
            codes[f.col("event")].alias("event_code"),
            f.when(error_type != "", error_type).alias("error_type"),
            f.lit(SCHEMA_VERSION).alias("schema_version"),
            f.to_date("ts").alias("event_date"),
        ),
        BRONZE,
    )
