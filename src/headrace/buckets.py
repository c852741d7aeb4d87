"""The token bucket behind rate limits: how many may pass now, and when the next may.

Pure: the caller brings the time. A bucket holds at most `capacity` tokens and gains `refill_per_ms` of them
every millisecond; handing out a job costs one. A bucket that can never hold what is requested returns None
instead of a waiting time, so that nobody sets a timer for it.
"""

from __future__ import annotations

import math
from typing import Final

# Refills are sums of fractions: three thirds of a token must count as one.
_DUST: Final = 1e-9


class TokenBucket:
    """`capacity` tokens at most; `tokens` of them were there at `stamp` (ms)."""

    __slots__ = ("capacity", "refill_per_ms", "stamp", "tokens")

    def __init__(self, capacity: float, refill_per_ms: float, tokens: float, stamp: float) -> None:
        self.capacity = capacity
        self.refill_per_ms = refill_per_ms
        self.tokens = min(tokens, capacity)
        self.stamp = stamp

    @classmethod
    def full(cls, limit: float, duration_ms: float, now_ms: float) -> TokenBucket:
        """`limit` tokens per `duration_ms`, all of them there already."""
        return cls(limit, limit / duration_ms, limit, now_ms)

    def take(self, now_ms: float, n: float = 1) -> bool:
        """Take `n` tokens if they are all there; else take none."""
        self._refill(now_ms)
        if self.tokens + _DUST < n:
            return False
        self.tokens = max(0.0, self.tokens - n)
        return True

    def peek(self, now_ms: float) -> float:
        """Tokens there now."""
        self._refill(now_ms)
        return self.tokens

    def wait_ms(self, now_ms: float, n: float = 1) -> int | None:
        """Milliseconds until `take(n)` would succeed if nobody else takes; None if it never will."""
        self._refill(now_ms)
        missing = n - self.tokens
        if missing <= _DUST:
            return 0
        if n > self.capacity or self.refill_per_ms <= 0:
            return None
        return math.ceil((missing - _DUST) / self.refill_per_ms)

    def _refill(self, now_ms: float) -> None:
        # A clock that went back refills nothing, but becomes the new reference: otherwise the bucket would
        # stand still until the old time is reached again.
        if now_ms > self.stamp:
            self.tokens = min(self.capacity, self.tokens + (now_ms - self.stamp) * self.refill_per_ms)
        self.stamp = now_ms
