"""Spark finds data sources in modules of this name by itself. It imports all of them, so nothing else happens here."""

from __future__ import annotations

from headrace.pipeline.source import FoundSource as DefaultSource

__all__ = ["DefaultSource"]
