"""A long made-up history as a capture folder: days of load with peaks, failures, retries and dead letters.

    python bench/history.py FOLDER --events 5000000 --days 3

It is made with numpy, so that a million events take seconds, and written as `headrace serve --capture` writes them.
The shape is plausible and nothing more: use it for speed and for looking at reports, not to learn about real queues.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from headrace.backends.local.segments import Sealed
from headrace.model import EVENT_WORDS, EventName

QUEUES = {"mail": 0.5, "image": 0.25, "report": 0.15, "billing": 0.1}
ERRORS = (
    "TimeoutError: no answer from 10.0.{a}.{b} after {c} ms",
    "ValueError: '{c}' is not a valid address",
    "KeyError: 'user-{c}'",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)
SEGMENT_EVENTS = 200_000
DAY_MS = 86_400_000
START_MS = 1_793_232_000_000  # Thu 29 Oct 2026 00:00 UTC
EVENTS_PER_JOB = 3.14
_CODES = {name: int(name) for name in EventName}
_WORDS = {int(name): word for name, word in EVENT_WORDS.items()}


def make(jobs: int, days: float, seed: int = 7) -> dict[str, np.ndarray]:
    """Events as columns, in order of time."""
    chance = np.random.default_rng(seed)
    queue = chance.choice(len(QUEUES), jobs, p=list(QUEUES.values()))
    added = START_MS + _arrivals(chance, jobs, days)
    hour = (added // 3_600_000) % 24
    is_peak = (hour >= 9) & (hour < 12) & (queue == 0)
    wait = np.exp(chance.normal(4.5, 1.0, jobs)) * np.where(is_peak, 40, 1) + 1
    run = np.exp(chance.normal(np.array([5.0, 7.2, 8.0, 4.2])[queue], 0.6)) + 1
    failed = chance.random(jobs) < np.array([0.04, 0.02, 0.08, 0.01])[queue]
    dead = failed & (chance.random(jobs) < 0.15)
    is_open = chance.random(jobs) < 0.002
    started = added + wait.astype(np.int64)
    ended = started + run.astype(np.int64)
    again = ended + 1_000
    restarted = again + (wait / 2).astype(np.int64) + 1
    finished = restarted + run.astype(np.int64)
    numbers = np.arange(jobs)
    parts = [("PUSHED", numbers, added, 0), ("PULLED", numbers[~is_open], started[~is_open], 1)]
    parts += [("COMPLETED", numbers[~failed & ~is_open], ended[~failed & ~is_open], 1)]
    hit = failed & ~is_open
    parts += [("FAILED", numbers[hit], ended[hit], 1), ("RETRIED", numbers[hit], ended[hit], 2)]
    parts += [("PROMOTED", numbers[hit], again[hit], 0), ("PULLED", numbers[hit], restarted[hit], 2)]
    parts += [("COMPLETED", numbers[hit & ~dead], finished[hit & ~dead], 2)]
    parts += [("FAILED", numbers[hit & dead], finished[hit & dead], 2)]
    columns = {
        "code": np.concatenate([np.full(len(job), _CODES[EventName[name]]) for name, job, _, _ in parts]),
        "job": np.concatenate([job for _, job, _, _ in parts]),
        "ts": np.concatenate([ts for _, _, ts, _ in parts]),
        "attempt": np.concatenate([np.full(len(job), attempt) for _, job, _, attempt in parts]),
    }
    order = np.argsort(columns["ts"], kind="stable")
    return {name: column[order] for name, column in columns.items()} | {"queue_of": queue}


def _arrivals(chance: np.random.Generator, jobs: int, days: float) -> np.ndarray:
    """Moments from the start, sorted: quiet nights, busy days."""
    at = chance.random(jobs * 2) * days * DAY_MS
    load = 0.55 - 0.45 * np.cos((at % DAY_MS) / DAY_MS * 2 * np.pi)
    return np.sort(at[chance.random(jobs * 2) < load][:jobs].astype(np.int64)) if jobs else at


def lines_of(history: dict[str, np.ndarray], start: int, end: int) -> bytes:
    """Events start..end-1 as JSON lines; the first event of the log is number 1."""
    names = list(QUEUES)
    queue_of = history["queue_of"]
    rows = []
    for n in range(start, end):
        job, code, attempt = int(history["job"][n]), int(history["code"][n]), int(history["attempt"][n])
        word = _WORDS[code]
        row = {
            "seq": n + 1, "ts": int(history["ts"][n]), "event": word, "epoch": 1, "queue": names[queue_of[job]],
            "job": f"01a1e1b5-{job >> 16:04x}-7000-8000-{job:012x}",
        }  # fmt: skip
        if attempt:
            row["attempt"] = attempt
        if word in ("pulled", "completed", "failed"):
            row["worker"] = f"{names[queue_of[job]]}-{(job * 7919 + attempt) % 6}"
        if word == "pushed":
            row["bytes"] = 40 + job % 500
        elif word == "failed":
            row["error"] = ERRORS[job % 7 % len(ERRORS)].format(a=job % 4, b=job % 251, c=job % 99_991)
            row["terminal"] = attempt == 2
        elif word == "retried":
            row |= {"prev": "failed", "delay": 1_000}
        rows.append(row)
    return msgspec.json.Encoder().encode_lines(rows)


def write(folder: Path, events: int, days: float) -> int:
    """A capture folder of about so many events; how many it has."""
    shard = folder / "shard=0"
    shard.mkdir(parents=True, exist_ok=True)
    history = make(int(events / EVENTS_PER_JOB), days)
    total = len(history["ts"])
    with (shard / "manifest.jsonl").open("wb") as manifest:
        for start in range(0, total, SEGMENT_EVENTS):
            end = min(start + SEGMENT_EVENTS, total)
            raw = lines_of(history, start, end)
            packed = zstandard.ZstdCompressor(level=1).compress(raw)
            times = int(history["ts"][start]), int(history["ts"][end - 1])
            sealed = Sealed(start + 1, end, end - start, *times, zlib.crc32(raw), len(raw), len(packed), 1)
            (shard / sealed.name).write_bytes(packed)
            manifest.write(msgspec.json.encode(sealed) + b"\n")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a made-up history as a capture folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--days", type=float, default=3.0)
    given = parser.parse_args()
    print(json.dumps({"events": write(given.folder, given.events, given.days)}))


if __name__ == "__main__":
    main()
