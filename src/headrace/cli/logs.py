"""How commands that stay in the foreground write their logs: as text for people, as JSON lines for collectors."""

from __future__ import annotations

import logging
from typing import Any, Final

_FIELDS: Final = ("job_id", "queue", "task", "attempt", "trace_id", "address", "refused")
"""What the worker adds to its records, and handlers to theirs (see headrace.worker.logs); what the server adds when it
refuses tokens (see headrace.engine.guessing)."""


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def __init__(self) -> None:
        super().__init__()
        import json

        self._dumps = json.dumps

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "ts": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        shown |= {name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return self._dumps(shown, ensure_ascii=False, default=str)  # handlers give their records anything


def configure_logging(form: str, level: str, *filters: logging.Filter) -> None:
    handler = logging.StreamHandler()
    for found in filters:
        handler.addFilter(found)
    if form == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
