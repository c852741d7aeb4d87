"""How long a failed job waits before its next attempt.

Pure: the caller brings the randomness, so a test can pin both ends of the jitter. The formulas are those of
the protocol reference. To add a kind: add it to Kind and to _WAYS, then to the `Backoff` a client may send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

Kind = Literal["fixed", "exponential"]

DEFAULT_CAP_MS: Final = 3_600_000
# From here on any delay that matters is above every cap, and the product of floats would run to infinity.
_MAX_DOUBLINGS: Final = 62


def _fixed(attempts: int, delay_ms: float, luck: float) -> float:
    return delay_ms * (0.8 + 0.4 * luck)


def _exponential(attempts: int, delay_ms: float, luck: float) -> float:
    return delay_ms * float(2 ** min(attempts, _MAX_DOUBLINGS)) * (0.5 + luck)


_WAYS: Final[dict[Kind, Callable[[int, float, float], float]]] = {
    "fixed": _fixed,
    "exponential": _exponential,
}


def retry_delay_ms(n: int, *, delay_ms: float, kind: Kind, max_delay_ms: float | None, rng: Callable[[], float]) -> int:
    """Whole milliseconds to wait after failure number `n` (the first failure is 1).

    `rng` returns [0, 1), as `random.random` does. The cap comes after the jitter: a capped delay is exact.
    """
    cap_ms = DEFAULT_CAP_MS if max_delay_ms is None else max_delay_ms
    return round(min(_WAYS[kind](n, delay_ms, rng()), cap_ms))
