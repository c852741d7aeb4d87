"""`headrace serve` as an operator meets it: starting, stopping, settings, and errors that say what to do."""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import pytest

from tests.http.test_websocket import HELLO, masked
from tests.http.webserver import WebServer
from tests.ports import free_port
from tests.protocol.steps import park
from tests.serverprocess import ServerProcess
from tests.waiting import eventually
from tests.wireclient import Client, send_until_closed


def headrace(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *arguments]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)


class Running:
    """A server started with exactly these arguments and this environment; ends with the block."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HTTP_PORT": "0", **(env or {})},
            cwd=cwd,
        )

    def __enter__(self) -> str:
        """The line that the server prints when it listens."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        out, err = self._process.communicate(timeout=20)
        assert (self._process.returncode, out) == (0, ""), (out, err)
        assert "Traceback" not in err, err


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may stop and start again."""
    with ServerProcess(tmp_path / "headrace.db") as running:
        yield running


class TestStopping:
    def test_replies_in_flight_leave_and_what_they_say_is_true(self, server: ServerProcess) -> None:
        """SIGTERM in the middle of pipelined pushes: every reply that came is in the file, and none is cut off."""
        acknowledged: list[int] = []
        with server.client() as client:
            pushing = threading.Thread(target=push_until_closed, args=(client, acknowledged))
            pushing.start()
            eventually(lambda: len(acknowledged) >= 200)
            err = server.stop()
            pushing.join(timeout=10)
        assert "ERROR" not in err, err
        with server.start().client() as client:
            stored = client.ok("Count", queue="stop")["count"]
            assert stored >= len(acknowledged)
            numbers = [job["data"] for job in client.ok("PULLB", queue="stop", count=1000)["jobs"]]
            assert numbers[: len(acknowledged)] == acknowledged[: len(numbers)]

    def test_long_polls_are_answered_before_the_connection_closes(self, server: ServerProcess) -> None:
        with server.client() as puller, server.client() as waiter, server.client() as client:
            job_id = client.ok("PUSH", queue="waited", data=1)["id"]
            puller.send("PULL", queue="empty", timeout=60_000, owner="w", reqId="a")
            puller.send("PULLB", queue="empty", timeout=60_000, count=5, reqId="b")
            assert puller.call("Ping", reqId="behind")["reqId"] == "behind"
            park(waiter, "WaitJob", id=job_id, timeout=60_000)
            stopped_at = time.monotonic()
            server.stop()
            assert time.monotonic() - stopped_at < 3
            assert puller.recv() == {"ok": True, "job": None, "token": None, "reqId": "a"}
            assert puller.recv() == {"ok": True, "jobs": [], "reqId": "b"}
            assert waiter.recv()["completed"] is False
            for connection in (puller, waiter, client):
                with pytest.raises(ConnectionError):
                    connection.recv()

    def test_a_large_batch_that_has_come_is_stored_and_answered(self, server: ServerProcess) -> None:
        with server.client(timeout=30) as client, server.client() as other:
            client.send("PUSHB", queue="batch", jobs=[{"data": number} for number in range(50_000)])
            eventually(lambda: other.ok("Count", queue="batch")["count"], every=0.001)
            server.stop()
            assert len(client.recv()["ids"]) == 50_000
        with server.start().client() as client:
            assert client.ok("Count", queue="batch")["count"] == 50_000

    def test_jobs_at_work_wait_again_with_no_attempt_counted(self, server: ServerProcess) -> None:
        with server.client() as client:
            job_id = client.ok("PUSH", queue="work", data=1)["id"]
            client.ok("PULL", queue="work", owner="w")
            server.stop()
        with server.start().client() as client:
            job = client.ok("PULL", queue="work")["job"]
            assert (job["id"], job["attempts"], job["stallCount"]) == (job_id, 0, 0)

    def test_clients_that_do_not_read_share_the_time_that_a_stop_waits(self, tmp_path: Path) -> None:
        server = WebServer(tmp_path / "slow.db", "--shutdown-timeout-ms", "2000").start()
        with server.client() as client, server.raw() as web:
            job_id = client.ok("PUSH", queue="slow", data="x" * 10_000_000)["id"]
            for deaf in (client.socket, web.socket):
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            web.send(f"GET /jobs/{job_id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            client.send("GetJob", id=job_id)
            assert web.head()
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 3.5

    def test_who_has_all_replies_need_not_wait_for_others_to_read_theirs(self, server: ServerProcess) -> None:
        with server.client() as slow, server.client() as idle:
            job_id = idle.ok("PUSH", queue="slow", data="x" * 1_000_000)["id"]
            slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            asked = [msgpack.packb({"cmd": "GetJob", "id": job_id, "reqId": n}) for n in range(100)]
            slow.socket.sendall(b"".join(struct.pack(">I", len(frame)) + frame for frame in asked))
            assert slow.recv()["reqId"] == 0
            os.kill(server.pid, signal.SIGTERM)
            with pytest.raises(ConnectionError):
                idle.recv()
            assert [slow.recv()["reqId"] for _ in range(99)] == list(range(1, 100))
            server.stop()

    @pytest.mark.parametrize("way", ["tcp", "http", "websocket"])
    def test_a_slow_reader_that_still_sends_gets_every_reply(self, tmp_path: Path, way: str) -> None:
        """Closing a socket with unread input would reset the connection, and what the client has not read is lost."""
        hello, command, reply = talk(way)
        with WebServer(tmp_path / "slow.db") as server, socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            slow.settimeout(20)
            slow.connect(("127.0.0.1", server.port if way == "tcp" else server.http_port))
            slow.sendall(hello)
            assert not hello or slow.recv(12) == b"HTTP/1.1 101"
            sending = threading.Thread(target=send_until_closed, args=(slow, command * 50))
            sending.start()
            with server.client() as client:
                eventually(lambda: client.ok("Count", queue="slow")["count"] > 100)
            os.kill(server.pid, signal.SIGTERM)
            received = b""
            while piece := slow.recv(16_384):
                received += piece
                time.sleep(0.001)
            sending.join(timeout=10)
            server.stop()
            with server.start().client() as client:
                assert client.ok("Count", queue="slow")["count"] == received.count(reply)

    @pytest.mark.parametrize("is_sending", [False, True], ids=["silent", "sending"])
    def test_a_client_that_never_closes_is_not_waited_for(self, server: ServerProcess, is_sending: bool) -> None:
        with server.client() as client:
            client.ok("Ping")
            if is_sending:
                ping = struct.pack(">I", 10) + msgpack.packb({"cmd": "Ping"})
                threading.Thread(target=send_until_closed, args=(client.socket, ping), daemon=True).start()
                threading.Thread(target=read_until_closed, args=(client.socket,), daemon=True).start()
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 3

    def test_a_second_signal_waits_for_no_client(self, server: ServerProcess) -> None:
        with server.client() as client:
            job_id = client.ok("PUSH", queue="slow", data="x" * 10_000_000)["id"]
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.send("GetJob", id=job_id)
            assert client.socket.recv(100)
            os.kill(server.pid, signal.SIGTERM)
            time.sleep(1.5)  # longer than an echo takes
            began = time.monotonic()
            assert "once more to stop now" in server.stop()
            assert time.monotonic() - began < 5
        with server.start().client() as client:
            assert client.ok("Count", queue="slow")["count"] == 1

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_an_idle_server_stops_at_once(self, server: ServerProcess, number: signal.Signals) -> None:
        with server.client() as client:
            client.ok("Ping")
            assert "ERROR" not in server.stop(timeout=5, number=number)


class TestFiles:
    def test_a_server_without_files_left_serves_who_is_there_and_others_later(self, tmp_path: Path) -> None:
        with ServerProcess(tmp_path / "files.db") as server, server.client() as client:
            client.ok("Ping")
            most = len(os.listdir(f"/proc/{server.pid}/fd")) + 4
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (most, most))
            crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(50)]
            assert client.ok("PUSH", queue="files", data=1)["id"]
            for one in crowd:
                one.close()
            eventually(lambda: answers(server), within=10)
            assert client.ok("Count", queue="files")["count"] == 1


def answers(server: ServerProcess) -> bool:
    """Whether somebody new is served."""
    try:
        with server.client(timeout=2) as newcomer:
            return bool(newcomer.ok("Ping"))
    except OSError:
        return False


def talk(way: str) -> tuple[bytes, bytes, bytes]:
    """What begins a connection, a push, and what each of its replies has once."""
    push = {"cmd": "PUSH", "queue": "slow", "data": "x" * 100}
    if way == "tcp":
        body = msgpack.packb(push)
        return b"", struct.pack(">I", len(body)) + body, msgpack.packb("ok")
    if way == "websocket":
        return HELLO, masked(push), b'"ok":true'
    text = b'{"data":"%s"}' % (b"x" * 100)
    head = b"POST /queues/slow/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return b"", head + b"Content-Length: %d\r\n\r\n%s" % (len(text), text), b'"ok":true'


def read_until_closed(sock: socket.socket) -> None:
    with suppress(OSError):
        while sock.recv(65_536):
            pass


def push_until_closed(client: Client, acknowledged: list[int]) -> None:
    number = 0
    try:
        while True:
            for n in range(number, number + 20):
                client.send("PUSH", queue="stop", data=n)
            for n in range(number, number + 20):
                assert client.recv()["ok"] is True
                acknowledged.append(n)
            number += 20
    except ConnectionError:
        return


class TestStarting:
    def test_it_prints_one_line_with_its_address_and_file(self, tmp_path: Path) -> None:
        path = tmp_path / "line.db"
        with Running("--tcp-port", "0", "--data-path", str(path)) as line:
            port = int(line.split("127.0.0.1:")[1].split()[0])
            assert line == f"headrace listens on headrace://127.0.0.1:{port} ({path})\n"
            with Client(port) as client:
                client.ok("Ping")

    def test_memory_mode_leaves_no_file(self, tmp_path: Path) -> None:
        with Running("--tcp-port", "0", "--data-path", ":memory:", cwd=tmp_path) as line:
            assert "(memory only)" in line
            with Client(int(line.split("127.0.0.1:")[1].split()[0])) as client:
                job_id = client.ok("PUSH", queue="q", data={"a": 1}, durable=True)["id"]
                client.ok("AddLog", id=job_id, message="kept in memory")
                assert client.ok("PULL", queue="q")["job"]["data"] == {"a": 1}
                client.ok("ACK", id=job_id, result=[1, 2])
                assert client.ok("GetResult", id=job_id)["result"] == [1, 2]
                assert client.ok("GetLogs", id=job_id)["data"]["count"] == 1
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.alone
    def test_how_long_it_takes_from_start_to_the_first_reply(self, tmp_path: Path) -> None:
        times = []
        for number in range(3):
            started_at = time.monotonic()
            with ServerProcess(tmp_path / f"{number}.db") as server, server.client() as client:
                client.ok("Ping")
                times.append(time.monotonic() - started_at)
        print(f"\nstart to first reply: {sorted(times)[1] * 1000:.0f} ms (median of 3)")
        assert min(times) < 1.5

    def test_a_port_in_use_is_named_with_what_to_do(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            refused = headrace(
                "serve", "--tcp-port", str(port), "--http-port", "0", "--data-path", str(tmp_path / "x.db")
            )
        assert refused.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use\n" in refused.stderr
        assert "--tcp-port" in refused.stderr
        assert "Traceback" not in refused.stderr
        assert refused.stdout == ""


class TestSettings:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (("--tls-cert", "cert.pem"), "--tls-key"),
            (("--tls-cert", "none.pem", "--tls-key", "none.pem"), "TLS certificate"),
            (("--tcp-port", "70000"), "--tcp-port must be between 0 and 65535"),
            (("--log-format", "xml"), "--log-format must be text or json"),
            (("--config", "missing.toml"), "missing.toml"),
        ],
        ids=["half of TLS", "TLS files missing", "port", "log format", "config missing"],
    )
    def test_what_cannot_work_is_refused_by_name(
        self, tmp_path: Path, arguments: tuple[str, ...], expected: str
    ) -> None:
        refused = headrace("serve", "--data-path", str(tmp_path / "x.db"), "--http-port", "0", *arguments)
        assert refused.returncode == 2, refused.stderr
        assert expected in refused.stderr
        assert "Traceback" not in refused.stderr

    def test_a_wrong_config_file_is_told_with_its_name_or_field(self, tmp_path: Path) -> None:
        config = tmp_path / "headrace.toml"
        for text, expected in (
            ("tcp_port = ", str(config)),
            ("tcp_prot = 1", "tcp_prot"),
            ('tcp_port = "x"', "tcp_port"),
        ):
            config.write_text(text)
            refused = headrace("serve", "--config", str(config), "--data-path", str(tmp_path / "x.db"))
            assert refused.returncode == 2
            assert f"config file {config}" in refused.stderr
            assert expected in refused.stderr
            assert "Traceback" not in refused.stderr

    def test_the_names_of_the_protocol_work_as_environment(self, tmp_path: Path) -> None:
        port, path = free_port(), tmp_path / "env.db"
        env = {"TCP_PORT": str(port), "DATA_PATH": str(path), "AUTH_TOKENS": "one, two", "HOST": "127.0.0.1"}
        with Running(env=env) as line:
            assert line == f"headrace listens on headrace://127.0.0.1:{port} ({path})\n"
            with Client(port) as client:
                assert client.error("Count", queue="q") == "Not authenticated"
                client.ok("Auth", token="two")
                client.ok("Count", queue="q")

    def test_flags_win_over_environment_and_environment_over_the_config_file(self, tmp_path: Path) -> None:
        ports = [free_port() for _ in range(3)]
        config = tmp_path / "headrace.toml"
        config.write_text(f'tcp_port = {ports[0]}\ndata_path = "{tmp_path}/config.db"\nauth_tokens = ["t"]\n')
        env = {"HEADRACE_CONFIG": str(config), "HOST": "127.0.0.1"}
        with Running(env=env) as line:
            assert f":{ports[0]} ({tmp_path}/config.db)" in line
        with Running(env={**env, "TCP_PORT": str(ports[1])}) as line:
            assert f":{ports[1]} ({tmp_path}/config.db)" in line
        with Running("--tcp-port", str(ports[2]), env={**env, "HEADRACE_TCP_PORT": str(ports[1])}) as line:
            assert f":{ports[2]} ({tmp_path}/config.db)" in line
            with Client(ports[2]) as client:
                assert client.error("Count", queue="q") == "Not authenticated"

    def test_it_tells_its_version_and_its_options(self) -> None:
        version = headrace("--version")
        assert (version.returncode, version.stdout.split()[0]) == (0, "headrace")
        top = headrace("--help")
        assert top.returncode == 0
        assert "serve" in top.stdout
        assert "doctor" in top.stdout
        serve = headrace("serve", "--help")
        assert serve.returncode == 0
        for flag in ("--tcp-port", "--data-path", "--auth-tokens", "--tls-cert", "--config", "--capture"):
            assert flag in serve.stdout

    def test_the_script_and_the_module_are_the_same_program(self) -> None:
        script = subprocess.run(
            [str(Path(sys.executable).with_name("headrace")), "--version"], capture_output=True, text=True, check=True
        )
        assert script.stdout == headrace("--version").stdout

    def test_a_command_that_is_not_there_is_refused_with_what_helps(self) -> None:
        refused = headrace("sevre")
        assert refused.returncode == 2
        assert "`headrace --help`" in refused.stderr
