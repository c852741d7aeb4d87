"""A Node worker, played by the very commands that it issues.

What the functions of glide-mq's library 93 write (`glidemq_moveToActive`, `glidemq_complete`, `glidemq_fail`,
`glidemq_promote`, `glidemq_reclaimStalled`) is written here step by step with a plain client.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Final

import valkey
from tests.valkey.foreign import Foreign

BAND = 1 << 42
"""One priority in the scores of the scheduled set."""


class NodeWorker:
    name: Final = "worker-1-abcdef12"

    def __init__(self, foreign: Foreign) -> None:
        self.foreign = foreign
        self.client = foreign.client
        with suppress(valkey.ResponseError):
            self.client.xgroup_create(foreign.key("stream"), "workers", "0", mkstream=True)

    def take(self) -> tuple[str, str] | None:
        """The next job that may start and its entry in the stream (empty for one from a list), or None."""
        while (found := self._next()) is not None:
            job_id, entry = found
            now = self.foreign.clock.now_ms()
            if self._may_start(job_id, entry, now):
                active = {"state": "active", "processedOn": now, "lastActive": now}
                self.client.hset(self.foreign.key(f"job:{job_id}"), mapping=active)
                return job_id, entry
        return None

    def _next(self) -> tuple[str, str] | None:
        job_id = self._pop()
        if job_id is not None:
            return job_id, ""
        reply = self.client.execute_command(
            "XREADGROUP", "GROUP", "workers", self.name, "COUNT", 1, "STREAMS", self.foreign.key("stream"), ">"
        )
        entries = reply[0][1] if reply else []
        if not entries:
            return None
        entry, fields = entries[0]
        return fields["jobId"] if isinstance(fields, dict) else fields[fields.index("jobId") + 1], entry

    def _pop(self) -> str | None:
        for name in ("priority", "lifo"):
            job_id = self.client.rpop(self.foreign.key(name))
            if job_id is not None:
                self.client.incr(self.foreign.key("list-active"))
                return str(job_id)
        return None

    def _may_start(self, job_id: str, entry: str, now: int) -> bool:
        """The gates of `glidemq_moveToActive`: time to live, then the order and the slots of a group."""
        fields, key = self.foreign.hash(job_id), self.foreign.key
        if 0 < int(fields.get("expireAt", 0)) <= now:
            self._leave(entry)
            self.client.hset(key(f"job:{job_id}"), mapping={"state": "failed", "failedReason": "expired"})
            self.client.zadd(key("failed"), {job_id: now})
            self.client.xadd(key("events"), {"event": "expired", "jobId": job_id})
            return False
        if "groupKey" not in fields:
            return True
        group = key(f"group:{fields['groupKey']}")
        seq, known = int(fields["orderingSeq"]), self.client.hgetall(group)
        if seq < int(known["nextSeq"]):
            return True  # it was started before, and has kept its slot
        if seq > int(known["nextSeq"]) or int(known.get("active", 0)) >= int(known["maxConcurrency"]):
            self._leave(entry)
            self.client.zadd(key(f"groupq:{fields['groupKey']}"), {job_id: seq})
            self.client.hset(key(f"job:{job_id}"), "state", "group-waiting")
            return False
        self.client.hincrby(group, "active", 1)
        self.client.hset(group, "nextSeq", seq + 1)
        return True

    def _release_slot(self, job_id: str) -> None:
        """Let the next one of the group into the stream."""
        fields, key = self.foreign.hash(job_id), self.foreign.key
        if "groupKey" not in fields:
            return
        self.client.hincrby(key(f"group:{fields['groupKey']}"), "active", -1)
        for parked, _ in self.client.zpopmin(key(f"groupq:{fields['groupKey']}")):
            self.client.hset(key(f"job:{parked}"), "state", "waiting")
            self.client.xadd(key("stream"), {"jobId": parked, "name": ""})

    def _leave(self, entry: str) -> None:
        if not entry:
            self.client.decr(self.foreign.key("list-active"))
            return
        self.client.xack(self.foreign.key("stream"), "workers", entry)
        self.client.xdel(self.foreign.key("stream"), entry)

    def complete(self, job_id: str, entry: str, value: object) -> None:
        now, key = self.foreign.clock.now_ms(), self.foreign.key
        self._leave(entry)
        self.client.zadd(key("completed"), {job_id: now})
        done = {"state": "completed", "returnvalue": json.dumps(value), "finishedOn": now}
        self.client.hset(key(f"job:{job_id}"), mapping=done)
        self._release_slot(job_id)

    def fail(self, job_id: str, entry: str, reason: str, backoff: int | None) -> None:
        now, key = self.foreign.clock.now_ms(), self.foreign.key
        self._leave(entry)
        self.client.hincrby(key(f"job:{job_id}"), "attemptsMade", 1)
        if backoff is not None:
            self.client.zadd(key("scheduled"), {job_id: now + backoff})
            again = {"state": "delayed", "failedReason": reason, "processedOn": now}
            self.client.hset(key(f"job:{job_id}"), mapping=again)
            return
        self.client.zadd(key("failed"), {job_id: now})
        failed = {"state": "failed", "failedReason": reason, "finishedOn": now, "processedOn": now}
        self.client.hset(key(f"job:{job_id}"), mapping=failed)
        self._release_slot(job_id)

    def retry(self, job_id: str) -> None:
        """A failed job begins anew: `job.retry()`."""
        now, key = self.foreign.clock.now_ms(), self.foreign.key
        self.client.zrem(key("failed"), job_id)
        self.client.zadd(key("scheduled"), {job_id: now})
        anew = {"state": "delayed", "attemptsMade": 0, "failedReason": "", "finishedOn": ""}
        self.client.hset(key(f"job:{job_id}"), mapping=anew)

    def promote_job(self, job_id: str) -> None:
        """`glidemq_promoteJob`: a delayed job waits at once."""
        key = self.foreign.key
        assert self.foreign.hash(job_id)["state"] == "delayed"
        self.client.zrem(key("scheduled"), job_id)
        self.client.xadd(key("stream"), {"jobId": job_id, "name": ""})
        self.client.hset(key(f"job:{job_id}"), "state", "waiting")

    def promote(self) -> None:
        """What is due goes to the stream, and what has a priority to the list: the lowest number first."""
        now, key = self.foreign.clock.now_ms(), self.foreign.key
        for job_id, score in self.client.zrange(key("scheduled"), 0, -1, withscores=True):
            band, due = divmod(int(score), BAND)
            if due > now:
                continue
            self.client.zrem(key("scheduled"), job_id)
            self.client.hset(key(f"job:{job_id}"), "state", "waiting")
            if band:
                self.client.lpush(key("priority"), job_id)
            else:
                self.client.xadd(key("stream"), {"jobId": job_id, "name": ""})

    def reclaim(self, lock_ms: int = 30_000) -> list[str]:
        """`glidemq_reclaimStalled`: jobs whose worker was silent for longer than the lock go back to the stream.

        The server counts idle time by itself and our clock stands still, so every entry counts as idle here.
        """
        now, key = self.foreign.clock.now_ms(), self.foreign.key
        taken = self.client.xautoclaim(key("stream"), "workers", self.name, 0)[1]
        stalled = [
            (entry, fields["jobId"])
            for entry, fields in taken
            if now - int(self.foreign.hash(fields["jobId"]).get("lastActive", 0)) >= lock_ms
        ]
        for entry, job_id in stalled:
            self.client.hincrby(key(f"job:{job_id}"), "stalledCount", 1)
            self.client.xadd(key("events"), {"event": "stalled", "jobId": job_id})
            self._leave(entry)
            self.client.hset(key(f"job:{job_id}"), "state", "waiting")
            self.client.hdel(key(f"job:{job_id}"), "processedOn", "lastActive")
            self.client.xadd(key("stream"), {"jobId": job_id, "name": ""})
        return [job_id for _, job_id in stalled]

    def tick_schedulers(self) -> None:
        """Fire what is due under the lock, as each Node worker does."""
        key, now = self.foreign.key, self.foreign.clock.now_ms()
        if not self.client.set(key("schedulers:lock:__tick__"), self.name, nx=True, px=1000):
            return
        for name, text in self.client.hgetall(key("schedulers")).items():
            entry = json.loads(text)
            if 0 < entry["nextRun"] <= now:
                self.foreign.add(entry["template"]["data"], name=entry["template"]["name"])
                entry |= {"lastRun": now, "iterationCount": entry["iterationCount"] + 1}
                entry["nextRun"] += entry["every"]
                self.client.hset(key("schedulers"), name, json.dumps(entry, separators=(",", ":")))
        self.client.delete(key("schedulers:lock:__tick__"))
