"""Streams of commands from several connections at once, and a ledger of what the server promised about them.

Each producer and worker is a thread with its own connection that pipelines until the server dies. The ledger knows
three things about every numbered job: what was asked, what was acknowledged, and who holds it. A contradiction (a job
handed out twice, or after its completion was acknowledged) is noted when it is seen.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.serverprocess import ServerProcess
from tests.wireclient import Client

_STAY_AWAY = {"type": "fixed", "delay": 600_000}
"""A failed job must not come back while the test looks at it."""


class Ledger:
    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.asked: set[int] = set()
        self.ids: dict[int, str] = {}
        self.completing: set[int] = set()
        self.completed: set[int] = set()
        self.failing: set[int] = set()
        self.failed: dict[int, bool] = {}
        self.held: dict[int, str] = {}
        self.contradictions: list[str] = []
        self.acknowledged = 0

    def number(self) -> int:
        number = next(self._numbers)
        self.asked.add(number)
        return number

    def job(self, number: int) -> dict[str, Any]:
        return {"data": {"n": number}, "maxAttempts": 5, "backoff": _STAY_AWAY}

    def take(self, jobs: list[dict[str, Any]], worker: str) -> None:
        for job in jobs:
            number = job["data"]["n"]
            if number in self.held:
                self.contradictions.append(f"job {number} went to {worker} while {self.held[number]} held it")
            if number in self.completed:
                self.contradictions.append(f"job {number} went to {worker} after its completion was acknowledged")
            if number in self.failed:
                self.contradictions.append(f"job {number} went to {worker} in its backoff")
            self.held[number] = worker

    def note(self, reply: dict[str, Any], what: str) -> None:
        if reply.get("ok") is not True:
            self.contradictions.append(f"{what} was refused: {reply}")
        self.acknowledged += 1


class Traffic:
    """All streams against one queue until the server is killed."""

    def __init__(self, server: ServerProcess, ledger: Ledger, queue: str) -> None:
        self._server = server
        self._ledger = ledger
        self._queue = queue
        streams: list[Callable[[Client], None]] = [
            self._push_singly,
            self._push_singly,
            self._push_in_batches,
            self._complete_singly,
            self._complete_in_batches,
            self._fail,
        ]
        self._threads = [threading.Thread(target=self._run, args=(stream,)) for stream in streams]

    def until_killed(self, operations: int) -> None:
        """Let everything run until so many more operations were acknowledged, then kill -9 in the midst of it."""
        goal = self._ledger.acknowledged + operations
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + 60
        while self._ledger.acknowledged < goal and time.monotonic() < deadline:
            time.sleep(0.001)
        self._server.kill()
        for thread in self._threads:
            thread.join(timeout=20)
        assert self._ledger.acknowledged >= goal, "the streams came to a halt"

    def _run(self, stream: Callable[[Client], None]) -> None:
        try:
            with self._server.client() as client:
                while True:
                    stream(client)
        except ConnectionError:
            return  # the server is dead: that is the end of every stream

    def _push_singly(self, client: Client) -> None:
        numbers = [self._ledger.number() for _ in range(16)]
        for number in numbers:
            client.send("PUSH", queue=self._queue, **self._ledger.job(number))
        for number in numbers:
            reply = client.recv()
            self._ledger.ids[number] = reply["id"]
            self._ledger.note(reply, "PUSH")

    def _push_in_batches(self, client: Client) -> None:
        batches = [[self._ledger.number() for _ in range(10)] for _ in range(3)]
        for numbers in batches:
            client.send("PUSHB", queue=self._queue, jobs=[self._ledger.job(number) for number in numbers])
        for numbers in batches:
            reply = client.recv()
            self._ledger.ids.update(zip(numbers, reply["ids"], strict=True))
            self._ledger.note(reply, "PUSHB")

    def _pull(self, client: Client, count: int, owner: str) -> list[tuple[int, str, str]]:
        reply = client.ok("PULLB", queue=self._queue, count=count, owner=owner, timeout=50)
        self._ledger.take(reply["jobs"], owner)
        return [(job["data"]["n"], job["id"], token) for job, token in zip(reply["jobs"], reply["tokens"], strict=True)]

    def _complete_singly(self, client: Client) -> None:
        pulled = self._pull(client, 40, "single")
        for number, job_id, token in pulled:
            self._ledger.completing.add(number)
            client.send("ACK", id=job_id, token=token, result={"n": number})
        for number, _, _ in pulled:
            self._complete(client.recv(), [number], "ACK")

    def _complete_in_batches(self, client: Client) -> None:
        pulled = self._pull(client, 40, "batch")
        halves = [half for half in (pulled[:20], pulled[20:]) if half]
        for half in halves:
            numbers, ids, tokens = zip(*half, strict=True)
            self._ledger.completing.update(numbers)
            client.send("ACKB", ids=ids, tokens=tokens)
        for half in halves:
            self._complete(client.recv(), [number for number, _, _ in half], "ACKB")

    def _complete(self, reply: dict[str, Any], numbers: list[int], what: str) -> None:
        for number in numbers:
            self._ledger.completed.add(number)
            self._ledger.held.pop(number, None)
        self._ledger.note(reply, what)

    def _fail(self, client: Client) -> None:
        pulled = self._pull(client, 10, "failer")
        for number, job_id, token in pulled:
            self._ledger.failing.add(number)
            client.send("FAIL", id=job_id, token=token, error=f"broke {number}", unrecoverable=number % 2 == 0)
        for number, _, _ in pulled:
            reply = client.recv()
            self._ledger.failed[number] = number % 2 == 0
            self._ledger.held.pop(number, None)
            self._ledger.note(reply, "FAIL")
