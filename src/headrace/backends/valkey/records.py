"""What is stored besides jobs: family links made later, logs, schedules, webhooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from headrace.backends.valkey.arguments import Text, flat
from headrace.backends.valkey.hashes import MAX_PAYLOAD_BYTES, to_fields
from headrace.backends.valkey.queries import Queries
from headrace.backends.valkey.transport import Command, all_of
from headrace.errors import InvalidCommand
from headrace.model import CronEntry, JobSpec, Log, Webhook
from headrace.views import encode, with_entries

_decode_cron: Final = msgspec.msgpack.Decoder(CronEntry).decode
_decode_webhook: Final = msgspec.msgpack.Decoder(Webhook).decode


class Records(Queries):
    webhook_changes: int

    # -- families ------------------------------------------------------------------------------------------------------

    async def update_parent(self, child_id: str, parent_id: str) -> None:
        if child_id == parent_id:
            raise InvalidCommand("A flow job cannot be its own parent")
        child = await self._get(child_id, f"Child job not found: {child_id}")
        parent = await self._get(parent_id, f"Parent job not found: {parent_id}")
        self._same_slot(child.queue, [parent.queue])
        # The one verb that edits a payload: flow clients read the parent from the data.
        data = with_entries(child.data, {"__parentId": parent.id, "__parentQueue": parent.queue})
        text, raw = (b"", b"") if data is None else to_fields(data)
        args = (child.id, parent.id, text, raw)
        await self._call("updateParent", child.queue, *args, others=[parent.queue])

    # -- logs ----------------------------------------------------------------------------------------------------------

    async def add_log(self, job_id: str, message: str, level: str) -> None:
        if len(message.encode()) > MAX_PAYLOAD_BYTES:
            raise InvalidCommand("Log line too large for this backend (max 1 MB)")
        line = msgspec.json.encode(Log(float(self._clock.now_ms()), level, message))
        await self._act("log", job_id, line)

    async def logs(self, job_id: str) -> list[Log]:
        place = await self._place(job_id)
        if place is None:
            return []
        key = self._keys.log(*place)
        return [_log_of(line) for line in await self._server.call(key, "LRANGE", key, 0, -1)]

    async def clear_logs(self, job_id: str, keep: int | None) -> None:
        place = await self._place(job_id)
        if place is not None:
            key = self._keys.log(*place)
            await self._server.call(key, *(("LTRIM", key, -keep, -1) if keep else ("UNLINK", key)))

    # -- schedules -----------------------------------------------------------------------------------------------------

    def _cron_key(self, queue: str) -> str:
        return f"{self._keys.of(queue)}:hr:crons"

    def _slots_key(self, queue: str) -> str:
        return f"{self._keys.of(queue)}:hr:cron-slots"

    async def _cron_home(self, name: str) -> str | None:
        """A schedule is where the registry says, so that it moves to another queue in one step."""
        home = await self._server.call(self._keys.crons, "HGET", self._keys.crons, name)
        return None if home is None else str(home.decode())

    async def put_cron(self, entry: CronEntry, known: CronEntry | None = None) -> bool:
        home = await self._cron_home(entry.name)
        seen = _progress(known) if known is not None and known.queue == entry.queue else ""
        if not await self._put_cron(entry, seen):
            if await self._cron_home(entry.name) == entry.queue:
                return False
            # It is no schedule, but what is left of one whose deletion or move was broken off.
            await self._drop_cron(entry.queue, entry.name)
            if not await self._put_cron(entry, seen):
                return False
        await self._server.call(self._keys.crons, "HSET", self._keys.crons, entry.name, entry.queue)
        if home is not None and home != entry.queue:
            await self._drop_cron(home, entry.name)
        return True

    async def _put_cron(self, entry: CronEntry, seen: str) -> bool:
        return bool((await self._call("putCron", entry.queue, entry.name, seen, _progress(entry), encode(entry)))[0])

    async def cron(self, name: str) -> CronEntry | None:
        queue = await self._cron_home(name)
        return None if queue is None else await self._read_cron(name, queue)

    async def crons(self) -> list[CronEntry]:
        seen = self._schedules or {}
        homes = None if self._schedules is None else {name: entry.queue for name, entry in seen.items()}
        places = list((await self._or_last_seen(self._keys.crons, self._cron_homes, homes)).items())
        if self._server.is_cluster:
            entries = await all_of(*(self._cron_or_last_seen(*place, seen) for place in places))
        else:
            entries = await self._read_crons(places)
        self._schedules = {entry.name: entry for entry in entries if entry is not None}
        return sorted(self._schedules.values(), key=lambda entry: (entry.created_at, entry.name))

    async def _cron_homes(self) -> dict[str, str]:
        flat = await self._server.call(self._keys.crons, "HGETALL", self._keys.crons)
        return {name.decode(): queue.decode() for name, queue in zip(flat[::2], flat[1::2], strict=True)}

    async def _cron_or_last_seen(self, name: str, queue: str, seen: dict[str, CronEntry]) -> CronEntry | None:
        return await self._or_last_seen(self._cron_key(queue), partial(self._read_cron, name, queue), seen.get(name))

    async def _read_cron(self, name: str, queue: str) -> CronEntry | None:
        return (await self._read_crons([(name, queue)]))[0]

    async def _read_crons(self, places: Sequence[tuple[str, str]]) -> list[CronEntry | None]:
        asked: list[tuple[str, Command]] = []
        for name, queue in places:
            # How far it is comes first: if it is changed in between, this is out of date and nothing is fired.
            for key in (self._slots_key(queue), self._cron_key(queue)):
                asked.append((key, ("HGET", key, name)))
        found = await self._server.call_many(asked)
        return [_cron_of(progress, blob) for progress, blob in zip(found[::2], found[1::2], strict=True)]

    async def delete_cron(self, name: str) -> bool:
        queue = await self._cron_home(name)
        if queue is None:
            return False
        await self._server.call(self._keys.crons, "HDEL", self._keys.crons, name)
        return await self._drop_cron(queue, name)

    async def _drop_cron(self, queue: str, name: str) -> bool:
        key, slots = self._cron_key(queue), self._slots_key(queue)
        dropped = await self._server.call_many([(key, ("HDEL", key, name)), (slots, ("HDEL", slots, name))])
        return bool(dropped[0])

    async def fire_cron(self, entry: CronEntry, spec: JobSpec | None) -> str | None:
        args: list[Text] = [entry.name, repr(float(entry.last_slot or 0)), _progress(entry)]
        if spec is not None:
            await self._register(entry.queue)
            args += flat(await self._new_job(entry.queue, spec, self._clock.now_ms(), frozenset(), []))
        reply = await self._call("fireCron", entry.queue, *args)
        return reply[0].decode() or None

    # -- webhooks ------------------------------------------------------------------------------------------------------

    async def add_webhook(self, webhook: Webhook) -> None:
        key = self._keys.webhooks
        await self._server.call(key, "HSET", key, webhook.id, encode(webhook))
        self.webhook_changes += 1

    async def webhooks(self) -> list[Webhook]:
        key, seen = self._keys.webhooks, self._webhooks
        found = await self._or_last_seen(key, partial(self._server.call, key, "HVALS", key), seen)
        if found != self._webhooks:
            self._webhooks = found
            self.webhook_changes += 1
        return sorted(map(_decode_webhook, found), key=lambda webhook: (webhook.created_at, webhook.id))

    async def _look_at_webhooks(self) -> None:
        """Other brokers may have been told of some, or to call them no more. Only servers care, and have read them."""
        if self._webhooks is not None:
            await self.webhooks()

    async def change_webhook(self, webhook_id: str, change: Callable[[Webhook], Webhook]) -> Webhook | None:
        key = self._keys.webhooks
        while (seen := await self._server.call(key, "HGET", key, webhook_id)) is not None:
            changed = change(_decode_webhook(seen))
            if await self._fcall("replaceField", [key], (webhook_id, seen, encode(changed))):
                self.webhook_changes += 1
                return changed
        return None

    async def remove_webhook(self, webhook_id: str) -> bool:
        key = self._keys.webhooks
        removed = bool(await self._server.call(key, "HDEL", key, webhook_id))
        if removed:
            self.webhook_changes += 1
        return removed


def _progress(entry: CronEntry) -> str:
    """How far a schedule is, as it is stored."""
    return f"{float(entry.last_slot or 0)!r} {float(entry.next_run)!r} {entry.executions}"


def _cron_of(progress: bytes | None, blob: bytes | None) -> CronEntry | None:
    if progress is None or blob is None:
        return None
    last, following, executions = progress.split()
    entry = _decode_cron(blob)
    entry.last_slot, entry.next_run, entry.executions = float(last) or None, float(following), int(executions)
    return entry


def _log_of(line: bytes) -> Log:
    try:
        return msgspec.json.decode(line, type=Log)
    except msgspec.DecodeError:
        return Log(0.0, "info", line.decode(errors="replace"))  # a line of a Node worker is plain text
