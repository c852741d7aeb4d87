"""Where jobs are stored. `base` is the contract, `local` and `valkey` implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from headrace.backends.local.backend import LocalBackend
    from headrace.backends.valkey.backend import ValkeyBackend

    AnyBackend: TypeAlias = LocalBackend | ValkeyBackend
