"""Webhooks on an engine in this process, with a DNS that says what the test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Final

from msgspec import Raw

from headrace.addresses import UrlRules, check_webhook_url
from headrace.backends.local.backend import LocalBackend
from headrace.clock import SystemClock
from headrace.commands.jobs import PushEntry
from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.engine.figures import Deliveries
from headrace.model import Webhook
from headrace.server.webhooks import Webhooks
from tests.waiting import until

OUTSIDE: Final = "127.0.0.2"
"""Stands for an address of the world: allowed by the rules of these tests, while 127.0.0.1 is not."""
RULES: Final = UrlRules((ip_network(f"{OUTSIDE}/32"),))


class Dns:
    """Answers with one list of addresses after the other; the last one stays."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, name: str, port: int) -> list[str]:
        self.asked.append(name)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Rig:
    """An engine in this process whose webhooks ask the given DNS."""

    def __init__(self, dns: Dns) -> None:
        self.backend = LocalBackend(None)
        self.engine = Engine(self.backend, SystemClock(), webhook_rules=RULES)
        settings = Settings(webhook_retry_delay_ms=10)
        self.webhooks = Webhooks(self.engine, settings, schedule=lambda: None, resolve=dns)
        self.deliveries = self.engine.figures.deliveries

    async def add(self, url: str, *, settled: bool = True) -> None:
        check_webhook_url(url, RULES)
        await self.backend.add_webhook(Webhook("hook", url, ["job.pushed"], None, None, 0.0))
        if settled:
            self.engine.settle()

    async def push(self) -> str:
        job = await self.backend.insert_one("q", PushEntry(data=Raw(b"\xc0")))
        self.engine.settle()
        return job

    async def until(self, is_reached: Callable[[Deliveries], bool]) -> None:
        await until(lambda: is_reached(self.deliveries))

    async def stop(self) -> None:
        time_is_up = asyncio.Event()
        asyncio.get_running_loop().call_later(1, time_is_up.set)
        await self.webhooks.stop(time_is_up)

    async def last_error(self) -> str | None:
        await self.stop()
        return (await self.backend.webhooks())[0].last_error


@asynccontextmanager
async def rig_with(*answers: list[str]) -> AsyncIterator[tuple[Rig, Dns]]:
    dns = Dns(*answers)
    rig = Rig(dns)
    await rig.engine.start()
    rig.webhooks.start()
    yield rig, dns
    await rig.stop()
    await rig.engine.stop()
