"""What must be true of the keys of a queue on Valkey after every verb, seen with a plain client.

Each job is in exactly one place, that place is the one its state names, and nothing refers to a job that is gone: so
the counts that Node computes from the same keys are right too.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import valkey
from headrace.backends.valkey.backend import ValkeyBackend

_RANK = 60
_clients: dict[int, Any] = {}


def _client(port: int) -> Any:
    if port not in _clients:
        _clients[port] = valkey.Valkey(port=port, protocol=2)
    return _clients[port]


def check(backend: ValkeyBackend) -> None:
    client = _client(backend.url.hosts[0][1])
    prefix = backend.url.prefix
    keys = [key.decode() for key in client.keys(f"{prefix}:*")]
    queues = sorted({key.partition("}:")[0] + "}" for key in keys if "}:" in key})
    pipe = client.pipeline(transaction=False)
    for queue in queues:
        QueueKeys.ask(pipe, queue)
    replies = pipe.execute(raise_on_error=False)
    views = []
    for n, queue in enumerate(queues):
        ids = [key[len(queue) + 5 :] for key in keys if key.startswith(f"{queue}:job:")]
        views.append(QueueKeys(queue, ids, replies[n * QueueKeys.COUNT : (n + 1) * QueueKeys.COUNT]))
    _read_jobs(client, views)
    for view in views:
        view.check()
    _check_dependents(client, keys, views)


def _read_jobs(client: Any, views: list[QueueKeys]) -> None:
    pipe = client.pipeline(transaction=False)
    for view in views:
        for job_id in view.ids:
            pipe.hgetall(f"{view.p}:job:{job_id}")
    found = iter(pipe.execute())
    for view in views:
        view.jobs = {job_id: {k.decode(): v for k, v in next(found).items()} for job_id in view.ids}


def _check_dependents(client: Any, keys: list[str], views: list[QueueKeys]) -> None:
    known = {(view.p, job_id): h for view in views for job_id, h in view.jobs.items()}
    for (prefix, job_id), h in known.items():
        if h["state"] != b"waiting-children" or "hh" not in h:
            continue
        for pending in client.smembers(f"{prefix}:hr:pending:{job_id}"):
            home, _, dependency = pending.decode().partition(" ")
            waiting = client.lrange(f"{home}:hr:dependents:{dependency}", 0, -1)
            assert waiting.count(f"{prefix} {job_id}".encode()) == 1, f"{job_id} would never hear of {dependency}"


class QueueKeys:
    COUNT = 13

    @staticmethod
    def ask(pipe: Any, p: str) -> None:
        pipe.xrange(f"{p}:stream")
        pipe.xpending_range(f"{p}:stream", "workers", "-", "+", 100_000)
        for name in ("scheduled", "hr:delayed", "hr:active", "completed", "failed", "hr:ready"):
            pipe.zrange(f"{p}:{name}", 0, -1)
        pipe.smembers(f"{p}:hr:blocked")
        pipe.get(f"{p}:list-active")
        pipe.hgetall(f"{p}:hr:groups-active")
        pipe.hgetall(f"{p}:hr:keys")
        pipe.hgetall(f"{p}:hr:ids")

    def __init__(self, p: str, ids: list[str], replies: list[Any]) -> None:
        self.p, self.ids = p, ids
        self.jobs: dict[str, dict[str, bytes]] = {}
        entries, pending, *sets = replies[:8]
        blocked, self.list_active, self.groups, self.keys, self.custom = replies[8:]
        self.entries = {entry.decode(): fields[b"jobId"].decode() for entry, fields in entries or []}
        self.pending = (
            [] if isinstance(pending, Exception) else [self.entries[row["message_id"].decode()] for row in pending]
        )
        names = ("scheduled", "hr:delayed", "hr:active", "completed", "failed", "hr:ready")
        self.sets = {name: [m.decode() for m in members] for name, members in zip(names, sets, strict=True)}
        self.blocked = [job_id.decode() for job_id in blocked]

    def check(self) -> None:
        by_state: dict[str, list[str]] = {}
        for job_id, h in self.jobs.items():
            by_state.setdefault(h["state"].decode(), []).append(job_id)
        self._check_waiting(by_state.get("waiting", []))
        self._check_active(by_state.get("active", []))
        delayed = self.sets["scheduled"] + self.sets["hr:delayed"]
        assert sorted(delayed) == sorted(by_state.get("delayed", [])), f"{self.p}: delayed"
        for state in ("completed", "failed"):
            assert sorted(self.sets[state]) == sorted(by_state.get(state, [])), f"{self.p}: {state}"
        assert sorted(self.blocked) == sorted(by_state.get("waiting-children", []))
        self._check_keys()

    def _check_waiting(self, ids: list[str]) -> None:
        streamed = Counter(self.entries.values()) - Counter(self.pending)
        ready = {member[_RANK:]: member for member in self.sets["hr:ready"]}
        assert sorted([*streamed.elements(), *ready]) == sorted(ids), f"{self.p}: waiting"
        for job_id, member in ready.items():
            assert self.jobs[job_id]["rank"].decode() == member
        for entry, job_id in self.entries.items():
            assert self.jobs[job_id]["entry"].decode() == entry, f"{job_id} does not know its entry"

    def _check_active(self, ids: list[str]) -> None:
        listed = [job_id for job_id in ids if "entry" not in self.jobs[job_id]]
        assert sorted([*self.pending, *listed]) == sorted(ids), f"{self.p}: active"
        assert int(self.list_active or 0) == len(listed), f"{self.p}: list-active"
        assert sorted(self.sets["hr:active"]) == sorted(ids), f"{self.p}: somebody is not looked after"
        groups = Counter(h["hg"] for job_id in ids if "hg" in (h := self.jobs[job_id]))
        assert {name: int(n) for name, n in self.groups.items()} == groups

    def _check_keys(self) -> None:
        for key, held in self.keys.items():
            owner = held.partition(b":")[2].decode()
            assert owner in self.jobs, f"key {key!r} is held by {owner}, which is gone"
            assert self.jobs[owner]["state"] not in (b"completed", b"failed")
        for custom_id, job_id in self.custom.items():
            assert self.jobs[job_id.decode()]["ci"] == custom_id
