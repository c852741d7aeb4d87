"""`headrace capture`: keep the history of queues on Valkey as an event log that the data pipeline reads."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace import notation
from headrace.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from headrace.backends.valkey.capture import Capture

_PAUSE_S: Final = 0.1
_RETRY_S: Final = 1.0


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Record the event streams of all queues on Valkey until SIGTERM. Writers trim a stream to about a thousand "
        "entries: what is trimmed before it was read is recorded as a gap."
    )
    parser.add_argument(
        "folder", metavar="DIR", help="where to keep it; read it with `headrace pipeline --capture DIR`"
    )
    parser.add_argument(
        "--backend", metavar="URL", required=True, help="such as valkey://localhost:6379/0?prefix=glide"
    )
    parser.add_argument("--segment-ms", metavar="MS", type=int, default=60_000, help="readers see a segment after this")
    parser.add_argument("--max-bytes", metavar="N", type=int, default=16 << 30, help="beyond this the oldest events go")
    parser.add_argument("--once", action="store_true", help="read what there is, and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from headrace.backends.valkey.url import is_valkey_url

    if not is_valkey_url(arguments.backend):
        raise ConfigError("--backend must be a Valkey URL: a server of its own data keeps its history with --capture")
    if arguments.segment_ms < 100 or arguments.max_bytes < 1_000_000:
        raise ConfigError("--segment-ms must be at least 100, --max-bytes at least 1000000")
    asyncio.run(_capture(arguments))
    return 0


async def _capture(arguments: argparse.Namespace) -> None:
    from headrace.backends.local.eventlog import LogLimits
    from headrace.backends.valkey.backend import transport_of
    from headrace.backends.valkey.capture import Capture
    from headrace.backends.valkey.keys import Keys
    from headrace.backends.valkey.transport import patiently
    from headrace.backends.valkey.url import parse_url

    url = parse_url(arguments.backend)
    limits = LogLimits(segment_ms=arguments.segment_ms, keep_bytes=None, cap_bytes=arguments.max_bytes)
    server = transport_of(url)
    await patiently(server.open, *((0.0,) if arguments.once else ()))
    capture = Capture(server, Keys(url.prefix), Path(arguments.folder), limits)
    try:
        if arguments.once:
            while await capture.poll():
                pass
        else:
            print(f"capturing {url.shown} in {arguments.folder}", flush=True)
            await _until_told_to_stop(capture)
    finally:
        capture.close()
        await server.close()
    events, queues = (notation.counted(capture.log.last_seq, "event"), notation.counted(capture.queues, "queue"))
    print(f"{events} of {queues} in {arguments.folder}", flush=True)


async def _until_told_to_stop(capture: Capture) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    while not stop.is_set():
        try:
            pause = 0.0 if await capture.poll() else _PAUSE_S
        except StorageUnavailable as error:
            print(f"waiting for Valkey: {error}", flush=True)
            pause = _RETRY_S
        try:
            await asyncio.wait_for(stop.wait(), pause)
        except TimeoutError:
            continue
