"""What is stored besides jobs: family links made later, logs, schedules, webhooks."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.backends.valkey.arguments import Text, flat
from headrace.backends.valkey.control import check_log_line
from headrace.backends.valkey.hashes import to_fields
from headrace.backends.valkey.queries import Queries
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
        check_log_line(message)
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

    async def put_cron(self, entry: CronEntry) -> None:
        """A schedule is where the registry says, so that it moves to another queue in one step."""
        registry = self._keys.crons
        old = await self._server.call(registry, "HGET", registry, entry.name)
        key, slots = self._cron_key(entry.queue), f"{self._keys.of(entry.queue)}:hr:cron-slots"
        await self._server.call_many(
            [
                (key, ("HSET", key, entry.name, encode(entry))),
                (slots, ("HSET", slots, entry.name, int(entry.last_slot or 0))),
            ]
        )
        await self._server.call(registry, "HSET", registry, entry.name, entry.queue)
        if old is not None and old.decode() != entry.queue:
            await self._drop_cron(old.decode(), entry.name)

    async def cron(self, name: str) -> CronEntry | None:
        registry = self._keys.crons
        queue = await self._server.call(registry, "HGET", registry, name)
        if queue is None:
            return None
        key = self._cron_key(queue.decode())
        blob = await self._server.call(key, "HGET", key, name)
        return None if blob is None else _decode_cron(blob)

    async def crons(self) -> list[CronEntry]:
        registry = self._keys.crons
        flat = await self._server.call(registry, "HGETALL", registry)
        places = [(name, self._cron_key(queue.decode())) for name, queue in zip(flat[::2], flat[1::2], strict=True)]
        found = await self._server.call_many([(key, ("HGET", key, name)) for name, key in places])
        entries = [_decode_cron(blob) for blob in found if blob is not None]
        return sorted(entries, key=lambda entry: (entry.created_at, entry.name))

    async def delete_cron(self, name: str) -> bool:
        registry = self._keys.crons
        queue = await self._server.call(registry, "HGET", registry, name)
        if queue is None:
            return False
        await self._server.call(registry, "HDEL", registry, name)
        return await self._drop_cron(queue.decode(), name)

    async def _drop_cron(self, queue: str, name: str) -> bool:
        key, slots = self._cron_key(queue), f"{self._keys.of(queue)}:hr:cron-slots"
        dropped = await self._server.call_many([(key, ("HDEL", key, name)), (slots, ("HDEL", slots, name))])
        return bool(dropped[0])

    async def fire_cron(self, entry: CronEntry, spec: JobSpec | None) -> str | None:
        args: list[Text] = [entry.name, str(int(entry.last_slot or 0)), encode(entry)]
        if spec is not None:
            await self._register(entry.queue)
            args += flat(await self._new_job(entry.queue, spec, self._clock.now_ms(), frozenset(), []))
        reply = await self._call("fireCron", entry.queue, *args)
        return reply[0].decode() or None

    # -- webhooks ------------------------------------------------------------------------------------------------------

    async def add_webhook(self, webhook: Webhook) -> None:
        key = self._keys.webhooks
        await self._server.call(key, "HSET", key, webhook.id, encode(webhook))
        await self._tell_webhooks()

    async def webhooks(self) -> list[Webhook]:
        key = self._keys.webhooks
        found = [_decode_webhook(blob) for blob in await self._server.call(key, "HVALS", key)]
        return sorted(found, key=lambda webhook: (webhook.created_at, webhook.id))

    async def update_webhook(self, webhook: Webhook) -> bool:
        key = self._keys.webhooks
        if not await self._server.call(key, "HEXISTS", key, webhook.id):
            return False
        await self.add_webhook(webhook)
        return True

    async def remove_webhook(self, webhook_id: str) -> bool:
        key = self._keys.webhooks
        removed = bool(await self._server.call(key, "HDEL", key, webhook_id))
        if removed:
            await self._tell_webhooks()
        return removed

    async def _tell_webhooks(self) -> None:
        self.webhook_changes += 1


def _log_of(line: bytes) -> Log:
    try:
        return msgspec.json.decode(line, type=Log)
    except msgspec.DecodeError:
        return Log(0.0, "info", line.decode(errors="replace"))  # a line of a Node worker is plain text
