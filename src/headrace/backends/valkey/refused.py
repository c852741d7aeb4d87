"""Verbs that this backend does not have (yet): each is refused by its name in `differences.NOT_SUPPORTED`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import SearchPage, SegmentInfo
from headrace.backends.valkey.differences import refuse
from headrace.backends.valkey.scans import Scans


class Refused(Scans):
    async def search(
        self, queue: str, text: str, states: Sequence[str] | None, limit: int, before: int | None, brief: bool = False
    ) -> SearchPage:
        refuse("search")

    async def event_lines(self, after_seq: int, limit: int) -> bytes:
        refuse("event log")

    def event_segments(self, after: tuple[int, int], limit: int) -> list[SegmentInfo]:
        refuse("event log")

    def segment_chunk(self, first: int, offset: int) -> tuple[bytes, int]:
        refuse("event log")

    def event_positions(self) -> dict[str, int]:
        refuse("event log")

    def set_event_position(self, consumer: str, seq: int) -> None:
        refuse("event log")

    def forget_event_position(self, consumer: str) -> bool:
        refuse("event log")

    def retire_tombstones(self) -> None:
        """The server drops them when their time is over."""
