"""A fleet under attack: brokers, workers and Valkey itself are killed while jobs are pushed and worked on.

A worker works no longer than its lease lasts, so a job is acknowledged twice only if a lease was not respected.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.scale import scaled
from tests.serverprocess import ServerProcess
from tests.valkeyserver import ValkeyServer
from tests.wireclient import Client

JOBS = scaled(1500, 20_000)
LEASE_MS = 4_000


class Chaos:
    def __init__(self, folder: Path) -> None:
        self._random = random.Random(11)
        self._valkey = ValkeyServer(folder / "store", "--appendonly", "yes", "--appendfsync", "always")
        self._brokers: list[ServerProcess] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.pushed: set[str] = set()
        self.acknowledged: Counter[str] = Counter()
        self._clients: list[Client] = []

    def __enter__(self) -> Chaos:
        self._valkey.start()
        self._brokers = [ServerProcess(":memory:", "--backend", self._valkey.url).start() for _ in range(3)]
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for broker in self._brokers:
            broker.kill()
        self._valkey.stop()

    # -- the run -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        threads = [threading.Thread(target=self._push, args=(n,)) for n in range(2)]
        threads += [threading.Thread(target=self._work) for _ in range(6)]
        for thread in threads:
            thread.start()
        self._attack()
        deadline = time.monotonic() + scaled(90, 400)
        while self.missing() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._ended.set()
        for thread in threads:
            thread.join(20)

    def _attack(self) -> None:
        for round_number in range(scaled(4, 20)):
            time.sleep(self._random.uniform(0.3, 0.8))
            broker = self._random.choice(self._brokers)
            broker.kill()
            with self._lock:
                client = self._random.choice(self._clients) if self._clients else None
            if client is not None:
                client.socket.close()
            if round_number == 1:
                self._valkey.kill()
                self._valkey.start()
            broker.start()

    def missing(self) -> list[str]:
        """Pushes that were acknowledged and are not among the completed jobs of the store."""
        completed = set(self._valkey.client().zrange("glide:{chaos}:completed", 0, -1))
        with self._lock:
            return sorted(self.pushed - completed)

    def done_twice(self) -> list[str]:
        with self._lock:
            return sorted(job_id for job_id, count in self.acknowledged.items() if count > 1)

    # -- clients -----------------------------------------------------------------------------------------------

    def _connect(self) -> Client | None:
        try:
            client = Client(self._random.choice(self._brokers).port, timeout=8)
        except OSError:
            time.sleep(0.05)
            return None
        with self._lock:
            self._clients.append(client)
        return client

    def _drop(self, client: Client) -> None:
        with self._lock:
            self._clients.remove(client)
        client.socket.close()

    def _push(self, number: int) -> None:
        left = JOBS // 2
        while left > 0 and not self._ended.is_set():
            client = self._connect()
            if client is None:
                continue
            try:
                while left > 0:
                    count = min(10, left)
                    jobs = [{"data": {"by": number}} for _ in range(count)]
                    reply = client.call("PUSHB", queue="chaos", jobs=jobs)
                    if not reply.get("ok"):
                        break
                    with self._lock:
                        self.pushed.update(reply["ids"])
                    left -= count
            except OSError:
                pass
            finally:
                self._drop(client)

    def _work(self) -> None:
        while not self._ended.is_set():
            client = self._connect()
            if client is None:
                continue
            try:
                while not self._ended.is_set():
                    self._work_once(client)
            except OSError:
                pass
            finally:
                self._drop(client)

    def _work_once(self, client: Client) -> None:
        fields: dict[str, Any] = {"count": 5, "owner": "w", "lockTtl": LEASE_MS, "timeout": 300}
        reply = client.call("PULLB", queue="chaos", **fields)
        for job, token in zip(reply.get("jobs", []), reply.get("tokens", []), strict=True):
            answer = client.call("ACK", id=job["id"], token=token)
            if answer.get("ok"):
                with self._lock:
                    self.acknowledged[job["id"]] += 1
