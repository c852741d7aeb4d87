"""Builds and starts everything in one visible order, and stops it in reverse. The only place that picks a backend."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import logging
import os
import resource
import signal
import ssl
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.addresses import UrlRules
from headrace.backends.local.backend import BOUNDED_LOG, LocalBackend
from headrace.backends.local.eventlog import LogLimits
from headrace.clock import SystemClock
from headrace.config import Settings
from headrace.engine.engine import Engine
from headrace.errors import ConfigError
from headrace.server.tcp import TcpServer
from headrace.signals import StopSignals
from headrace.wire import know_all

if TYPE_CHECKING:
    from headrace.backends import AnyBackend
    from headrace.server.http import HttpServer
    from headrace.server.webhooks import Webhooks

log: Final = logging.getLogger("headrace.server")

_TELL_AFTER_S: Final = 1.0
"""How long a stop may take before the server says what it waits for."""
_SLOW_STOP: Final = (
    "stopping may take %g s: clients have still to read their replies, or webhooks to be delivered; "
    "Ctrl-C or SIGTERM once more to stop now"
)


class App:
    """A running server. `start` returns when it listens; `stop` when everything acknowledged is on disk."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.backend = _backend_of(settings)
        self.engine = Engine(
            self.backend,
            SystemClock(),
            tokens=settings.auth_tokens,
            worker_timeout_ms=settings.worker_timeout_ms,
            connections=lambda: self.tcp.connection_count,
            metrics_max_queues=settings.metrics_max_queues,
            webhook_rules=UrlRules(tuple(map(ip_network, settings.webhook_allow)), settings.requires_https_webhooks),
        )
        self.tcp: TcpServer
        self.http: HttpServer | None = None
        self.webhooks: Webhooks
        self._time_is_up = asyncio.Event()

    async def start(self) -> None:
        tls = _tls_context(self.settings)
        await self.engine.start()
        for problem in self.backend.problems:
            log.warning("%s", problem)
        self.tcp = TcpServer(self.engine, self.settings, tls)
        try:
            await self.tcp.start()
        except OSError as error:
            await self.engine.stop()
            raise _cannot_listen(self.settings, "tcp_port", error) from error
        self._start_webhooks()
        # TCP clients are served already, also while this is done.
        await asyncio.get_running_loop().run_in_executor(None, know_all)
        await self._start_http(tls)
        # What is there now stays: spare the collector the walk over it. And let it look less often: a large command
        # makes hundreds of thousands of objects, all alive, and at the default it took longer than decoding them.
        # The second look comes after few of the first: it walks over all of theirs at once, and everybody waits.
        gc.freeze()
        gc.enable()
        gc.set_threshold(20_000, 4, 500)

    async def _start_http(self, tls: ssl.SSLContext | None) -> None:
        if not self.settings.http_port:
            return
        loop = asyncio.get_running_loop()
        http = await loop.run_in_executor(None, importlib.import_module, "headrace.server.http")
        self.http = http.HttpServer(self.engine, self.settings, self.tcp.ticker, tls)
        assert self.http is not None
        try:
            await self.http.start()
        except OSError as error:
            self.http = None
            await self.stop()
            raise _cannot_listen(self.settings, "http_port", error) from error

    def _start_webhooks(self) -> None:
        from headrace.server.webhooks import Webhooks  # clients need not wait for this import

        self.webhooks = Webhooks(self.engine, self.settings, schedule=self.tcp.ticker.schedule)
        self.webhooks.start()

    @property
    def place(self) -> str:
        """Where the jobs are, for people."""
        if not self.backend.is_local:
            return self.backend.url.shown
        return "memory only" if self.settings.is_memory else self.settings.data_path

    async def stop(self) -> None:
        loop, patience = asyncio.get_running_loop(), self.settings.shutdown_timeout_ms / 1000
        told = loop.call_later(_TELL_AFTER_S, log.info, _SLOW_STOP, patience)
        loop.call_later(patience, self.hurry)
        # Concurrently: a slow client of one listener must not use up the time of the other.
        listeners = [listener for listener in (self.http, self.tcp) if listener is not None]
        await asyncio.gather(*(listener.stop(self._time_is_up) for listener in listeners))
        await asyncio.sleep(0)  # jobs of aborted connections are released
        self.tcp.ticker.stop()
        await self.webhooks.stop(self._time_is_up)
        told.cancel()
        await self.engine.stop()

    def hurry(self) -> None:
        """Wait for nobody any more."""
        self._time_is_up.set()


def _cannot_listen(settings: Settings, name: str, error: OSError) -> ConfigError:
    """What the operating system said, and what to do about it."""
    port, flag = getattr(settings, name), f"--{name.replace('_', '-')}"
    code = error.errno or 0
    reason = os.strerror(code) if code > 0 else error.strerror or error  # those of name lookups are negative
    failure = ConfigError(f"cannot listen on {settings.bind_host}:{port}: {reason}")
    if error.errno == errno.EADDRINUSE:
        failure.add_note(f"is another server running? Choose another port with {flag}")
    else:
        failure.add_note(f"--host names the address to listen on, {flag} the port")
    return failure


def _backend_of(settings: Settings) -> AnyBackend:
    if settings.backend is not None:
        # Imported here: a server on a file needs no client of Valkey.
        from headrace.backends.valkey.backend import ValkeyBackend

        return ValkeyBackend(
            settings.backend,
            max_completed=settings.max_completed_jobs,
            completed_retention_ms=settings.completed_retention_ms,
        )
    return LocalBackend(
        None if settings.is_memory else Path(settings.data_path),
        log_root=Path(settings.capture) if settings.capture else None,
        log_limits=_capture_limits(settings) if settings.capture else BOUNDED_LOG,
        max_completed=settings.max_completed_jobs,
        completed_retention_ms=settings.completed_retention_ms,
    )


def _capture_limits(settings: Settings) -> LogLimits:
    return LogLimits(
        segment_ms=settings.capture_segment_ms,
        keep_bytes=settings.capture_keep_bytes,
        cap_bytes=settings.capture_max_bytes,
    )


def _tls_context(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        files = f"{settings.tls_cert} and {settings.tls_key}"
        raise ConfigError(f"cannot load the TLS certificate and key of {files}: {error}") from error
    return context


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _is_reached(backend: AnyBackend, stopping: asyncio.Event) -> bool:
    """Whether the server that has the queues can be worked with now; False if this one is to stop before that."""
    if backend.is_local:
        return True
    reaching = asyncio.ensure_future(backend.wait_for_server())
    told = asyncio.ensure_future(stopping.wait())
    await asyncio.wait((reaching, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if reaching.done():
        reaching.result()
        return True
    reaching.cancel()
    await asyncio.wait((reaching,))
    return False


async def _serve(settings: Settings) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = StopSignals()

    def stop() -> None:
        if signals.hear(loop.time()):
            (stopping.set if signals.count == 1 else app.hurry)()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    app = App(settings)
    if not await _is_reached(app.backend, stopping):
        return
    await app.start()
    secure = "s" if settings.tls_cert else ""
    places = f"headrace{secure}://{settings.bind_host}:{app.tcp.port}"
    if app.http is not None:
        places += f" and http{secure}://{settings.bind_host}:{app.http.port}"
    print(f"headrace listens on {places} ({app.place})", flush=True)
    await stopping.wait()
    await app.stop()


def serve(settings: Settings) -> None:
    """Run a server in the foreground until SIGTERM or SIGINT."""
    import uvloop

    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))
