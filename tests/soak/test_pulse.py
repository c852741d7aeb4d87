"""A standstill of the machine is noted, and a busy moment is not."""

from __future__ import annotations

import time

from soak.pulse import Pulse
from soak.stage import MACHINE, Incident


def test_a_beat_that_comes_seconds_late_is_a_standstill() -> None:
    noted: list[Incident] = []
    pulse = Pulse(noted.append)
    for now in (100.0, 100.1, 100.9, 112.9, 113.0):
        pulse.look(now)
    assert noted == [Incident("standstill", MACHINE, 100.9, 112.9)]


def test_it_beats_while_it_is_entered() -> None:
    noted: list[Incident] = []
    with Pulse(noted.append) as pulse:
        time.sleep(0.3)
        pulse.look(time.time() + 5)
    (standstill,) = [one for one in noted if one.ended - one.began > 4]
    assert standstill.began > time.time() - 2
