"""Events on a real server and between real processes: EW-027, EW-118, EW-119, X18, X20, and a core of the others."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.clock import SystemClock
from headrace.errors import EventCancelledError, EventTimeoutError, RemoteError
from headrace.events import EventContext, Events, Retry, event, propagate
from tests.events.conftest import Order, Verdict, check, echo, placed
from tests.events.consumer import ask, first
from tests.examples.pages import ROOT
from tests.serverprocess import ServerProcess
from tests.valkeyserver import ValkeyServer
from tests.waiting import until

LEASE = 5.0


class Consumer:
    def __init__(self, url: str, role: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.events.consumer", url, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@contextlib.contextmanager
def consumers(url: str, *roles: str) -> Iterator[list[Consumer]]:
    begun: list[Consumer] = []
    try:
        for role in roles:
            begun.append(Consumer(url, role))
        yield begun
    finally:
        for consumer in begun:
            consumer.kill()


@pytest.fixture
def remote(server: ServerProcess) -> str:
    return f"headrace://127.0.0.1:{server.port}"


async def test_ew_027_x20_context_and_causes_cross_processes(remote: str) -> None:
    with consumers(remote, "first", "second"):
        async with Events(remote) as events:
            with propagate(correlation_id="r", trace_id="t" * 32, span_id="0" * 16, user="u1"):
                answer = await events.emit(first, 1)
    one, two = answer["first"], answer["then"]["second"]
    assert two["traceId"] == one["traceId"] == "t" * 32
    assert (one["parentSpanId"], two["parentSpanId"]) == ("0" * 16, one["spanId"])
    assert two["user"] == "u1"
    assert two["correlationId"] == "r"
    assert answer["then"]["cause"] == answer["id"]


async def test_ew_118_x18_the_caller_is_answered_when_a_worker_is_killed_and_another_lives(remote: str) -> None:
    with consumers(remote, "hang") as (hanging,):
        async with Events(remote) as events:
            question = events.emit(ask, "q", timeout=30)
            assert await asyncio.to_thread(hanging.line) == "handling q 1"
            with consumers(remote, "answer") as (living,):
                killed_at = time.monotonic()
                hanging.kill()
                answer = await question
                assert time.monotonic() - killed_at < 2 * LEASE
                assert answer == {"pid": living.process.pid, "attempt": 2}


async def test_ew_118_with_less_patience_than_a_lease_the_caller_times_out_once(remote: str) -> None:
    with consumers(remote, "hang") as (hanging,):
        async with Events(remote) as events:
            question = events.emit(ask, "q", timeout=1)
            outcomes: list[object] = []
            question.add_done_callback(outcomes.append)
            assert await asyncio.to_thread(hanging.line) == "handling q 1"
            hanging.kill()
            with pytest.raises(EventTimeoutError, match="Request timeout after 1000ms"):
                await question
            assert outcomes == [question]


async def test_ew_119_a_restart_of_the_server_during_a_question_does_not_leave_the_caller_waiting(
    server: ServerProcess, remote: str
) -> None:
    may_end = asyncio.Event()
    began = asyncio.Event()
    events = Events(remote)

    @events.on(echo)
    async def handle(ctx: EventContext[object]) -> object:
        began.set()
        await may_end.wait()
        return "after the restart"

    async with events:
        question = events.emit(echo, 1, timeout=60)
        await began.wait()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        may_end.set()
        async with asyncio.timeout(30):
            assert await question == "after the restart"


@pytest.fixture(params=["server", "valkey"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "server":
        yield request.getfixturevalue("remote")
        return
    valkey = ValkeyServer(tmp_path / "valkey").start()
    yield valkey.url
    valkey.stop()


async def test_a_core_of_the_cases_holds_on_shared_stores(shared: str) -> None:
    seen: list[tuple[str, str]] = []
    runs: list[int] = []
    events, emitter = Events(shared), Events(shared)
    for group in ("billing", "search"):
        events.on(placed, group=group)(lambda ctx, group=group: seen.append((group, ctx.data.id)))

    @events.on(check, retry=Retry(2, backoff="fixed", delay=0.01))
    async def handle(ctx: EventContext[Order]) -> Verdict:
        runs.append(ctx.data.total)
        if ctx.data.total < 0:
            raise ValueError("negative")
        return Verdict(ok=ctx.data.total < 10)

    async with events, emitter:
        answers = await asyncio.gather(*(emitter.emit(check, Order(total=n)).wait() for n in range(20)))
        assert [answer.ok for answer in answers] == [n < 10 for n in range(20)]
        with pytest.raises(RemoteError, match="ValueError: negative") as caught:
            await emitter.emit(check, Order(total=-1))
        assert caught.value.attempt == 2
        same = [await emitter.emit(check, Order(total=99), key="k") for _ in range(3)]
        assert same == [Verdict(ok=False)] * 3
        assert runs.count(99) == 1
        await emitter.emit(placed, Order("o1"))
        await until(lambda: sorted(seen) == [("billing", "o1"), ("search", "o1")])
        late = emitter.emit(echo, 1, delay=3600, key="k", timeout=0)
        await until(lambda: not emitter.provider._enqueuing)
        assert await emitter.cancel(echo, "k") is True
        with pytest.raises(EventCancelledError):
            await late
        await emitter.schedule_event(placed, "tick", every=0.05, payload=Order("tick"))
        await until(lambda: ("search", "tick") in seen)
        assert await emitter.unschedule_event(placed, "tick") is True


async def test_an_emitter_whose_clock_is_ahead_sweeps_nothing_too_early(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = time.time_ns() // 1_000_000 + 3_600_000
    monkeypatch.setattr(SystemClock, "now_ms", lambda self: ahead)
    fading = event("fading", Order, ttl=60)
    async with Events(remote, sweep_interval=0.01) as events:
        await events.emit(fading, Order())
        queue = events.provider.queues.get_queue("fading")
        await events.provider._drop_overdue(queue, 60)
        assert len(await queue.get_jobs("waiting")) == 1
