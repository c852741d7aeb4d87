"""Headrace: a job queue that speaks the bunqueue protocol, loses nothing it acknowledged, and feeds a lake."""

__version__ = "0.1.0.dev0"
