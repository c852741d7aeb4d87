"""The processes of a run: one server on SQLite (`local`), two brokers on a Valkey (`fleet`), and the load on both.

Rules: every process has a name, under which `faults` finds it; what it says goes to `<name>.log` in the folder of the
run; nothing outlives `Stage.__exit__`. A process that ended and was not killed here is noted in `Stage.deaths`. Some of
the load reaches its server through a proxy that can be told to cut. To add a process, add it to `_crew` or `_build`.
"""

from __future__ import annotations

import asyncio
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from tests.client.proxy import Proxy
from tests.integration.faultydisk import small_disk
from tests.ports import free_port
from tests.serverprocess import ServerProcess
from tests.valkeyserver import ValkeyServer

from headrace import Headrace
from soak.ledger import Ledger
from soak.load import JOBS, TICKS, Part

DISK_MB: Final = 160
KEPT_COMPLETED: Final = 2_000
KEPT_LETTERS: Final = 300
CAPTURE_SEGMENT_MS: Final = 5_000
TICK_SECONDS: Final = (1, 2)
"""The pause between runs of each schedule."""
MACHINE: Final = "machine"
"""The target of what hits everything at once."""
_PATIENCE_S: Final = 60.0


class Settings(Struct, frozen=True):
    """What the size of a run consists of."""

    folder: Path
    seed: int
    rate: float
    """Jobs per second on each side."""
    lease: float
    local_producers: int
    local_workers: int
    fleet_producers: int
    fleet_workers: int


class Incident(Struct):
    """A fault, made here or met: what it hit, and from when until when it lasted."""

    fault: str
    target: str
    began: float
    ended: float = 0.0
    pid: int | None = None
    """The process that was killed or stopped."""


class Hand:
    """One process of the load."""

    def __init__(self, part: Part, log: Path) -> None:
        self.part = part
        self._log = log
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Hand:
        command = [sys.executable, "-m", "soak.load", msgspec.json.encode(self.part).decode()]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        return self

    def wait_ready(self, timeout: float) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ready or self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.part.name} did not begin: {self._log.read_text()[-2000:]}")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate(timeout=10)

    def stop(self) -> None:
        """SIGTERM; it must end in order. One that has hardly begun may just die of it."""
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it was still there after {_PATIENCE_S:g} s") from None
        assert self.process.returncode in (0, -signal.SIGTERM), f"it left with {self.process.returncode}"


class Network:
    """The proxies, on a loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.proxies: dict[str, Proxy] = {}

    def add(self, name: str, target: int) -> int:
        """A way to that port which can be cut; its own port."""
        proxy = Proxy(target)
        asyncio.run_coroutine_threadsafe(proxy.open(), self._loop).result(5)
        self.proxies[name] = proxy
        return proxy.port

    def cut(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self.proxies[name].cut)

    def swallow(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self.proxies[name].swallow)

    def restore(self, name: str) -> None:
        """What was swallowed is missing from its stream, so that no connection can go on."""
        self.cut(name)
        self._loop.call_soon_threadsafe(self.proxies[name].pass_again)

    def close(self) -> None:
        for proxy in self.proxies.values():
            asyncio.run_coroutine_threadsafe(proxy.refuse(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


class Stage:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.folder = settings.folder
        self.incidents: list[Incident] = []
        self.deaths: list[str] = []
        self.servers: dict[str, ServerProcess] = {}
        self.http_ports: dict[str, int] = {}
        self.scheduled_until: dict[str, float] = {}
        self.hands: dict[str, Hand] = {}
        self.network = Network()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ledger = Ledger(self.folder / "incidents.jsonl")
        self._stack = ExitStack()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Stage:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self) -> None:
        self._stack.callback(self.network.close)
        self.disk = self._stack.enter_context(small_disk(self.folder / "disk", DISK_MB))
        options = ("--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-min-size", "4mb")
        self.valkey = self._stack.enter_context(ValkeyServer(self.folder / "valkey", *options))
        capture = ("--capture", str(self.capture), "--capture-segment-ms", str(CAPTURE_SEGMENT_MS))
        self._serve("server", str(self.disk / "headrace.db"), *capture)
        for name in ("broker-1", "broker-2"):
            self._serve(name, ":memory:", "--backend", self.valkey.url)
        for side in ("local", "fleet"):
            self._prepare_queues(side)
        for part in self._crew():
            self._enlist(part)
        for hand in self.hands.values():
            hand.wait_ready(_PATIENCE_S)

    def _serve(self, name: str, data_path: str, *flags: str) -> None:
        self.http_ports[name] = free_port()
        kept = ("--http-port", str(self.http_ports[name]), "--max-completed-jobs", str(KEPT_COMPLETED))
        server = ServerProcess(data_path, *kept, *flags, log=self.folder / f"{name}.log")
        self.servers[name] = server.start()
        self._stack.callback(self._end, server)
        self.network.add(f"way to {name}", server.port)

    def _enlist(self, part: Part) -> None:
        self.hands[part.name] = Hand(part, self.folder / f"{part.name}.log").start()
        self._stack.callback(self._end, self.hands[part.name])

    @staticmethod
    def _end(one: ServerProcess | Hand) -> None:
        if one.process is not None and one.process.poll() is None:
            one.kill()

    def _crew(self) -> Iterator[Part]:
        """Who works where: one after the other takes the next way into its side."""
        settings = self.settings
        ways = {
            "local": [self.url("server", is_proxied=True), self.url("server")],
            "fleet": [self.url("broker-1", is_proxied=True), self.url("broker-2"), self.valkey.url],
        }
        for role, side, count in (
            ("producer", "local", settings.local_producers),
            ("worker", "local", settings.local_workers),
            ("producer", "fleet", settings.fleet_producers),
            ("worker", "fleet", settings.fleet_workers),
        ):
            for number in range(count):
                url = ways[side][number % len(ways[side])]
                name = f"{side}-{role}-{number + 1}"
                yield Part(
                    role, name, url, side, str(self.folder), settings.seed, settings.rate / count, settings.lease
                )

    # -- where things are ----------------------------------------------------------------------------------------------

    @property
    def capture(self) -> Path:
        return self.disk / "capture"

    def url(self, name: str, *, is_proxied: bool = False) -> str:
        port = self.network.proxies[f"way to {name}"].port if is_proxied else self.servers[name].port
        return f"headrace://127.0.0.1:{port}"

    def url_of(self, side: str) -> str:
        return self.url("server" if side == "local" else "broker-1")

    # -- schedules -----------------------------------------------------------------------------------------------------

    def _prepare_queues(self, side: str) -> None:
        with Headrace(self.url_of(side)).sync() as app:
            app.queue(JOBS).dlq.configure(max_entries=KEPT_LETTERS)
            every, cron = TICK_SECONDS
            ticks = app.queue(TICKS)
            ticks.schedule("interval", {"key": "interval"}, every=every, overlap=True)
            ticks.schedule("cron", {"key": "cron"}, cron=f"*/{cron} * * * * *", tz="UTC", overlap=True)

    def end_load(self) -> None:
        """Stop producers and schedules; workers go on with what is left."""
        self._dismiss("producer")
        for side in ("local", "fleet"):
            with Headrace(self.url_of(side)).sync() as app:
                self.scheduled_until[side] = time.time()
                for name in ("interval", "cron"):
                    app.queue(TICKS).unschedule(name)

    def end_work(self) -> None:
        self._dismiss("worker")

    def _dismiss(self, role: str) -> None:
        for name in [name for name, hand in self.hands.items() if hand.part.role == role]:
            self.stop(name, self.hands.pop(name))

    def stop(self, name: str, one: ServerProcess | Hand) -> None:
        """As a deployment does: SIGTERM, and it ends in order."""
        try:
            one.stop()
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.deaths.append(f"{name} did not stop in order: {error}")

    # -- what faults do ------------------------------------------------------------------------------------------------

    @contextmanager
    def incident(self, fault: str, target: str, pid: int | None = None) -> Iterator[None]:
        noted = Incident(fault, target, time.time(), pid=pid)
        self.incidents.append(noted)
        yield
        noted.ended = time.time()
        self._ledger.write(noted)

    def note(self, incident: Incident) -> None:
        """One that nobody here made."""
        self.incidents.append(incident)
        self._ledger.write(incident)

    def look_for_deaths(self) -> None:
        """Whatever is not there any more ended by itself: faults bring back what they kill."""
        everyone: dict[str, ServerProcess | Hand | ValkeyServer] = {**self.servers, **self.hands, "valkey": self.valkey}
        for name, one in everyone.items():
            if one.process is not None and one.process.poll() is not None:
                self.deaths.append(f"{name} ended by itself with {one.process.returncode}")
                one.start()
