"""`headrace serve`: the server in the foreground. Flags are made from the settings, so none can be forgotten."""

from __future__ import annotations

import argparse
import gc

from headrace.cli.logs import configure_logging
from headrace.config import SETTING_HELP, SETTING_KINDS, Settings, load_settings, split_list


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a server in the foreground. It prints one line once it listens. On SIGTERM or Ctrl-C it sends the replies "
        "in flight and stops. Flags win over environment (HEADRACE_TCP_PORT, ...), environment over the "
        "config file."
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the same names (tcp_port = 6789)")
    defaults = Settings()
    for name in Settings.__struct_fields__:
        default = getattr(defaults, name)
        help_text = SETTING_HELP[name]
        if default not in (None, []) and "default" not in help_text:
            help_text += f" (default: {default})"
        flag = f"--{name.replace('_', '-')}"
        kind = SETTING_KINDS[name]
        if kind is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
            continue
        parser.add_argument(
            flag,
            metavar="N" if kind is int else name.rsplit("_", 1)[-1].upper(),
            action="extend" if kind is list else "store",
            type=split_list if kind is list else kind,
            help=help_text,
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    given = vars(arguments)
    flags = {name: given[name] for name in (*Settings.__struct_fields__, "config")}
    settings = load_settings(flags)
    configure_logging(settings.log_format, settings.log_level)
    gc.disable()  # imports make many objects and no garbage; the server turns it on again when it listens
    from headrace.server.app import serve

    serve(settings)
    return 0
