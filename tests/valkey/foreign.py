"""Another program on the same queues, with a plain client: it issues the very calls that glide-mq's documents give."""

from __future__ import annotations

import json
from typing import Any

from headrace.clock import Clock


class Foreign:
    def __init__(self, client: Any, prefix: str, clock: Clock) -> None:
        self.client = client
        self.prefix = prefix
        self.clock = clock

    def key(self, name: str, queue: str = "q") -> str:
        return f"{self.prefix}:{{{queue}}}:{name}"

    def hash(self, job_id: str, queue: str = "q") -> dict[str, str]:
        return dict(self.client.hgetall(self.key(f"job:{job_id}", queue)))

    def _keys(self, queue: str) -> list[str]:
        return [self.key(name, queue) for name in ("id", "stream", "scheduled", "events")]

    def _seventeen(self, data: Any, **given: Any) -> list[str]:
        defaults = {
            "name": "work",
            "data": json.dumps(data),
            "opts": "{}",
            "timestamp": self.clock.now_ms(),
            "delay": 0,
            "priority": 0,
            "parent": "",
            "attempts": 0,
            "ordering": "",
            "concurrency": 0,
            "rate_max": 0,
            "rate_duration": 0,
            "capacity": 0,
            "refill": 0,
            "cost": 0,
            "ttl": 0,
            "custom_id": "",
        }
        unknown = set(given) - set(defaults)
        assert not unknown, unknown
        return [str(value) for value in {**defaults, **given}.values()]

    def add(self, data: Any = None, *, queue: str = "q", more: tuple[str, ...] = (), **given: Any) -> str:
        keys = self._keys(queue)
        return str(self.client.fcall("glidemq_addJob", 4, *keys, *self._seventeen(data, **given), *more))

    def dedup(self, dedup_id: str, mode: str, ttl: int = 0, *, queue: str = "q", **given: Any) -> str:
        keys = [self.key("dedup", queue), *self._keys(queue)]
        return str(
            self.client.fcall("glidemq_dedup", 5, *keys, dedup_id, str(ttl), mode, *self._seventeen(None, **given))
        )

    def flow(
        self,
        children: list[dict[str, Any]],
        *,
        queue: str = "q",
        extras: tuple[str, ...] = (),
        parent: dict[str, Any] | None = None,
    ) -> Any:
        keys, args = self._keys(queue), self._flow_head(parent or {}, len(children))
        for child in children:
            home = child.get("queue", queue)
            keys += self._keys(home)
            args += [child.get("name", "child"), "{}", json.dumps(child.get("opts", {}))]
            args += [str(child.get("delay", 0)), str(child.get("priority", 0)), str(child.get("attempts", 0))]
            args += [f"{self.prefix}:{{{home}}}", queue, child.get("custom_id", "")]
        args += [str(len(extras)), *extras]
        reply = self.client.fcall("glidemq_addFlow", len(keys), *keys, *args)
        return json.loads(reply) if reply.startswith("[") else reply

    def _flow_head(self, given: dict[str, Any], children: int) -> list[str]:
        head = [given.get("name", "parent"), "{}", json.dumps(given.get("opts", {})), str(self.clock.now_ms())]
        numbers = [given.get("delay", 0), given.get("priority", 0), given.get("attempts", 0), children]
        return head + [str(n) for n in numbers] + [given.get("custom_id", "")]

    def events(self, queue: str = "q") -> list[dict[str, str]]:
        return [fields for _, fields in self.client.xrange(self.key("events", queue))]

    def counts(self, queue: str = "q") -> dict[str, int]:
        """As Node's getJobCounts computes them."""
        pending = self.client.xpending(self.key("stream", queue), "workers")["pending"]
        listed = int(self.client.get(self.key("list-active", queue)) or 0)
        waiting = self.client.xlen(self.key("stream", queue)) - pending
        waiting += self.client.llen(self.key("lifo", queue)) + self.client.llen(self.key("priority", queue))
        return {
            "waiting": waiting,
            "active": pending + listed,
            **{
                state: self.client.zcard(self.key(name, queue))
                for state, name in (("delayed", "scheduled"), ("completed", "completed"), ("failed", "failed"))
            },
        }
