"""`headrace valkey`: prepare a Valkey server for programs that bring no library of their own."""

from __future__ import annotations

import argparse
import asyncio

from headrace.cli.session import add_action, no_valkey


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "`init` loads our function libraries on a server, or on every primary of a cluster, where they are missing or "
        "old. `library` prints one of them, for other tools to load."
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    init = add_action(actions, "init", "load the libraries where they are missing or old")
    init.add_argument("--url", default="valkey://localhost:6379/0", help="where (default: %(default)s)")
    init.set_defaults(run=run_init)
    library = add_action(actions, "library", "print the Lua source of a library")
    library.add_argument(
        "name", nargs="?", choices=("glidemq", "headrace"), default="glidemq", help="which one (default: glidemq)"
    )
    library.set_defaults(run=run_library)


def run_library(arguments: argparse.Namespace) -> int:
    from headrace.backends.valkey.library import sources

    print(sources()[arguments.name])
    return 0


def run_init(arguments: argparse.Namespace) -> int:
    from headrace.backends.valkey.connection import Unreachable

    try:
        asyncio.run(_init(arguments.url))
    except Unreachable as error:
        raise no_valkey(error) from None
    return 0


async def _init(url: str) -> None:
    from headrace.backends.valkey.backend import transport_of
    from headrace.backends.valkey.library import HEADRACE_VERSION, ensure_libraries, is_own_glidemq
    from headrace.backends.valkey.url import parse_url

    parsed = parse_url(url)
    server = transport_of(parsed)
    try:
        await server.open()
        primaries = server.primaries()
        owner = await ensure_libraries(primaries)
    finally:
        await server.close()
    whose = "ours" if is_own_glidemq(owner) else "of a Node process, left alone"
    count = f"{len(primaries)} {'primary' if len(primaries) == 1 else 'primaries'}"
    print(f"{parsed.shown}: {count}, headrace {HEADRACE_VERSION}, glidemq {owner} ({whose})")
