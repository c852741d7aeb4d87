#!/usr/bin/env python3
"""Measure Headrace beside beanstalkd, a job queue in C with nothing but the essentials (part `anchor` of `make bench`).

    bench/anchor.py            three alternating rounds; writes its table into docs/benchmarks.md
    bench/anchor.py --quick    one round, small numbers, prints only

Both are asked the same thing in the same way: eight connections, each sends sixteen requests in one write and waits for
the sixteen replies. beanstalkd keeps its binlog and Headrace its file, both with their default settings. What counts is
the CPU of the server, so it does not matter that this client is written in Python. Needs beanstalkd, which
`make bench` fetches.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil

import report
from measure import say
from servers import HOST, BenchmarkFailed, Contender, RunningServer, headrace
from tasks import Figure, medians, wait_for_port

BLOCK = "anchor"
CONNECTIONS = 8
IN_FLIGHT = 16
PAYLOAD = b"x" * 100
LIMIT = 1.5
"""How much more CPU than beanstalkd's is allowed."""
REPLY_LIMIT_S = 10.0
SETTLE_S = 0.25


class Connection:
    """Sixteen requests out, sixteen replies in."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), REPLY_LIMIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self.stream.close()
        self._socket.close()


class Beanstalkd:
    """Its protocol: lines of text, bodies behind them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: list[bytes] = []

    def send_puts(self) -> None:
        self._connection.send(b"put 0 0 60 %d\r\n%s\r\n" % (len(PAYLOAD), PAYLOAD) * IN_FLIGHT)

    def read_puts(self) -> None:
        self._expect(b"INSERTED")

    def send_takes(self) -> None:
        self._connection.send(b"reserve-with-timeout 0\r\n" * IN_FLIGHT)

    def read_takes(self) -> None:
        stream = self._connection.stream
        self._ids = []
        for _ in range(IN_FLIGHT):
            word, job_id, size = stream.readline().split()
            if word != b"RESERVED" or len(stream.read(int(size) + 2)) != int(size) + 2:
                raise BenchmarkFailed(f"beanstalkd answered {word!r}")
            self._ids.append(job_id)

    def send_ends(self) -> None:
        self._connection.send(b"".join(b"delete %s\r\n" % job_id for job_id in self._ids))

    def read_ends(self) -> None:
        self._expect(b"DELETED")

    def _expect(self, word: bytes) -> None:
        for _ in range(IN_FLIGHT):
            line = self._connection.stream.readline()
            if not line.startswith(word):
                raise BenchmarkFailed(f"beanstalkd answered {line!r}, not {word!r}")


class Headrace:
    """Ours: frames of MessagePack."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._ids: list[str] = []

    def send_puts(self) -> None:
        self._send({"cmd": "PUSH", "queue": "anchor", "data": PAYLOAD.decode()})

    def read_puts(self) -> None:
        self._replies()

    def send_takes(self) -> None:
        self._send({"cmd": "PULL", "queue": "anchor"})

    def read_takes(self) -> None:
        self._ids = [reply["job"]["id"] for reply in self._replies()]

    def send_ends(self) -> None:
        self._connection.send(b"".join(_frame({"cmd": "ACK", "id": job_id}) for job_id in self._ids))

    def read_ends(self) -> None:
        self._replies()

    def _send(self, request: dict[str, object]) -> None:
        self._connection.send(_frame(request) * IN_FLIGHT)

    def _replies(self) -> list[dict[str, dict[str, str]]]:
        stream = self._connection.stream
        replies = [msgspec.msgpack.decode(stream.read(int.from_bytes(stream.read(4), "big"))) for _ in range(IN_FLIGHT)]
        if not all(reply["ok"] for reply in replies):
            raise BenchmarkFailed(f"headrace answered {replies[0]}")
        return replies


def _frame(request: dict[str, object]) -> bytes:
    body = msgspec.msgpack.encode({**request, "reqId": "1"})
    return len(body).to_bytes(4, "big") + body


Dialect = Beanstalkd | Headrace


def put(talkers: list[Dialect]) -> None:
    for talker in talkers:
        talker.send_puts()
    for talker in talkers:
        talker.read_puts()


def take(talkers: list[Dialect]) -> None:
    for talker in talkers:
        talker.send_takes()
    for talker in talkers:
        talker.read_takes()
        talker.send_ends()
    for talker in talkers:
        talker.read_ends()


WORKLOADS: dict[str, Callable[[list[Dialect]], None]] = {"put / PUSH": put, "reserve + delete / PULL + ACK": take}


def measure(server: RunningServer, dialect: Callable[[Connection], Dialect], jobs: int) -> dict[str, Figure]:
    """What each workload costs the server per job."""
    connections = [Connection(server.port) for _ in range(CONNECTIONS)]
    talkers = [dialect(connection) for connection in connections]
    try:
        return {title: _run(server, workload, talkers, jobs) for title, workload in WORKLOADS.items()}
    finally:
        for connection in connections:
            connection.close()


def _run(server: RunningServer, workload: Callable[[list[Dialect]], None], talkers: list[Dialect], jobs: int) -> Figure:
    process = psutil.Process(server.pid)
    rounds = jobs // (CONNECTIONS * IN_FLIGHT)
    cpu, began = sum(process.cpu_times()[:2]), time.monotonic()
    for _ in range(rounds):
        workload(talkers)
    elapsed = time.monotonic() - began
    time.sleep(SETTLE_S)  # deferred writes are paid for
    done = rounds * CONNECTIONS * IN_FLIGHT
    return Figure((sum(process.cpu_times()[:2]) - cpu) / done * 1e6, done / elapsed)


def beanstalkd() -> Contender:
    binary = shutil.which("beanstalkd")
    if binary is None:
        raise BenchmarkFailed("beanstalkd is not installed: run 'tools/setup.sh bench'")
    version = subprocess.run([binary, "-v"], capture_output=True, text=True, check=True).stdout.split()[1]

    def command(tcp_port: int, http_port: int, data_file: Path | None) -> list[str]:
        assert data_file is not None
        return [binary, "-l", HOST, "-p", str(tcp_port), "-b", str(data_file.parent)]

    return Contender("beanstalkd", version, command)


DIALECTS: dict[str, Callable[[Connection], Dialect]] = {"beanstalkd": Beanstalkd, "headrace": Headrace}


def compare(contenders: list[Contender], rounds: int, jobs: int) -> dict[tuple[str, str], list[Figure]]:
    figures: dict[tuple[str, str], list[Figure]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = []
        for contender in contenders:
            server = RunningServer(contender, Path(folder) / contender.name, on_disk=True)
            stack.callback(server.stop)
            server.start()
            wait_for_port(server.port)
            measure(server, DIALECTS[contender.name], jobs // 5)
            servers.append(server)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for server in servers if number % 2 == 0 else servers[::-1]:
                name = server.contender.name
                for title, figure in measure(server, DIALECTS[name], jobs).items():
                    figures.setdefault((name, title), []).append(figure)
    return figures


def table(figures: dict[tuple[str, str], list[Figure]]) -> str:
    rows = [
        ["", "beanstalkd CPU-us", "headrace CPU-us", "to beanstalkd", "wanted", "beanstalkd jobs/s", "headrace jobs/s"]
    ]
    for title in WORKLOADS:
        theirs, ours = (Figure(*medians(figures[name, title])) for name in DIALECTS)
        ratio = ours.cpu_us / theirs.cpu_us
        mark = f" {report.MISSED}" if ratio > LIMIT else ""
        row = [f"{theirs.cpu_us:.1f}", f"{ours.cpu_us:.1f}", f"{ratio:.2f}x{mark}", f"≤ {LIMIT:g}x"]
        rows.append([title, *row, f"{theirs.per_s:,.0f}", f"{ours.per_s:,.0f}"])
    return report.render(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=50_000, help="jobs per round and workload")
    parser.add_argument("--quick", action="store_true", help="one round with small numbers; prints only")
    parser.add_argument("--no-write", action="store_true", help="print the table, leave the page alone")
    args = parser.parse_args()
    rounds, jobs = (1, 10_000) if args.quick else (args.rounds, args.jobs)
    contenders = [beanstalkd(), headrace()]
    method = (
        f"{CONNECTIONS} connections, {IN_FLIGHT} requests in flight on each. Medians of {rounds} alternating rounds."
    )
    text = report.provenance(contenders, method, Path(tempfile.gettempdir())) + table(compare(contenders, rounds, jobs))
    if not (args.quick or args.no_write):
        report.write_block(BLOCK, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
