"""The two function libraries: assembled from their Lua files, and loaded where they are missing or outdated.

`glidemq` belongs to whoever came first: a Node process replaces it at its start with its own, and we never touch one
that is not ours. `headrace` is always ours and replaced by a newer one only.

A server has one `headrace` library, that of the newest program that connected to it, and older programs call it too.
That is safe while their calls mean the same, which is what a generation is. Its number is part of the names of the
functions: a program of an older generation no longer finds its functions, and gets an error instead of doing harm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Final

from headrace.backends.valkey.connection import Connection, ServerError, Unfit
from headrace.backends.valkey.transport import all_of
from headrace.errors import StorageUnavailable

GENERATION: Final = 1
"""Counts up when programs before and after must not work on the same queues: other arguments, replies or keys."""
REVISION: Final = 27
"""Counts up with every change to a Lua file: servers get the newer one."""

GLIDEMQ_VERSION: Final = f"40+headrace.{REVISION}"
HEADRACE_VERSION: Final = f"{GENERATION}.{REVISION}"
_PARTS: Final = (
    "call",
    "jobs",
    "order",
    "families",
    "intake",
    "groups",
    "settlement",
    "delivery",
    "leases",
    "control",
    "schedulers",
    "flows",
)
_MISSING: Final = re.compile(r"Function not found|Function not loaded|No matching script|NOSCRIPT", re.IGNORECASE)
_COMMAND: Final = re.compile(r"call\(('[A-Z]+'(?:, '[A-Z]+')?)")
"""A command that functions use, with its second word if it has one."""
_EXISTS: Final = re.compile(r"already exists", re.IGNORECASE)


def _read(*path: str) -> str:
    return files("headrace.backends.valkey").joinpath("lua", *path).read_text(encoding="utf-8")


@cache
def headrace_source() -> str:
    text = "\n".join(_read("headrace", f"{part}.lua") for part in _PARTS)
    used = sorted({f"{{ {words} }}" for words in _COMMAND.findall(text)})
    facts = (
        f"local VERSION, GENERATION = '{HEADRACE_VERSION}', '{GENERATION}'",
        f"local COMMANDS = {{ {', '.join(used)} }}",
    )
    return "\n".join(["#!lua name=headrace", *facts, text])


@cache
def glidemq_source() -> str:
    return "\n".join(["#!lua name=glidemq", f"local VERSION = '{GLIDEMQ_VERSION}'", _read("glidemq.lua")])


def sources() -> dict[str, str]:
    return {"glidemq": glidemq_source(), "headrace": headrace_source()}


def function_of(verb: str) -> str:
    """What a verb is called in the library."""
    return f"headrace{GENERATION}_{verb}"


async def ensure_libraries(primaries: Sequence[Connection]) -> str:
    """Have both libraries on every primary; the version text of `glidemq`, which tells whether Node owns one."""
    owners = await all_of(*map(_ensure_both, primaries))
    return min(owners, key=is_own_glidemq, default=GLIDEMQ_VERSION)


async def _ensure_both(primary: Connection) -> str:
    await _ensure_headrace(primary)
    return await _ensure_glidemq(primary)


def is_own_glidemq(version: str) -> bool:
    return version.startswith("40+headrace.")


async def check_rights(primaries: Sequence[Connection], prefix: str) -> None:
    """Functions use commands on behalf of who calls them. One that is refused half way would leave a job nowhere, so a
    user who may not use all of them does not begin."""
    for primary in primaries:
        refused = await primary.call("FCALL", "headrace_forbidden", 0, f"{prefix}:hr:wake")
        if refused:
            commands = ", ".join(command.decode() for command in refused)
            raise Unfit(
                f"the user that this program has on Valkey may not use {commands} on {prefix}:*: give it the rights "
                "that docs/valkey.md names"
            )


async def _version(primary: Connection, function: str) -> str | None:
    try:
        return str((await primary.call("FCALL", function, 0)).decode())
    except ServerError as error:
        if _MISSING.search(str(error)):
            return None
        hint = "; functions need Valkey or Redis 7" if "unknown command" in str(error) else ""
        raise StorageUnavailable(f"Valkey refuses function calls: {error}{hint}") from error


async def _ensure_headrace(primary: Connection) -> None:
    version = await _version(primary, "headrace_version")
    generation, revision = _numbers(version) if version is not None else (0, 0)
    if generation > GENERATION:
        raise Unfit(
            f"a newer Headrace works on this Valkey (functions of generation {generation}, this program has "
            f"{GENERATION}): upgrade this program"
        )
    if (generation, revision) < (GENERATION, REVISION):
        await _load(primary, headrace_source(), is_replacing=True)


def _numbers(version: str) -> tuple[int, int]:
    generation, _, revision = version.rpartition(".")
    return int(generation or 0), int(revision)


async def _ensure_glidemq(primary: Connection) -> str:
    version = await _version(primary, "glidemq_version")
    if version is None:
        await _load(primary, glidemq_source(), is_replacing=False)
        version = await _version(primary, "glidemq_version")
    elif is_own_glidemq(version) and int(version.rpartition(".")[2]) < REVISION:
        await _load(primary, glidemq_source(), is_replacing=True)
        version = GLIDEMQ_VERSION
    return version or GLIDEMQ_VERSION  # somebody flushed it meanwhile: it is loaded with the next look


async def _load(primary: Connection, source: str, *, is_replacing: bool) -> None:
    try:
        await primary.call("FUNCTION", "LOAD", *(("REPLACE",) if is_replacing else ()), source)
    except ServerError as error:
        if not is_replacing and _EXISTS.search(str(error)):
            return  # somebody else was quicker, and theirs is as good
        raise StorageUnavailable(f"Valkey does not take our function library: {error}") from error
