"""The core of the conformance suite, for test modules that run it once more on another kind of server."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any


def core_of(modules: Sequence[ModuleType], left_out: Sequence[str]) -> dict[str, Any]:
    """The test classes of these modules, without the tests of these names, as globals of another module."""
    classes = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("Test"):
                hidden = {test: None for test in left_out if hasattr(value, test)}
                classes[f"{name}__{module.__name__.rpartition('_')[2]}"] = type(name, (value,), hidden)
    return classes
