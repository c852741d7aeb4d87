"""What is stored besides jobs: family links made later, logs, schedules, webhooks."""

from __future__ import annotations

from collections.abc import Callable, Set

from headrace.backends.local.control import UNSTARTED
from headrace.backends.local.intake import LINK_LATER
from headrace.backends.local.job import Job
from headrace.backends.local.queries import Queries
from headrace.errors import InvalidCommand, Refused
from headrace.model import MAX_LOGS, CronEntry, EventName, JobSpec, Log, Webhook
from headrace.states import State, Verb
from headrace.views import encode, with_entries


class Records(Queries):
    _crons: dict[str, CronEntry]
    _webhooks: dict[str, Webhook]
    webhook_changes: int

    # -- families ------------------------------------------------------------------------------------------------------

    async def update_parent(self, child_id: str, parent_id: str) -> None:
        if child_id == parent_id:
            raise InvalidCommand("A flow job cannot be its own parent")
        child = self._get(child_id, f"Child job not found: {child_id}")
        parent = self._get(parent_id, f"Parent job not found: {parent_id}")
        if parent.state in (State.COMPLETED, State.FAILED):
            raise Refused(f"Parent job {parent_id} is not linkable")
        links = child.own_links()
        if links.parent_id not in (None, LINK_LATER, parent_id):
            raise Refused(f"Child job {child_id} already belongs to parent {links.parent_id}")
        links.parent_id = parent_id
        self._write_parent_into_data(child, parent)
        now = self._clock.now_ms()
        self._adopt(parent_id, [child], now)
        self._hear_of_failures([child_id], now)

    def _write_parent_into_data(self, child: Job, parent: Job) -> None:
        """The one verb that edits a payload: flow clients read the parent from the data."""
        parents = {"__parentId": parent.id, "__parentQueue": parent.queue.name}
        data = with_entries(self._data(child), parents)
        if data is not None:
            self._replace_data(child, data)
        else:
            self._journal.touch(child)

    async def remove_child_dependency(self, child_id: str) -> bool:
        child = self._get(child_id, f"Job not found: {child_id}")
        parent_id = child.links.parent_id if child.links is not None else None
        if parent_id is None:
            raise Refused(f"Job {child_id} has no parent")
        parent = self._find(parent_id)
        removed = False
        if parent is not None:
            removed = self._cut_ties(parent, {child_id})
            self._after_drop(parent, self._clock.now_ms())
        assert child.links is not None
        child.links.parent_id = None
        self._journal.touch(child)
        return removed

    def _cut_ties(self, parent: Job, children: Set[str]) -> bool:
        """The parent has nothing to do with these jobs any more; whether it had."""
        links = parent.own_links()
        known = not children.isdisjoint(links.children_ids) or not children.isdisjoint(links.depends_on)
        links.children_ids = [i for i in links.children_ids if i not in children]
        links.depends_on = [i for i in links.depends_on if i not in children]
        for child_id in children:
            self._drop_dependency(parent, child_id)
        return known

    async def remove_unprocessed_children(self, parent_id: str) -> None:
        parent = self._get(parent_id)
        now = self._clock.now_ms()
        children = filter(None, map(self._find, parent.links.children_ids if parent.links is not None else ()))
        unstarted = {child.id: child for child in children if child.state in UNSTARTED}
        self._cut_ties(parent, unstarted.keys())
        for child in unstarted.values():
            if child.state in UNSTARTED:  # else it failed with another one that it waited for
                self._tell_removed(child, now)
                self._take_away(child, "its job was removed", now, Verb.CANCEL)
        self._after_drop(parent, now)

    # -- logs ----------------------------------------------------------------------------------------------------------

    async def add_log(self, job_id: str, message: str, level: str) -> None:
        job = self._get(job_id)
        self._logged.add(job.seq)
        self._journal.later(
            "INSERT INTO log (job, at, level, message) VALUES (?,?,?,?)",
            job.seq,
            self._clock.now_ms(),
            level,
            message,
        )
        keep = job.settings.keep_logs
        self._trim_logs(job, MAX_LOGS if keep is None else min(keep, MAX_LOGS))

    def _trim_logs(self, job: Job, keep: int) -> None:
        self._journal.later(
            "DELETE FROM log WHERE job=?1 AND entry NOT IN "
            "(SELECT entry FROM log WHERE job=?1 ORDER BY entry DESC LIMIT ?2)",
            job.seq,
            keep,
        )

    async def logs(self, job_id: str) -> list[Log]:
        job = self._find(job_id)
        if job is None or job.seq not in self._logged:
            return []
        return [Log(float(at), level, message) for at, level, message in self._journal.logs(job.seq)]

    async def clear_logs(self, job_id: str, keep: int | None) -> None:
        job = self._find(job_id)
        if job is not None and job.seq in self._logged:
            self._trim_logs(job, keep or 0)

    # -- schedules -----------------------------------------------------------------------------------------------------

    async def put_cron(self, entry: CronEntry, known: CronEntry | None = None) -> bool:
        """There is no other writer, so `known` is always what is stored."""
        self._crons[entry.name] = entry
        self._journal.put_record("cron", entry.name, encode(entry))
        return True

    async def cron(self, name: str) -> CronEntry | None:
        return self._crons.get(name)

    async def crons(self) -> list[CronEntry]:
        return list(self._crons.values())

    async def delete_cron(self, name: str) -> bool:
        known = self._crons.pop(name, None)
        if known is not None:
            self._journal.drop_record("cron", name)
        return known is not None

    async def fire_cron(self, entry: CronEntry, spec: JobSpec | None) -> str | None:
        stored = self._crons.get(entry.name)
        if stored is None or (stored.last_slot or 0) >= (entry.last_slot or 0):
            return None
        await self.put_cron(entry)
        if spec is None:
            return None
        now = self._clock.now_ms()
        job = self._admit(self._queue(entry.queue), spec, now, None)
        self._emit(EventName.CRON_FIRED, job, now).action = entry.name
        return job.id

    # -- webhooks ------------------------------------------------------------------------------------------------------

    async def add_webhook(self, webhook: Webhook) -> None:
        self._webhooks[webhook.id] = webhook
        self.webhook_changes += 1
        self._journal.put_record("webhook", webhook.id, encode(webhook))

    async def webhooks(self) -> list[Webhook]:
        return list(self._webhooks.values())

    async def change_webhook(self, webhook_id: str, change: Callable[[Webhook], Webhook]) -> Webhook | None:
        webhook = self._webhooks.get(webhook_id)
        if webhook is None:
            return None
        changed = change(webhook)
        await self.add_webhook(changed)
        return changed

    async def remove_webhook(self, webhook_id: str) -> bool:
        if self._webhooks.pop(webhook_id, None) is None:
            return False
        self.webhook_changes += 1
        self._journal.drop_record("webhook", webhook_id)
        return True
