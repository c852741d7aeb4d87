"""The vigil: held as long as it pays, and never for longer than what it saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.server import vigil as module
from headrace.server.vigil import FIRST_GAP_S, MAX_GAP_S, Vigil

LOOK_S = 5e-6
"""What one look at the sockets takes."""


class Machine:
    """A loop, its clock, and a client that asks again some time after it was answered."""

    def __init__(self, *, waking_s: float = 60e-6) -> None:
        self.now = 1.0
        self.waking_s = waking_s
        self.awake_s = 0.0
        self.vigils = 0
        self._soon: list[Callable[[], None]] = []
        self.vigil = Vigil(self)  # type: ignore[arg-type]

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def ask(self, times: int, pause_s: float) -> None:
        """So many ticks with this pause of the client between them."""
        for _ in range(times):
            self.vigil.begin()
            self.vigils += self.vigil.is_kept
            comes = self.now + pause_s
            while self._soon and self.now < comes:
                self._look()
            if not self._soon:
                self.now = max(self.now, comes) + self.waking_s
            self._soon.clear()
            self.vigil.end()

    def _look(self) -> None:
        self.now += LOOK_S
        self.awake_s += LOOK_S
        looks, self._soon = self._soon, []
        for look in looks:
            look()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(module, "perf_counter", lambda: machine.now)
    return machine


def test_a_client_that_comes_back_at_once_is_awaited_every_time(machine: Machine) -> None:
    machine.ask(200, pause_s=20e-6)
    assert machine.vigils == 200


def test_vigils_become_rare_while_nobody_comes(machine: Machine) -> None:
    machine.ask(200, pause_s=0.1)
    assert machine.vigils <= 8
    assert machine.awake_s < 8 * MAX_GAP_S


def test_vigils_come_back_with_the_clients(machine: Machine) -> None:
    machine.ask(200, pause_s=0.1)
    machine.vigils = 0
    machine.ask(200, pause_s=20e-6)
    assert machine.vigils > 50


def test_a_machine_that_wakes_slowly_keeps_longer_vigils(machine: Machine) -> None:
    machine.waking_s = 150e-6
    machine.ask(300, pause_s=80e-6)  # more than half of the first guess
    assert machine.vigil.length_s > 80e-6 > FIRST_GAP_S / 2
    machine.vigils = 0
    machine.ask(100, pause_s=80e-6)
    assert machine.vigils == 100


def test_a_vigil_never_takes_longer_than_what_it_saves(machine: Machine) -> None:
    """A client whose pause is long beside the waking costs less asleep."""
    machine.ask(1000, pause_s=180e-6)
    machine.awake_s = 0.0
    machine.ask(1000, pause_s=180e-6)
    assert machine.awake_s < 1000 * 10e-6


def test_a_long_pause_is_forgotten_soon(machine: Machine) -> None:
    machine.ask(1, pause_s=60.0)
    machine.ask(40, pause_s=20e-6)
    assert machine.vigils > 30
