"""Ports for the servers that tests start.

They are taken from below the range from which the kernel serves outgoing connections. A port within that range is not
safe: while its server is down, any connection of any test may be given it, and then the server cannot come back; a
client that tries it again and again may even be connected to itself.

Tests that run side by side draw from ports of their own. Between finding a port free and listening on it there is time
for another process to do the same: then the server of one of them fails to start, and its test talks to the other's.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path


def free_port() -> int:
    """A port that nobody listens on, and that was not given out for as long as possible."""
    for port in _turns():
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("turns never end")


@cache
def _turns() -> Iterator[int]:
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    shares = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = list(_ports()[share::shares])
    random.SystemRandom().shuffle(ports)  # programs that tests start draw as well
    return itertools.cycle(ports)


def _ports() -> range:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Browsers refuse some ports up to 10080. Where nearly all ports serve outgoing connections, there is no choice.
    return range(11_000, lowest_outgoing if lowest_outgoing > 12_000 else 32_000)
