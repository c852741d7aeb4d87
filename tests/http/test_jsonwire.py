"""JSON to MessagePack and back: nothing is lost, and nothing that a client can store breaks an answer."""

from __future__ import annotations

import base64
import json
import math
import struct
from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.server.jsonwire import InvalidJson, _Renderer, from_json, packed_to_json
from tests.http.webserver import WebServer
from tests.scale import scaled

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5), max_leaves=20
)
EXTENSIONS = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20))
DATES = st.datetimes(datetime(1970, 1, 1), datetime(2500, 1, 1), timezones=st.just(UTC))
KEYS = TEXT.map("t{}".format) | st.integers(-99, 99) | st.booleans() | st.none() | st.binary(min_size=1, max_size=5)
ANYTHING = st.recursive(
    SCALARS | st.binary(max_size=20) | st.floats() | EXTENSIONS | DATES | st.integers(-(2**63), 2**64 - 1),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, datetime=True))


def shown(value: Any) -> Any:
    return json.loads(packed_to_json(packed(value)))


@settings(max_examples=scaled(200, 3000))
@given(VALUES)
def test_what_came_as_json_goes_as_the_same_json(value: Any) -> None:
    encoded = msgpack.packb(from_json(json.dumps(value).encode()))
    assert json.loads(packed_to_json(encoded)) == value


@settings(max_examples=scaled(200, 3000))
@given(VALUES)
def test_javascript_can_read_every_number(value: Any) -> None:
    def check(item: Any) -> None:
        if isinstance(item, bool):
            return
        if isinstance(item, int):
            assert -(2**31) <= item < 2**32
        elif isinstance(item, list):
            list(map(check, item))
        elif isinstance(item, dict):
            list(map(check, item.values()))

    check(from_json(json.dumps(value).encode()))


@settings(max_examples=scaled(300, 5000))
@given(ANYTHING)
def test_every_payload_can_be_shown_and_the_slow_way_shows_the_same(value: Any) -> None:
    assert json.loads(packed_to_json(packed(value))) == json.loads(_Renderer(packed(value)).render())


@settings(max_examples=scaled(300, 5000))
@given(st.binary(max_size=60))
def test_whatever_bytes_hide_in_a_text_the_answer_is_json(data: bytes) -> None:
    json.loads(packed_to_json(b"\x81\xa4data\xd9" + bytes((len(data),)) + data))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
        (datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC), "2026-01-02T03:04:05.678000Z"),
        (b"\x00\xff", "AP8="),
        (msgpack.ExtType(0, b"\x00"), None),
        (msgpack.ExtType(42, b"ab"), "YWI="),
        (math.nan, None),
        (math.inf, None),
        (1.0, 1),
        (1.5, 1.5),
        (1794780368394.0, 1794780368394),
        (1e300, 1e300),
        (2**64 - 1, 2**64 - 1),
        ({1: "a", 1.5: "b", b"k": "c"}, {"1": "a", "1.5": "b", "aw==": "c"}),
        ({True: 1, None: 2}, {"true": 1, "null": 2}),
        ({(1, 2): 3}, {"[1,2]": 3}),
    ],
)
def test_values_that_json_does_not_know(value: Any, expected: Any) -> None:
    assert shown(value) == expected


def test_a_date_beyond_iso_text_is_null_and_the_rest_is_shown() -> None:
    far = b"\xc7\x0c\xff" + struct.pack(">Iq", 0, 10**14)
    assert json.loads(packed_to_json(b"\x82\xa1d" + far + b"\xa1x\x01")) == {"d": None, "x": 1}
    assert json.loads(packed_to_json(b"\x92\xd4\xff\x00\xd6\xff\x00\x00\x00\x05")) == [None, "1970-01-01T00:00:05Z"]


def test_depth_is_no_problem() -> None:
    deep = b"\x91" * 5000 + b"\x01"
    assert packed_to_json(deep) == b"[" * 5000 + b"1" + b"]" * 5000


def test_objects_as_keys_of_objects_as_keys_are_no_problem() -> None:
    deep = b"\x81" * 900 + b"\xc0" + b"\x01" * 900
    (key,) = json.loads(packed_to_json(deep))
    (inner,) = json.loads(key)
    assert base64.b64decode(inner) == b"\x81" * 898 + b"\xc0" + b"\x01" * 898


def test_a_deep_list_as_a_key_is_shown_as_its_json_text() -> None:
    deep = b"\x81" + b"\x91" * 5000 + b"\x07" + b"\x01"
    assert packed_to_json(deep) == b'{"' + b"[" * 5000 + b"7" + b"]" * 5000 + b'":1}'


@pytest.mark.parametrize("text", [b"", b"{", b"nul", b'{"a":1,}', b"\xff", b'"\xff"', b"NaN", b"1e999", b"[" * 100_000])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidJson):
        from_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (rb'"cut \ud83d"', "cut \ufffd"),
        (rb'"\uDE00 \ud83d\ud83d\ude00\n"', "\ufffd \ufffd\U0001f600\n"),
        (rb'{"\ud83d": ["\\ud83d", "\u00e9"]}', {"\ufffd": ["\\ud83d", "\u00e9"]}),
    ],
)
def test_half_a_character_is_json_and_becomes_a_mark(text: bytes, value: object) -> None:
    assert from_json(text) == value
    assert from_json(bytearray(text)) == value


@pytest.mark.parametrize("text", [rb'"\ud8"', rb'"\ud83', rb'"\ud83d', rb'"\ud83dx" "', rb'"\u12 \ud83d"'])
def test_a_text_with_half_a_character_may_still_be_no_json(text: bytes) -> None:
    with pytest.raises(InvalidJson):
        from_json(text)


def test_an_integer_that_no_float_can_hold_is_refused() -> None:
    with pytest.raises(InvalidJson):
        from_json(b"1" + b"0" * 400)


def test_a_payload_pushed_over_tcp_is_shown_over_http(web: WebServer, queue: str) -> None:
    with web.client() as client, web.http() as http:
        job = client.ok("PUSH", queue=queue, data={"b": b"\x01", "u": msgpack.ExtType(0, b"\x00"), 5: math.nan})["id"]
        assert http.ok("GET", f"/jobs/{job}")["job"]["data"] == {"b": "AQ==", "u": None, "5": None}


def test_a_payload_pushed_over_http_reaches_tcp_with_numbers_for_javascript(web: WebServer, queue: str) -> None:
    with web.client() as client, web.http() as http:
        http.ok("POST", f"/queues/{queue}/jobs", {"data": {"at": 1794780368394, "n": 7, "neg": -(2**40)}})
        data = client.ok("PULL", queue=queue)["job"]["data"]
        assert [(value, type(value)) for value in data.values()] == [
            (1794780368394.0, float),
            (7, int),
            (float(-(2**40)), float),
        ]
