"""Verbs that this backend does not have (yet): each is refused by its name in `differences.NOT_SUPPORTED`."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.backends.base import Ack, FlowPush, JobScan, NewStep, ScanPage, SearchPage, SegmentInfo
from headrace.backends.valkey.differences import refuse
from headrace.backends.valkey.records import Records
from headrace.model import Flow, FlowStatus, FlowStep


class Refused(Records):
    async def search(
        self, queue: str, text: str, states: Sequence[str] | None, limit: int, before: int | None
    ) -> SearchPage:
        refuse("search")

    async def scan_jobs(self, wanted: JobScan) -> ScanPage:
        refuse("scans")

    async def scan_results(self, wanted: JobScan) -> ScanPage:
        refuse("scans")

    async def scan_dlq(self, wanted: JobScan) -> ScanPage:
        refuse("scans")

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

    def retire_tombstones(self, limit: int = 512) -> None:
        """There are none."""

    async def start_flow(
        self, flow_id: str, workflow: str, queue: str, steps: Sequence[NewStep], jobs: Sequence[FlowPush]
    ) -> tuple[Flow, bool]:
        refuse("workflows")

    async def advance_flow(
        self,
        flow_id: str,
        revision: int,
        status: FlowStatus | None,
        steps: Sequence[NewStep],
        jobs: Sequence[FlowPush],
        ack: Ack | None,
        drop: Sequence[str] = (),
    ) -> Flow:
        refuse("workflows")

    async def flow(self, flow_id: str) -> Flow | None:
        refuse("workflows")

    async def flow_steps(self, flow_id: str, after: int) -> list[FlowStep]:
        refuse("workflows")

    async def flows(
        self, workflow: str | None, status: FlowStatus | None, limit: int, before: str | None
    ) -> list[Flow]:
        refuse("workflows")

    def retire_flows(self) -> None:
        """There are none."""
