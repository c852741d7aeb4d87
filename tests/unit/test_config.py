"""Settings: what cannot work is refused by its name, wherever it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import SETTING_KINDS, Settings, load_settings
from headrace.errors import ConfigError

NUMBERS = [name for name, kind in SETTING_KINDS.items() if kind is int]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_may_be_negative(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be "):
        load_settings({}, {f"HEADRACE_{name.upper()}": "-1"})


@pytest.mark.parametrize(
    "name", ["live_heartbeat_ms", "rate_limit_window_ms", "max_connections", "http_request_timeout_ms"]
)
def test_a_zero_that_would_stop_everything_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be at least"):
        load_settings({name: 0}, {})


def test_a_zero_that_turns_something_off_is_taken() -> None:
    settings = load_settings({"http_port": 0, "rate_limit_max_requests": 0, "tcp_idle_timeout_ms": 0}, {})
    assert (settings.http_port, settings.rate_limit_max_requests, settings.tcp_idle_timeout_ms) == (0, 0, 0)


def test_the_defaults_are_settings_that_work() -> None:
    assert load_settings({}, {}) == Settings()


@pytest.mark.parametrize("token", ["", "  "])
def test_an_empty_token_is_refused_because_anybody_has_it(tmp_path: Path, token: str) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(f'auth_tokens = ["right", "{token}"]')
    with pytest.raises(ConfigError, match="--auth-tokens must not be empty"):
        load_settings({"config": str(config)}, {})


@pytest.mark.parametrize("content", [b"tcp_port = ", 'host = "café"'.encode("latin-1")])
def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    config = tmp_path / "headrace.toml"
    config.write_bytes(content)
    with pytest.raises(ConfigError, match=f"config file {config} is not valid TOML"):
        load_settings({"config": str(config)}, {})


@pytest.mark.parametrize(("given", "level"), [("WARN", "warning"), ("warn", "warning"), ("Info", "info")])
def test_a_log_level_of_the_environment_may_be_written_as_other_programs_do(given: str, level: str) -> None:
    assert load_settings({}, {"LOG_LEVEL": given}).log_level == level
    with pytest.raises(ConfigError, match="--log-level must be"):
        load_settings({}, {"LOG_LEVEL": "loud"})


@pytest.mark.parametrize(
    "origin", ["ops.example.com", "https://ops.example.com/", "https://OPS.example.com", "https://"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-allow-origin needs origins such as"):
        load_settings({}, {"CORS_ALLOW_ORIGIN": f"https://a.example:8443,{origin}"})


@pytest.mark.parametrize("origins", ["", "*", "null", "https://a.example:8443,http://[::1]:80,moz-extension://d7e8-91"])
def test_origins_are_taken_as_browsers_send_them(origins: str) -> None:
    assert load_settings({}, {"CORS_ALLOW_ORIGIN": origins}).cors_allow_origin == [o for o in origins.split(",") if o]


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"TCP_PORT": "tcp://10.0.0.1:6789"}, "TCP_PORT must be a whole number, not 'tcp://10.0.0.1:6789'"),
        ({"HEADRACE_HTTP_PORT": "x", "HTTP_PORT": "80"}, "HEADRACE_HTTP_PORT must be a whole number, not 'x'"),
        ({"METRICS_AUTH": "off"}, "METRICS_AUTH must be true or false, not 'off'"),
    ],
)
def test_a_wrong_value_in_the_environment_is_named_by_its_variable(environ: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings({}, environ)
    assert str(refused.value) == error


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('tcp_port = "x"', "tcp_port in config file {} must be a whole number, not 'x'"),
        ("data_path = 5", "data_path in config file {} must be a text, not 5"),
        ('auth_tokens = "secret"', "auth_tokens in config file {} must be a list of texts"),
        ("tcp_prot = 5", "tcp_prot in config file {} is not a setting"),
    ],
)
def test_a_wrong_value_in_a_config_file_is_named_with_the_file(tmp_path: Path, content: str, error: str) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(content)
    with pytest.raises(ConfigError) as refused:
        load_settings({"config": str(config)}, {})
    assert str(refused.value) == error.format(config)


@pytest.mark.parametrize(
    ("flags", "environ"),
    [({"auth_tokens": []}, {}), ({}, {"AUTH_TOKENS": " , "}), ({}, {"HEADRACE_AUTH_TOKENS": ""})],
    ids=["flag", "environment", "empty"],
)
def test_tokens_that_were_set_and_are_none_do_not_open_the_server(
    flags: dict[str, list[str]], environ: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="auth_tokens names no token"):
        load_settings(flags, environ)


def test_a_value_that_another_one_overrides_is_not_looked_at() -> None:
    assert load_settings({}, {"TCP_PORT": "tcp://x", "HEADRACE_TCP_PORT": "5000"}).tcp_port == 5000
