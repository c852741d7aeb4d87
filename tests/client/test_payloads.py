"""What Python values become on their way: data in, plain data out, and nothing that could run."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import threading
import uuid
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pydantic
import pytest

from headrace.client.payloads import decode_payload, encode_payload
from headrace.errors import InvalidCommand
from tests.client.faces import complete


@dataclasses.dataclass
class Point:
    x: int
    labels: set[str]


class Order(msgspec.Struct):
    id: int
    lines: list[Point]


class Address(pydantic.BaseModel):
    street: str
    since: date


class Color(enum.Enum):
    RED = "red"


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
PAYLOADS = [
    (None, None),
    ("text with ☃", "text with ☃"),
    (b"\x00\xff", b"\x00\xff"),
    ((1, 2), [1, 2]),
    ({"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}),
    (1.5, 1.5),
    (True, True),
    (-(2**31), -(2**31)),
    (2**53 - 1, float(2**53 - 1)),
    ({"at": 1_700_000_000_000}, {"at": 1_700_000_000_000.0}),
    (NOON, NOON),
    (uuid.UUID(int=7), str(uuid.UUID(int=7))),
    (decimal.Decimal("1.10"), "1.10"),
    (Color.RED, "red"),
    (Point(1, {"a"}), {"x": 1, "labels": ["a"]}),
    (Order(2**40, [Point(1, set())]), {"id": float(2**40), "lines": [{"x": 1, "labels": []}]}),
    (Address(street="Main", since=date(2020, 1, 2)), {"street": "Main", "since": "2020-01-02"}),
    ([Address(street="Main", since=date(2020, 1, 2))], [{"street": "Main", "since": "2020-01-02"}]),
]


@pytest.mark.parametrize(("value", "shown"), PAYLOADS, ids=lambda value: type(value).__name__)
async def test_values_come_back_as_plain_data(q: Any, value: Any, shown: Any) -> None:
    job = await q.add("n", value)
    assert (await job.info()).data == shown
    assert type((await job.info()).data) is type(shown)
    await complete(q, value)
    assert await job.result(5) == shown


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**64, {"deep": [10**30]}])
async def test_an_integer_that_others_would_misread_is_refused(q: Any, value: Any) -> None:
    with pytest.raises(InvalidCommand, match="send it as text"):
        await q.add("n", value)


@pytest.mark.parametrize("value", [object(), threading.Lock(), lambda: None, {"x": [pytest]}, ValueError("x")])
def test_what_only_pickle_could_carry_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(InvalidCommand, match=r"plain values only, not .*(object|lock|function|module|ValueError)"):
        encode_payload(value)


def test_what_never_ends_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidCommand, match="cannot be encoded"):
        encode_payload(endless)


def test_a_datetime_without_a_zone_travels_as_text_so_that_nobody_guesses_one() -> None:
    assert decode_payload(encode_payload({"at": datetime(2030, 1, 1)})) == {"at": "2030-01-01T00:00:00"}


def test_spans_travel_as_text() -> None:
    assert decode_payload(encode_payload(timedelta(hours=1))) == "PT3600S"


def test_the_absent_value_of_javascript_is_none() -> None:
    assert decode_payload(b"\x81\xa1a\xd4\x00\x00") == {"a": None}


async def test_data_beyond_the_limit_is_refused(q: Any) -> None:
    with pytest.raises(InvalidCommand, match="Job data too large"):
        await q.add("n", b"x" * (10 * 1024 * 1024 + 1))
