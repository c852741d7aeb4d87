"""The npm package `bunqueue`, unmodified, under bun: one script per theme, each check named in the report."""

from __future__ import annotations

import pytest

from .conftest import BunRun, ServerAddress

THEMES = [
    "queue",
    "worker",
    "events",
    "flows",
    "schedulers",
    "dlq",
    "groups",
    "limits",
    "metrics",
    "wrappers",
]


@pytest.mark.parametrize("theme", THEMES)
def test_official_bun_client_is_served(theme: str, bun: BunRun, server: ServerAddress) -> None:
    assert_all_passed(bun(f"{theme}.ts", server))


def test_official_bun_client_authenticates(bun: BunRun, guarded_server: ServerAddress) -> None:
    assert_all_passed(bun("auth.ts", guarded_server))


def assert_all_passed(checks: list[dict[str, object]]) -> None:
    broken = [f"  {check['check']}: {check['detail']}" for check in checks if check["ok"] is not True]
    assert not broken, f"{len(broken)} of {len(checks)} checks failed:\n" + "\n".join(broken)
