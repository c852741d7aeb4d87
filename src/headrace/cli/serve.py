"""`headrace serve`: the server in the foreground. Flags are made from the settings, so none can be forgotten."""

from __future__ import annotations

import argparse
import gc
import json
import logging
from typing import Any

from headrace.config import SETTING_HELP, Settings, load_settings, split_tokens


def add_serve(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "serve",
        help="run a server in the foreground",
        description="Run a server in the foreground. It prints one line when it listens and stops on SIGTERM "
        "or Ctrl-C after the replies in flight have left. Flags win over environment (HEADRACE_TCP_PORT, ...), "
        "environment over the config file.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same names (tcp_port = 6789)")
    defaults = Settings()
    for name in Settings.__struct_fields__:
        default = getattr(defaults, name)
        help_text = SETTING_HELP[name]
        if default not in (None, []) and "default" not in help_text:
            help_text += f" (default: {default})"
        flag = f"--{name.replace('_', '-')}"
        if name in _SWITCHES:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
            continue
        is_number = isinstance(default, int) or name in _OPTIONAL_NUMBERS
        parser.add_argument(
            flag,
            metavar="N" if is_number else name.rsplit("_", 1)[-1].upper(),
            action="extend" if name in _LISTS else "store",
            type=split_tokens if name in _LISTS else int if is_number else str,
            help=help_text,
        )
    parser.set_defaults(run=run)


_LISTS = ("auth_tokens", "cors_allow_origin", "allowed_hosts", "webhook_allow")
_OPTIONAL_NUMBERS = ("completed_retention_ms", "capture_keep_bytes")
_SWITCHES = ("metrics_auth", "webhook_require_https")


def run(arguments: argparse.Namespace) -> int:
    flags = {name: value for name, value in vars(arguments).items() if name != "run"}
    settings = load_settings(flags)
    _configure_logging(settings)
    gc.disable()  # imports make many objects and no garbage; the server turns it on again when it listens
    from headrace.server.app import serve

    serve(settings)
    return 0


class JsonLines(logging.Formatter):
    """One JSON object per record, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        shown: dict[str, Any] = {
            "ts": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, ensure_ascii=False)


def _configure_logging(settings: Settings) -> None:
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
