"""Settings that jobs share."""

from __future__ import annotations

import msgspec
import pytest

from headrace import model
from headrace.model import Backoff, JobSettings, intern_settings


def _encoded(settings: JobSettings) -> bytes:
    return msgspec.msgpack.encode([getattr(settings, field) for field in settings.__struct_fields__])


@pytest.mark.parametrize("first", [5000, 5000.0, 1000, 1000.0, Backoff("fixed", 7), Backoff("fixed", 7.0)])
def test_equal_settings_are_one_object_that_storage_gives_back_whoever_came_first(
    first: float | Backoff, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = Backoff("fixed", 7.0) if isinstance(first, Backoff) else float(first)
    monkeypatch.setattr(model, "_SHARED_SETTINGS", {})
    shared = intern_settings(JobSettings(backoff=first, lifo=True))
    assert intern_settings(JobSettings(backoff=second, lifo=True)) is shared
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=JobSettings)
    assert _encoded(stored) == _encoded(shared)


def test_a_default_that_was_given_as_another_kind_of_number_is_left_out_like_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "_SHARED_SETTINGS", {})
    shared = intern_settings(JobSettings(max_attempts=100, backoff=1000.0))
    assert msgspec.msgpack.encode(shared) == msgspec.msgpack.encode(JobSettings(max_attempts=100))
