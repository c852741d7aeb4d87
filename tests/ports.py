"""Ports for the servers that tests start.

They are taken from below the range from which the kernel serves outgoing connections. A port within that range is not
safe: while its server is down, any connection of any test may be given it, and then the server cannot come back; a
client that tries it again and again may even be connected to itself.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

# Whatever seeds `random` for its tests would let workers that run side by side draw the same ports.
_chance = random.SystemRandom()


def free_port() -> int:
    ports = _ports()
    while True:
        port = _chance.choice(ports)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _ports() -> range:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Browsers refuse some ports up to 10080. Where nearly all ports serve outgoing connections, there is no choice.
    return range(11_000, lowest_outgoing if lowest_outgoing > 12_000 else 32_000)
