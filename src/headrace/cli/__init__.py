"""The command line: `headrace serve` and friends. Each subcommand imports only what it needs when it runs."""

from headrace.cli.main import main

__all__ = ["main"]
