"""The core of the conformance suite, for test modules that run it once more on another kind of server."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def core_of(modules: Sequence[ModuleType], left_out: Sequence[str]) -> dict[str, Any]:
    """The test classes of these modules, as globals of another module.

    Without the tests of these names, and without those of what only backends in this process have.
    """
    classes = {}
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("Test"):
                hidden = {test: None for test in dir(value) if test in left_out or _is_local(getattr(value, test))}
                classes[f"{name}__{module.__name__.rpartition('_')[2]}"] = type(name, (value,), hidden)
    return classes


def _is_local(test: Any) -> bool:
    return inspect.isfunction(test) and "local_rig" in inspect.signature(test).parameters
