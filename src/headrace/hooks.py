"""User hooks, called when something happens: each is optional, and what they raise is logged and breaks nothing."""

from __future__ import annotations

import logging
from typing import Any


class Hooks:
    def __init__(self, owner: object, logger: logging.Logger) -> None:
        self._owner = owner
        self._log = logger

    def tell(self, hook: str, *told: Any) -> None:
        call = getattr(self._owner, hook, None)
        if call is not None:
            try:
                call(*told)
            except Exception:
                self._log.exception("the metrics hook %s failed", hook)
