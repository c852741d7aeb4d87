"""A Spark cluster on this machine: one master and two workers, each a process of its own, and commands on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyspark

from headrace.pipeline.session import QUICK_JAVA, QUICK_SPARK
from tests.ports import free_port
from tests.scale import IS_FULL, scaled
from tests.waiting import eventually

LIMIT_S = scaled(150, 600)


class Cluster:
    """`with Cluster(folder) as cluster`: `cluster.run("ingest", ...)` runs `headrace pipeline` on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    def _start(self, name: str, *command: str) -> None:
        spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "256m"}
        environment["JDK_JAVA_OPTIONS"] = QUICK_JAVA
        log = (self._folder / f"{name}.log").open("wb")
        arguments = [str(spark_class), *command, "--host", "127.0.0.1", "--webui-port", str(free_port())]
        self._processes.append(
            subprocess.Popen(arguments, stdout=log, stderr=log, env=environment, start_new_session=True)
        )

    def __enter__(self) -> Cluster:
        self._start("master", "org.apache.spark.deploy.master.Master", "--port", str(self._port))
        for n in (1, 2):
            worker = ("org.apache.spark.deploy.worker.Worker", self.master, "-c", "1", "-m", "700m")
            self._start(f"worker-{n}", *worker, "-d", str(self._folder / f"work-{n}"))
        eventually(self._is_complete, LIMIT_S)
        return self

    def _is_complete(self) -> bool:
        log = self._log("master")
        assert all(process.poll() is None for process in self._processes), log + self._log("worker-1")
        return log.count("Registering worker") == 2

    def _log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            kill_all(process)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Begin `headrace pipeline ...`; its output goes to a file."""
        command = [sys.executable, "-m", "headrace", "pipeline", *arguments, "--master", self.master]
        settings = {
            "spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1", "spark.sql.shuffle.partitions": "2",
            "spark.cores.max": "2",
        }  # fmt: skip
        for key, value in (settings if IS_FULL else settings | QUICK_SPARK).items():
            command += ["--conf", f"{key}={value}"]
        log = (self._folder / "driver.log").open("ab")
        environment = {**os.environ, "JDK_JAVA_OPTIONS": QUICK_JAVA}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def run(self, *arguments: str) -> None:
        process = self.start(*arguments)
        try:
            assert process.wait(LIMIT_S) == 0, self._log("driver")[-4000:]
        finally:
            kill_all(process)

    def workers_used(self) -> int:
        """How many of the workers have started an executor."""
        return sum("Asked to launch executor" in self._log(f"worker-{n}") for n in (1, 2))


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the process and what it started: the driver's Java goes with its Python."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait(30)
