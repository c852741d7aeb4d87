"""Read by type checkers and never run: each comment says what its line must be, by both of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import reveal_type

from headrace import Flow, Headrace, JobContext

app = Headrace("memory://")


@app.task(queue="emails", attempts=5)
async def send(to: str, *, subject: str = "hi") -> int:
    return len(to)


@app.task()
def resize(path: str, width: int = 100) -> bytes:
    return path.encode() * width


@app.task()
async def report(ctx: JobContext, day: str) -> dict[str, float]:
    return {day: ctx.attempt}


@app.task(run_in="process")
def render(ctx: JobContext, pages: list[int]) -> str:
    return str(pages)


@app.cron("0 3 * * *", tz="Europe/Berlin")
def nightly() -> None: ...


async def asynchronous() -> None:
    reveal_type(await send.enqueue("a@b.c"))  # is: Job[int]
    reveal_type(await (await send.enqueue("a@b.c", subject="x")).result(timeout=5))  # is: int
    reveal_type(await resize.enqueue("a.png"))  # is: Job[bytes]
    reveal_type(await report.enqueue("monday"))  # is: Job[dict[str, float]]
    reveal_type(await render.options(priority=3).enqueue([1]))  # is: Job[str]
    reveal_type(await nightly.enqueue())  # is: Job[None]
    reveal_type(await send.enqueue_many([("a",)]))  # is: list[Job[int]]
    reveal_type(await send("a@b.c"))  # is: int
    reveal_type(resize("a.png", width=5))  # is: bytes
    called = reveal_type(report("monday"))  # is: Coroutine[Any, Any, dict[str, float]]
    await called
    await app.enqueue_flow(Flow(resize.s("all"), [resize.s("1", 2), send.s("a@b.c")]))


def synchronous() -> None:
    with app.sync() as sync:
        reveal_type(sync.enqueue(send, "a@b.c", subject="x"))  # is: SyncJob[int]
        reveal_type(sync.enqueue(resize, "a.png", width=3).result())  # is: bytes
        reveal_type(sync.enqueue(report, "monday").result(timeout=5))  # is: dict[str, float]
        reveal_type(sync.enqueue(render.options(delay="10m"), [1]))  # is: SyncJob[str]
        reveal_type(sync.enqueue_many(send, [("a@b.c",), {"to": "b@b.c"}]))  # is: list[SyncJob[int]]
        reveal_type(sync.schedule(send, datetime.now(UTC), "a@b.c"))  # is: SyncJob[int]


async def wrong() -> None:
    await send.enqueue(5)  # error
    await send.enqueue("a@b.c", "x")  # error
    await send.enqueue("a@b.c", topic="x")  # error
    await resize.enqueue()  # error
    await resize.options(priority="high").enqueue("a.png")  # error
    await resize.options(prio=1).enqueue("a.png")  # error
    await report.enqueue(5)  # error
    await report.enqueue(JobContext.detached(), "monday")  # error
    await send.schedule("tomorrow", "a@b.c")  # error
    resize.s(1)  # error
    app.sync().enqueue(send, 5)  # error
    app.sync().schedule(send, "tomorrow", "a@b.c")  # error
    app.sync().enqueue(resize.options(priority=1))  # error
    resize(await (await send.enqueue("a@b.c")).result())  # error
    app.task(resize)  # error
