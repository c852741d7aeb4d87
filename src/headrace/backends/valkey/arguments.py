"""What the functions of our library are given: records whose field order is the order of the arguments.

`docs/valkey.md` shows these as tables, and a test compares them with what the Lua files read. Every record is flattened
with `flat`: text and bytes as they are, numbers as plain decimals, True as 1, False as 0, None as the empty string.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headrace.model import JobLinks, JobSettings, Repeat

Text = str | bytes


class Tie(Struct, rename="camel", omit_defaults=True):
    """Another job that a new one names; without `queue` (a key prefix) it is in the same queue."""

    id: str
    queue: str | None = None


class Extra(Struct, rename="camel", omit_defaults=True):
    """What only some jobs have, as one MessagePack map."""

    custom_id: str | None = None
    is_id_free: bool = False
    birth: str | None = None
    group_id: str | None = None
    unique_key: str | None = None
    settings: JobSettings | None = None
    links: JobLinks | None = None
    opts: str | None = None
    size: int | None = None
    parent: Tie | None = None
    depends_on: list[Tie] = []


class NewJob(Struct):
    """One job of `headrace_insert` (after `now` and the mode) and of `headrace_fireCron`."""

    queue: int
    """Which of the keys is the meta of its queue, from 1."""
    id: str
    name: str
    data: bytes
    raw: bytes
    """The payload as it came, where JSON cannot hold it exactly."""
    timestamp: int
    run_at: int
    priority: int
    max_attempts: int
    extra: bytes


class Completion(Struct):
    """One job of `headrace_complete` (after `now`, the mode and the plans of successors)."""

    queue: int
    id: str
    token: str | None
    returnvalue: bytes
    raw: bytes
    remove: bool | None


class Claiming(Struct):
    """`headrace_claim`, after `now`."""

    count: int
    broker: str
    owner: str | None
    token: str
    serial: int
    lease_ms: int
    group: bytes


class Failing(Struct):
    """`headrace_fail`, after `now`."""

    id: str
    token: str | None
    error: str | None
    stack: bytes
    is_terminal: bool
    remove: bool | None
    luck: float
    has_error: bool


class Renewal(Struct):
    """One job of `headrace_extend`, after `now`."""

    id: str
    token: str | None
    duration_ms: int | None
    is_forced: bool


class Successor(Struct, rename={"repeat": "repeat_"}, omit_defaults=True):
    """When a repeat job runs again: part of `headrace_complete`. Without `run` it ends here."""

    run: int | None = None
    id: str = ""
    repeat: Repeat | None = None
    size: int = 0


def flat(record: Struct) -> list[Text]:
    return [plain(getattr(record, field)) for field in record.__struct_fields__]


def plain(value: Any) -> Text:
    if isinstance(value, str | bytes):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and not value.is_integer():
        return repr(value)
    return str(int(value))


pack = msgspec.msgpack.Encoder().encode
