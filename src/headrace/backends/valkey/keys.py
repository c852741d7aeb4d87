"""Names of keys, and ids that encode which queue a job is in.

Every key of a queue begins with `<prefix>:{<queue>}`: the braces make Valkey keep all of them in one slot. What belongs
to no queue (who is there, webhooks, lookups) begins with `<prefix>:hr:`.
"""

from __future__ import annotations

import hashlib
import re
import string
import zlib
from typing import Final

_DIGITS: Final = string.digits + string.ascii_lowercase
_OURS: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Keys:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.queues = f"{prefix}:hr:queues"
        self.webhooks = f"{prefix}:hr:webhooks"
        self.crons = f"{prefix}:hr:cron-queues"
        self.wake = f"{prefix}:hr:wake"
        self.ended = f"{prefix}:hr:ended"
        self.flow_changes = f"{prefix}:hr:flow-changes"
        self.flow_queues = f"{prefix}:hr:flow-queues"

    def of(self, queue: str) -> str:
        return f"{self.prefix}:{{{queue}}}"

    def meta(self, queue: str) -> str:
        return f"{self.prefix}:{{{queue}}}:meta"

    def job(self, queue: str, job_id: str) -> str:
        return f"{self.prefix}:{{{queue}}}:job:{job_id}"

    def log(self, queue: str, job_id: str) -> str:
        return f"{self.prefix}:{{{queue}}}:log:{job_id}"

    def lookup(self, job_id: str) -> str:
        """Where the queue of a job with a chosen id is noted."""
        return f"{self.prefix}:hr:queue-of:{job_id}"

    def flow(self, queue: str, flow_id: str) -> str:
        return f"{self.prefix}:{{{queue}}}:hr:flow:{flow_id}"

    def flow_log(self, queue: str, flow_id: str) -> str:
        return f"{self.prefix}:{{{queue}}}:hr:flow-log:{flow_id}"

    def flow_registry(self, flow_id: str) -> str:
        """Where the workflow of a flow is noted."""
        digest = hashlib.blake2b(flow_id.encode(), digest_size=8).digest()
        return f"{self.prefix}:fr:{_base36(int.from_bytes(digest))}"


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"


def mark(queue: str) -> str:
    """Six hex digits that stand for a queue at the end of its job ids."""
    return f"{zlib.crc32(queue.encode()) & 0xFFFFFF:06x}"


def marked(job_id: str, queue: str) -> str:
    """A UUIDv7 that names its queue: the last 24 of its 74 random bits are the mark."""
    return job_id[:-6] + mark(queue)


def mark_of(job_id: str) -> str | None:
    """The mark of an id that we made; None for any other."""
    return job_id[-6:] if _OURS.fullmatch(job_id) else None
