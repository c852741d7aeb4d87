"""Reads the event log of a server as a stranger would: from its files, with no code of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard


def read_events(data_path: Path) -> list[dict[str, Any]]:
    """Every event beside a database file, oldest first: sealed segments, then what is still open."""
    folder = data_path.with_name(data_path.name + "-events") / "shard=0"
    sealed = [_unpack(path) for path in sorted(folder.glob("seg-*.jsonl.zst"))]
    still_open = [path.read_bytes() for path in sorted(folder.glob(".open-*.jsonl"))]
    return [json.loads(line) for block in (*sealed, *still_open) for line in block.splitlines()]


def _unpack(path: Path) -> bytes:
    with path.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as lines:
        return lines.read()


def assert_dense(events: list[dict[str, Any]]) -> None:
    """No hole, no repetition: each seq is the one before it plus one."""
    seqs = [event["seq"] for event in events]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else True


def jobs_of(events: list[dict[str, Any]], word: str) -> list[str]:
    """The jobs that `word` happened to, in order, as often as it happened."""
    return [event["job"] for event in events if event["event"] == word]
