"""The one dial of the suite: HEADRACE_TEST_SCALE=full runs the counts that a release is judged by."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("HEADRACE_TEST_SCALE") == "full"


def scaled(quick: int, full: int) -> int:
    return full if IS_FULL else quick
