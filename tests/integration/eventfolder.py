"""Reads the event log of a server as a stranger would: from its files, with no code of the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import zstandard


def read_events(data_path: Path) -> list[dict[str, Any]]:
    """Every event beside a database file, oldest first: sealed segments, then what is still open."""
    return read_log(data_path.with_name(data_path.name + "-events"))


def read_log(root: Path) -> list[dict[str, Any]]:
    """Every event of a log folder, oldest first, also while a server closes segments in it."""
    folder = root / "shard=0"
    # Open ones first: a segment is published before its raw file goes, so nothing slips through in between.
    still_open = [(path, _bytes(path)) for path in sorted(folder.glob(".open-*.jsonl"))]
    sealed = sorted(folder.glob("seg-*.jsonl.zst"))
    closed = {path.name.split("-")[1] for path in sealed}
    raw = [block for path, block in still_open if path.name[6:26] not in closed]
    blocks = [*map(_unpack, sealed), *raw]
    return [json.loads(line) for block in blocks for line in block.splitlines()]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""  # published since it was listed


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
