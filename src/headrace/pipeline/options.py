"""The options of the data source `headrace`, checked in one place. Names are Spark's: any case, values are text.

To add one: a field here with its default, its row in docs/pipeline.md, and whoever reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import msgspec

from headrace.errors import HeadraceError
from headrace.model import DAY_MS
from headrace.pipeline.connection import PATIENCE_S, Connection
from headrace.pipeline.eventsource import BEGINNING, Position
from headrace.states import WORDS, State

KINDS: Final = ("events", "jobs", "results", "dlq")
_STATES: Final = tuple(word for state, word in WORDS.items() if state is not State.REMOVED)
_CHOICES: Final = {"on_duplicate": ("ignore", "fail"), "pushdown": ("auto", "off")}
_OF_SPARK: Final = ("checkpointlocation", "queryname")
"""Options of streaming queries, which Spark hands on to the source."""


class BadOption(HeadraceError):
    code = "option"


class Options(msgspec.Struct, frozen=True, rename=lambda name: name.replace("_", ""), forbid_unknown_fields=True):
    """The options of a reader or writer."""

    kind: str = "events"
    path: str | None = None
    url: str | None = None
    token: str | None = None
    token_env: str = "HEADRACE_TOKEN"
    queue: str | None = None
    state: str | None = None
    starting_offset: str = "earliest"
    ending_offset: str = "latest"
    max_events_per_trigger: int | None = None
    min_events_per_trigger: int | None = None
    max_trigger_delay: float = 60.0
    max_bytes_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    num_partitions: int = 0
    fetch_size: int = 1000
    columns: str | None = None
    consumer: str | None = None
    id_columns: str | None = None
    pipeline: str = "headrace"
    data_column: str | None = None
    id_ttl: int = DAY_MS
    batch_size: int = 1000
    max_in_flight: int = 8
    on_duplicate: str = "ignore"
    pushdown: str = "auto"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        values = {name.lower(): value for name, value in given.items() if name.lower() not in _OF_SPARK}
        try:
            options = msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise BadOption(f"the data source headrace was given a wrong option: {error}") from None
        options._check()
        return options

    def _check(self) -> None:
        if self.kind not in KINDS:
            raise BadOption(f"the option kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        for name, words in _CHOICES.items():
            if getattr(self, name) not in words:
                raise BadOption(f"the option {_spark_name(name)} must be one of {', '.join(words)}")
        if self.state is not None and (self.kind != "jobs" or self.state not in _STATES):
            raise BadOption(f"the option state is for jobs (kind), and one of {', '.join(_STATES)}")
        if self.path is not None and (self.url is not None or self.kind != "events"):
            raise BadOption("the option path names a capture folder, which has events only: give either path or url")
        for name in ("max_events_per_trigger", "min_events_per_trigger", "max_bytes_per_trigger"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise BadOption(f"the option {_spark_name(name)} must be at least 1")
        for name, least in (("fetch_size", 1), ("batch_size", 1), ("max_in_flight", 1), ("num_partitions", 0)):
            if not least <= getattr(self, name) <= 10_000:
                raise BadOption(f"the option {_spark_name(name)} must be between {least} and 10000")

    def connect(self, patience_s: float = PATIENCE_S) -> Connection:
        """A connection to the server. A token of the environment is looked up here, where the connection is made, and
        does not travel with the tasks."""
        return Connection(self.url, self.token, token_env=self.token_env, patience_s=patience_s)

    def position(self, which: str, newest: Position) -> Position:
        """`earliest`, `latest` or {"0": {"epoch": 1, "seq": 42}} as a position."""
        if which in ("earliest", "latest"):
            return BEGINNING if which == "earliest" else newest
        try:
            return from_offset(json.loads(which))
        except (ValueError, KeyError, TypeError):
            raise BadOption(
                f'an offset is earliest, latest or JSON such as {{"0": {{"epoch": 1, "seq": 42}}}}, not {which!r}'
            ) from None


def _spark_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def to_offset(position: Position) -> dict[str, dict[str, int]]:
    """A position as Spark keeps it in its checkpoint: per shard."""
    return {"0": {"epoch": position.epoch, "seq": position.seq}}


def from_offset(offset: Mapping[str, Mapping[str, int]]) -> Position:
    return Position(int(offset["0"]["epoch"]), int(offset["0"]["seq"]))
