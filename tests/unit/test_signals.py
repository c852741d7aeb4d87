"""Signals that ask to stop."""

from __future__ import annotations

from headrace.signals import StopSignals


def test_a_signal_that_follows_at_once_is_an_echo() -> None:
    signals = StopSignals()
    assert [signals.hear(at) for at in (0.5, 0.6, 1.4, 1.6, 1.7, 9.0)] == [True, False, False, True, False, True]
    assert signals.count == 3
