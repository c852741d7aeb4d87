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
