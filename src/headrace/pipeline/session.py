"""A Spark session configured for the pipeline, and clear errors where this machine cannot have one."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEAST_JAVA: Final = 17
FEW_EVENTS: Final = 200_000
"""Of so many events a run takes less time than Java would take to make its code fast."""
QUICK_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC"
"""For Java that lives for seconds: compile little, collect simply. The cache for compiled code has its usual size; with
the first option alone it has a fifth of it, which Spark fills, and then Java throws code away and compiles it again."""
QUICK_SPARK: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
"""Of a handful of rows, planning anew and compiling cost more than they save. So does telling Java for every column
which line of Python made it, for the text of an error: commands show one line of it."""
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")


class SparkMissing(HeadraceError):
    """Spark, or what it needs, is not installed."""


def check_java() -> None:
    """SparkMissing, with what to do, when there is no Java that Spark runs on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = f"Spark needs Java {LEAST_JAVA} or newer: install openjdk-17-jre-headless, or set JAVA_HOME"
    if java is None or not Path(java).exists():
        raise SparkMissing(f"{advice}. No Java was found" + (f" at {java}." if java else "."))
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', output)
    if found is None or int(found[1]) < LEAST_JAVA:
        raise SparkMissing(f"{advice}. {java} says: {output.splitlines()[0] if output else 'nothing'}")


def check_spark() -> None:
    try:
        import pyspark  # noqa: F401
    except ImportError:
        raise SparkMissing('PySpark is not installed: pip install "headrace[spark]"') from None
    check_java()


def start_session(
    name: str = "headrace",
    *,
    master: str | None = None,
    settings: dict[str, str] | None = None,
    is_quick: bool = False,
) -> SparkSession:
    """A session with UTC times, the data source registered, and no page or progress bar of its own.

    `is_quick` is for few rows (FEW_EVENTS) on this machine: it starts sooner, and is slower with many.
    """
    check_spark()
    from pyspark.sql import SparkSession

    from headrace.pipeline import register

    # Without it the data source is looked for, and run, in whatever `python3` means on this machine.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if _is_local(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(master or os.environ.get("SPARK_MASTER", "local[*]"))
    for key, value in {**_settings(master, is_quick), **(settings or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    # It prints the whole Java stack of an error that is raised to us anyway.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    register(spark)
    return spark


def _is_local(master: str | None) -> bool:
    return (master or os.environ.get("SPARK_MASTER", "local")).startswith("local")


def _settings(master: str | None, is_quick: bool) -> dict[str, str]:
    is_quick = is_quick and _is_local(master)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # As Spark writes them by itself (INT96), others than Spark take times for local ones.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.sources.partitionOverwriteMode": "static",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # A run makes more classes than the hundred that Spark keeps: each run would compile all of them again, which
        # is a third of its time.
        "spark.sql.codegen.cache.maxEntries": "2000",
        # Java never compiles a longer method: it would run several times slower than the same steps one by one.
        "spark.sql.codegen.hugeMethodLimit": "8000",
    }
    if "SPARK_CONF_DIR" not in os.environ:
        # The default ones: whoever gives extraJavaOptions keeps this.
        logging_options = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"
        settings["spark.driver.defaultJavaOptions"] = f"{logging_options} {QUICK_JAVA}" if is_quick else logging_options
    if _is_local(master):
        settings |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 1)),
        }
    return settings | QUICK_SPARK if is_quick else settings
