"""Python and Bun at the same queues: Python resizes what Bun orders, Bun mails what Python orders.

    headrace serve &
    bun add bunqueue && bun examples/polyglot/mailer.ts &
    python examples/polyglot/shop.py

A job is a name and data that JSON could hold. For other languages use `queue.add(name, data)`; a task is found by its
name, and takes its arguments from {"args": [...], "kwargs": {...}}.
"""

from __future__ import annotations

import asyncio
import os

from headrace import Headrace

app = Headrace(f"headrace://127.0.0.1:{os.environ.get('HEADRACE_PORT', '6789')}")


@app.task(queue="examples-images")
def resize(path: str, *, width: int = 100) -> str:
    print(f"python resizes {path} to {width}", flush=True)
    return f"{path}@{width}"


async def main() -> None:
    mails = app.queue("examples-mails")
    async with app, app.worker(["examples-images"]):
        job = await mails.add("welcome", {"to": "ada@example.com"})
        print("bun answered:", await job.result(timeout=20))
        for queue in ("examples-mails", "examples-images"):
            await app.queue(queue).obliterate()


if __name__ == "__main__":
    asyncio.run(main())
