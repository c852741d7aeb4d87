"""Every command has a protocol test, and every error that a command documents is asked for in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.commands import REGISTRY

# The registry-driven tests name no command of their own, so what they say does not count here.
_GENERIC = {"test_coverage.py", "test_wrong_types.py", "test_golden.py", "test_frames.py", "steps.py"}
SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")) if path.name not in _GENERIC
)
ERRORS = sorted({text for spec in REGISTRY.values() for text in spec.errors})


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_command_is_called_in_a_protocol_test(name: str) -> None:
    assert re.search(rf'\b(?:call|ok|error|send|_data)\((?:client, |\w+, )?"{name}"', SOURCES), name


@pytest.mark.parametrize("text", ERRORS)
def test_every_documented_error_occurs_in_a_protocol_test(text: str) -> None:
    literal_parts = [re.escape(part) for part in re.split(r"<[^>]+>", text)]
    assert re.search(".+".join(literal_parts), SOURCES), text
