"""Text search in jobs.

MessagePack stores strings verbatim, so payloads are searched without being decoded; beyond ASCII the search is
therefore case-sensitive. A number is searched for in its packed forms, and since those of small numbers are a single
byte that may mean anything, the payload is then decoded to make sure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import msgpack

from headrace.backends.local.job import Job

_pack: Final = msgpack.Encoder().encode
_unpack: Final = msgpack.Decoder(ext_hook=lambda code, raw: None).decode


_ID_PART: Final = 6
"""Ids are random: shorter texts are in many of them by chance."""


class Needle:
    """What is looked for."""

    def __init__(self, text: str) -> None:
        self._text = text.casefold()
        self._exact = text.encode()
        self._lower = text.lower().encode()
        self._number = _number(text)
        self._packed = _packed_forms(self._number)

    def is_in_head(self, job: Job, failed_reason: str | None) -> bool:
        """Whether it is in what is said about a job: id, name, custom id, tags, error."""
        said = [job.id if len(self._text) >= _ID_PART else None, job.name, failed_reason]
        if job.links is not None:
            said += [job.links.custom_id, *job.links.tags]
        return any(part is not None and self._text in part.casefold() for part in said)

    def is_in_data(self, data: bytes) -> bool:
        if self._exact in data or self._lower in data.lower():
            return True
        return any(packed in data for packed in self._packed) and self._number in _numbers_of(data)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _packed_forms(number: float | None) -> list[bytes]:
    if number is None:
        return []
    is_whole = number.is_integer() and abs(number) < 2**63
    return [_pack(number), _pack(int(number))] if is_whole else [_pack(number)]


def _numbers_of(data: bytes) -> set[float]:
    try:
        return set(_numbers_in(_unpack(data)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return set()


def _numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
