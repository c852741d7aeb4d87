"""Settings: one struct, filled from defaults < config file < environment < flags.

To add a setting: a field here with its help text in SETTING_HELP; flag, environment name, config key and the table in
docs/operations.md follow from it. Environment names are HEADRACE_<FIELD>; the protocol's own names are accepted too.
"""

from __future__ import annotations

import os
import re
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from headrace.errors import ConfigError

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_AT_LEAST: Final = {
    "capture_segment_ms": 100,
    "capture_max_bytes": 1_000_000,
    "rate_limit_window_ms": 1,
    "tcp_max_write_queue_bytes": 1,
    "max_connections": 1,
    "worker_timeout_ms": 1,
    "live_heartbeat_ms": 100,
    "http_request_timeout_ms": 1,
    "http_keep_alive_ms": 1,
    "webhook_max_retries": 1,
}
"""Numbers may not be negative; these have a higher least value, below which nothing would work."""
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+|null|\*")
"""An origin as browsers send it, which is compared letter by letter: without a path, in lower case."""


class Settings(Struct, forbid_unknown_fields=True, kw_only=True):
    host: str | None = None
    tcp_port: int = 6789
    http_port: int = 6790
    data_path: str = "headrace.db"
    backend: str | None = None
    auth_tokens: list[str] = []
    tls_cert: str | None = None
    tls_key: str | None = None
    capture: str | None = None
    capture_segment_ms: int = 60_000
    capture_keep_bytes: int | None = None
    capture_max_bytes: int = 16 * 1024 * 1024 * 1024
    report: str | None = None
    log_format: str = "text"
    log_level: str = "info"
    rate_limit_max_requests: int = 10_000_000
    rate_limit_window_ms: int = 60_000
    max_completed_jobs: int = 50_000
    completed_retention_ms: int | None = None
    tcp_idle_timeout_ms: int = 60_000
    tcp_max_write_queue_bytes: int = 64 * 1024 * 1024
    max_connections: int = 10_000
    worker_timeout_ms: int = 30_000
    shutdown_timeout_ms: int = 30_000
    cors_allow_origin: list[str] = []
    allowed_hosts: list[str] = []
    metrics_auth: bool = False
    metrics_max_queues: int = 100
    max_sse_clients: int = 1000
    max_ws_clients: int = 1000
    live_heartbeat_ms: int = 30_000
    http_request_timeout_ms: int = 30_000
    http_keep_alive_ms: int = 75_000
    webhook_allow: list[str] = []
    webhook_require_https: bool | None = None
    webhook_max_retries: int = 3
    webhook_retry_delay_ms: int = 1000

    @property
    def bind_host(self) -> str:
        """Loopback, unless an address was named or tokens protect the server."""
        if self.host is not None:
            return self.host
        return "0.0.0.0" if self.auth_tokens else "127.0.0.1"

    @property
    def is_local_only(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ip_address(self.bind_host).is_loopback
        except ValueError:
            return self.bind_host == "localhost"

    @property
    def requires_https_webhooks(self) -> bool:
        return not self.is_local_only if self.webhook_require_https is None else self.webhook_require_https

    @property
    def is_memory(self) -> bool:
        return self.data_path == ":memory:"


SETTING_HELP: Final[dict[str, str]] = {
    "host": "address to listen on (default: 127.0.0.1, or every interface when tokens are set)",
    "tcp_port": "port of the binary protocol",
    "http_port": "port of HTTP, WebSocket and dashboard (0 turns it off)",
    "data_path": "database file, or :memory:",
    "backend": "keep the queues on Valkey instead: valkey://host:6379/0?prefix=glide",
    "auth_tokens": "comma-separated tokens; a client must present one of them",
    "tls_cert": "certificate chain (PEM); needs --tls-key",
    "tls_key": "private key (PEM); needs --tls-cert",
    "capture": "keep the whole event log in this folder, for the data pipeline",
    "capture_segment_ms": "with --capture: a segment is closed, and readers of the folder see it, after this time",
    "capture_keep_bytes": "with --capture: beyond this, segments read by every consumer are removed (default: kept)",
    "capture_max_bytes": "with --capture: beyond this the oldest segments are removed, read or not",
    "report": "HTML file of `headrace pipeline report`, shown at /report and linked from the dashboard",
    "log_format": "text or json",
    "log_level": "debug, info, warning or error",
    "rate_limit_max_requests": "commands per connection and window (0 turns the limit off)",
    "rate_limit_window_ms": "length of that window",
    "max_completed_jobs": "completed jobs kept; the oldest are removed first",
    "completed_retention_ms": "completed jobs older than this are removed (default: kept)",
    "tcp_idle_timeout_ms": "a frame that makes no progress for this long closes its connection (0 turns it off)",
    "tcp_max_write_queue_bytes": "replies a slow reader may leave unread before it is disconnected",
    "max_connections": "most open connections per port",
    "worker_timeout_ms": "a worker silent for this long counts as stale",
    "shutdown_timeout_ms": "how long a stop waits for replies and webhooks in flight",
    "cors_allow_origin": "origins whose pages may use the server, such as https://ops.example.com; a comma list",
    "allowed_hosts": "further host names of this server, checked when there are no tokens; a comma list",
    "metrics_auth": "require a token at /prometheus too",
    "metrics_max_queues": "how many queues, the busiest ones, have their own series at /prometheus",
    "max_sse_clients": "most open event streams (SSE)",
    "max_ws_clients": "most open WebSocket connections",
    "live_heartbeat_ms": "heartbeat interval of event streams; a WebSocket silent for four of them is closed",
    "http_request_timeout_ms": "an HTTP request must be complete, or its body make progress, within this time",
    "http_keep_alive_ms": "an HTTP connection without requests is closed after this time",
    "webhook_allow": "private networks that webhooks may call, such as 10.1.0.0/16; a comma list, or given repeatedly",
    "webhook_require_https": "refuse webhooks over plain http (default: only when other machines can reach the server)",
    "webhook_max_retries": "how often a webhook delivery is tried in total",
    "webhook_retry_delay_ms": "pause after a failed try; the second one is twice as long, and so on",
}

PROTOCOL_NAMES: Final[dict[str, str]] = {
    "HOST": "host",
    "TCP_PORT": "tcp_port",
    "HTTP_PORT": "http_port",
    "DATA_PATH": "data_path",
    "SQLITE_PATH": "data_path",
    "BQ_DATA_PATH": "data_path",
    "BUNQUEUE_DATA_PATH": "data_path",
    "AUTH_TOKENS": "auth_tokens",
    "TLS_CERT_FILE": "tls_cert",
    "TLS_KEY_FILE": "tls_key",
    "RATE_LIMIT_MAX_REQUESTS": "rate_limit_max_requests",
    "RATE_LIMIT_WINDOW_MS": "rate_limit_window_ms",
    "BUNQUEUE_MAX_COMPLETED_JOBS": "max_completed_jobs",
    "BUNQUEUE_COMPLETED_RETENTION_MS": "completed_retention_ms",
    "TCP_IDLE_TIMEOUT_MS": "tcp_idle_timeout_ms",
    "TCP_MAX_WRITE_QUEUE_BYTES": "tcp_max_write_queue_bytes",
    "WORKER_TIMEOUT_MS": "worker_timeout_ms",
    "SHUTDOWN_TIMEOUT_MS": "shutdown_timeout_ms",
    "CORS_ALLOW_ORIGIN": "cors_allow_origin",
    "METRICS_AUTH": "metrics_auth",
    "METRICS_MAX_QUEUES": "metrics_max_queues",
    "WEBHOOK_MAX_RETRIES": "webhook_max_retries",
    "WEBHOOK_RETRY_DELAY_MS": "webhook_retry_delay_ms",
    "LOG_LEVEL": "log_level",
    "LOG_FORMAT": "log_format",
}


def _kind(hint: Any) -> type:
    """`int` of `int | None`, `list` of `list[str]`."""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    (kind,) = [member for member in members if member is not NoneType]
    kind = get_origin(kind) or kind
    assert isinstance(kind, type)
    return kind


_HINTS: Final[dict[str, Any]] = get_type_hints(Settings)
SETTING_KINDS: Final[dict[str, type]] = {name: _kind(hint) for name, hint in _HINTS.items()}
"""What a setting is: int, str, bool or list."""
_WANTED: Final = {int: "a whole number", str: "a text", bool: "true or false", list: "a list of texts"}


def load_settings(flags: dict[str, Any], environ: dict[str, str] | None = None) -> Settings:
    """Settings from all sources. ConfigError names the source and the field that is wrong."""
    values: dict[str, Any] = {}
    environment = dict(os.environ) if environ is None else environ
    config = flags.pop("config", None) or environment.get("HEADRACE_CONFIG")
    if config:
        values |= _from_file(Path(config))
    values |= _from_environment(environment)
    values |= {name: value for name, value in flags.items() if value is not None}
    if values.get("auth_tokens") == []:
        raise ConfigError("auth_tokens names no token: leave it out to serve without tokens")
    settings = Settings(**values)
    _check(settings)
    return settings


def _typed(field: str, value: Any, place: str) -> Any:
    """A value with the type of its setting. `place` says where it was found."""
    try:
        return msgspec.convert(value, _HINTS[field], strict=False)
    except msgspec.ValidationError:
        kind = SETTING_KINDS[field]
        shown = "" if kind is list else f", not {value!r}"  # lists may be tokens
        raise ConfigError(f"{place} must be {_WANTED[kind]}{shown}") from None


def _from_file(path: Path) -> dict[str, Any]:
    import tomllib  # most servers have no file

    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {path}: {error.strerror}") from None
    except ValueError as error:  # or it is not UTF-8
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from None
    unknown = sorted(values.keys() - SETTING_KINDS.keys())
    if unknown:
        raise ConfigError(f"{unknown[0]} in config file {path} is not a setting")
    return {name: _typed(name, value, f"{name} in config file {path}") for name, value in values.items()}


def _from_environment(environ: dict[str, str]) -> dict[str, Any]:
    ours = {f"HEADRACE_{field.upper()}": field for field in Settings.__struct_fields__}
    variables = {
        field: variable
        for variable, field in (PROTOCOL_NAMES | ours).items()
        if environ.get(variable) or (field == "auth_tokens" and variable in environ)  # "" must not mean: for everybody
    }
    return {field: _typed(field, _parsed(field, environ[name]), name) for field, name in variables.items()}


def _parsed(field: str, text: str) -> str | list[str]:
    if field == "log_level":
        return _level(text)
    return split_list(text) if SETTING_KINDS[field] is list else text


def _level(text: str) -> str:
    """LOG_LEVEL is often set for other programs, too, which write `WARN`."""
    level = text.lower()
    return "warning" if level == "warn" else level


def split_list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _check(settings: Settings) -> None:
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("TLS needs both a certificate (--tls-cert) and a key (--tls-key)")
    _check_numbers(settings)
    if settings.log_format not in ("text", "json"):
        raise ConfigError("--log-format must be text or json")
    if not Path(settings.data_path).name:
        raise ConfigError(f"--data-path must name a file, which {settings.data_path!r} cannot be")
    if settings.log_level not in LOG_LEVELS:
        raise ConfigError("--log-level must be debug, info, warning or error")
    if settings.capture is not None and settings.is_memory:
        raise ConfigError("--capture needs a data file: with :memory: every start would begin a new history")
    if settings.report is not None and not settings.report.endswith(".html"):
        raise ConfigError("--report must name an .html file: what `headrace pipeline report --out FILE` writes")
    if any(not token.strip() for token in settings.auth_tokens):
        raise ConfigError("--auth-tokens must not be empty texts: anybody could present one")
    for origin in settings.cors_allow_origin:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"--cors-allow-origin needs origins such as https://ops.example.com, not {origin!r}")
    for network in settings.webhook_allow:
        _check_network(network)


def _check_numbers(settings: Settings) -> None:
    for name, kind in SETTING_KINDS.items():
        value = getattr(settings, name)
        if kind is not int or value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if name.endswith("_port") and not 0 <= value <= 65_535:
            raise ConfigError(f"{flag} must be between 0 and 65535")
        if value < _AT_LEAST.get(name, 0):
            raise ConfigError(f"{flag} must be at least {_AT_LEAST.get(name, 0)}")


def _check_network(text: str) -> None:
    try:
        ip_network(text)
    except ValueError as error:
        raise ConfigError(f"--webhook-allow needs networks such as 10.1.0.0/16: {error}") from None
