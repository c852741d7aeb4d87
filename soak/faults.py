"""What goes wrong: one table, and the schedule that a seed makes of it.

A fault gets the stage, its target and how long it shall last; it returns when it is over and everything runs again.
Now and then two come together, never to the same target. To add one, write a function like `kill_server` and put it
into FAULTS with its targets.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from tests.integration.faultydisk import fill
from tests.serverprocess import ServerProcess

from soak.stage import Stage

Act = Callable[[Stage, str, float], None]
SERVERS: Final = ("server", "broker-1", "broker-2")
_WAYS: Final = ("way to server", "way to broker-1")
_PAUSES: Final = (0.5, 1.75)
"""Between faults, in times of the longest one."""
_STARTS: Final = 20
_REFUSALS: Final = ("the disk is full", "headrace: Valkey at")
"""What a server says that cannot start on a full disk, or before Valkey is back."""
_TOGETHER: Final = 0.2
"""How many of the faults come together with another one."""


def _start(server: ServerProcess) -> None:
    """As a supervisor would: again, while it refuses because of another fault that came together with its own."""
    for tries_left in reversed(range(_STARTS)):
        try:
            server.start()
            return
        except RuntimeError as error:
            if not tries_left or not any(refusal in str(error) for refusal in _REFUSALS):
                raise
            time.sleep(0.5)


def kill_server(stage: Stage, target: str, seconds: float) -> None:
    server = stage.servers[target]
    with stage.incident("kill", target, server.pid):
        server.kill()
        time.sleep(seconds)
        _start(server)


def restart_server(stage: Stage, target: str, seconds: float) -> None:
    server = stage.servers[target]
    with stage.incident("stop", target, server.pid):
        stage.stop(target, server)
        time.sleep(seconds)
        _start(server)


def restart_hand(stage: Stage, target: str, seconds: float) -> None:
    hand = stage.hands[target]
    with stage.incident("stop", target, hand.pid):
        stage.stop(target, hand)
    time.sleep(seconds)
    hand.start()


def kill_hand(stage: Stage, target: str, seconds: float) -> None:
    hand = stage.hands[target]
    with stage.incident("kill", target, hand.pid):
        hand.kill()
    time.sleep(seconds)
    hand.start()


def kill_valkey(stage: Stage, target: str, seconds: float) -> None:
    with stage.incident("kill", target):
        stage.valkey.kill()
        time.sleep(seconds)
        stage.valkey.start()


def freeze(stage: Stage, target: str, seconds: float) -> None:
    with stage.incident("freeze", target):
        os.kill(stage.servers[target].pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(stage.servers[target].pid, signal.SIGCONT)


def cut(stage: Stage, target: str, seconds: float) -> None:
    """Reset every connection, three times, so that those who come back are hit as well."""
    with stage.incident("cut", target):
        for _ in range(3):
            stage.network.cut(target)
            time.sleep(seconds / 3)


def swallow(stage: Stage, target: str, seconds: float) -> None:
    """Bytes go in and none come out: both sides believe that they are connected."""
    with stage.incident("swallow", target):
        stage.network.swallow(target)
        time.sleep(seconds)
        stage.network.restore(target)


def fill_disk(stage: Stage, target: str, seconds: float) -> None:
    with stage.incident("fill", target):
        fill(stage.disk / "filler")
        time.sleep(seconds)
        (stage.disk / "filler").unlink()


def send_garbage(stage: Stage, target: str, seconds: float) -> None:
    with stage.incident("garbage", target):
        rng = random.Random(stage.settings.seed)
        ports = (stage.servers[target].port, stage.http_ports[target])
        sockets = [_sent(port, part) for port in ports for part in _garbage(rng)]
        time.sleep(seconds)
        for one in sockets:
            one.close()


def _garbage(rng: random.Random) -> Sequence[bytes]:
    return (
        rng.randbytes(4096),
        b"\x00\x00\x10\x00" + b"half a frame",
        b"\xff\xff\xff\xff" + b"a frame of four gigabytes",
        b"\x00\x00\x00\x03\x93\x01\x02",
        b"\x00\x00\x00\x01\xc1" * 1000,
        b"GET / HTTP/1.1\r\nHost: " + b"x" * 100_000,
        b"POST /queues/jobs/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{",
        b"GET /\x00\xff HTTP/9.9\r\n\r\n" * 50,
    )


def _sent(port: int, garbage: bytes) -> socket.socket:
    """The connection over which it went, left open: whoever speaks nonsense need not be polite."""
    one = socket.socket()
    one.settimeout(1)
    with suppress(OSError):
        one.connect(("127.0.0.1", port))
        one.sendall(garbage)
    return one


class Fault(NamedTuple):
    act: Act
    targets: tuple[str, ...]
    """Names of processes and ways; `worker` and `producer` stand for any of them."""
    weight: int = 2


FAULTS: Final[dict[str, Fault]] = {
    "kill-server": Fault(kill_server, ("server",), 3),
    "kill-broker": Fault(kill_server, ("broker-1", "broker-2"), 3),
    "kill-worker": Fault(kill_hand, ("worker",), 4),
    "kill-producer": Fault(kill_hand, ("producer",)),
    "restart-server": Fault(restart_server, SERVERS),
    "restart-worker": Fault(restart_hand, ("worker",)),
    "kill-valkey": Fault(kill_valkey, ("valkey",)),
    "freeze": Fault(freeze, SERVERS),
    "cut": Fault(cut, _WAYS, 3),
    "swallow": Fault(swallow, _WAYS),
    "fill-disk": Fault(fill_disk, ("disk",)),
    "garbage": Fault(send_garbage, SERVERS),
}


class Planned(NamedTuple):
    at: float
    """Seconds after the beginning of the run; later if the fault before took long."""
    fault: str
    target: str
    seconds: float


def plan(rng: random.Random, names: Sequence[str], hands: Sequence[str], until: float, longest: float) -> list[Planned]:
    """Every fault once in random order, then at random, with pauses between."""
    first = rng.sample(names, len(names))
    planned: list[Planned] = []
    at = longest * rng.uniform(*_PAUSES)
    while at < until:
        name = first.pop() if first else _draw(rng, names)
        planned.append(Planned(at, name, _target(rng, name, hands), rng.uniform(0.05, 1) * longest))
        if rng.random() < _TOGETHER:
            other = _draw(rng, names)
            twin = Planned(at, other, _target(rng, other, hands), rng.uniform(0.05, 1) * longest)
            planned += [twin] if twin.target != planned[-1].target else []
        at += planned[-1].seconds + longest * rng.uniform(*_PAUSES)
    return planned


def _draw(rng: random.Random, names: Sequence[str]) -> str:
    return rng.choices(names, [FAULTS[name].weight for name in names])[0]


def _target(rng: random.Random, name: str, hands: Sequence[str]) -> str:
    target = rng.choice(FAULTS[name].targets)
    return rng.choice([hand for hand in hands if target in hand]) if target in ("worker", "producer") else target
