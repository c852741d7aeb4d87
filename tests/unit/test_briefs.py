"""headrace.briefs: the beginning of a payload has its shape, is short and costs nothing."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.briefs import BRIEF_BYTES, BRIEF_TEXT, brief, brief_text

MEGABYTES = "x" * 10_000_000


def shortened(value: Any) -> Any:
    encoded = brief(msgspec.msgpack.encode(value))
    assert len(encoded) <= 2 * BRIEF_BYTES
    return msgspec.msgpack.decode(encoded)


def test_a_short_payload_is_whole() -> None:
    encoded = msgspec.msgpack.encode({"to": "ada@example.com", "tags": ["a", None, 1.5, -7, b"raw"]})
    assert brief(encoded) is encoded


def test_long_texts_are_cut_and_what_follows_them_is_kept() -> None:
    found = shortened(
        {"image": MEGABYTES, "raw": MEGABYTES.encode(), "name": "portrait", "sizes": [1, 300, -70_000, 2.5]}
    )
    assert found["image"] == "x" * BRIEF_TEXT + "…"
    assert found["raw"] == b"x" * BRIEF_TEXT
    assert (found["name"], found["sizes"]) == ("portrait", [1, 300, -70_000, 2.5])


@pytest.mark.parametrize("value", [list(range(1_000_000)), [[]] * 1_000_000, [{}] * 70_000, ["é" * 500] * 1000])
def test_of_long_lists_the_first_entries_are_kept(value: list[Any]) -> None:
    found = shortened(value)
    assert 1 < len(found) < 1000
    assert found[0] == value[0] or found[0] == "é" * (BRIEF_TEXT // 2) + "…"


def test_of_long_maps_the_first_entries_are_kept() -> None:
    found = shortened({f"key{n}": n for n in range(100_000)})
    assert list(found)[:50] == [f"key{n}" for n in range(50)]
    assert found["key7"] == 7


def test_what_is_nested_without_end_ends() -> None:
    encoded = b"\x91" * 5000 + b"\xc0"
    assert msgspec.msgpack.decode(brief(encoded)) == [[[[[[[["…"]]]]]]]]


def test_values_of_foreign_types_are_left_out() -> None:
    foreign = msgspec.msgpack.Ext(5, b"x" * 3000)
    assert shortened([1, foreign, 2]) == [1, None, 2]


def test_the_length_of_a_payload_costs_nothing() -> None:
    encoded = msgspec.msgpack.encode({"text": MEGABYTES, "list": list(range(1_000_000))})
    began = time.process_time()
    for _ in range(100):
        brief(encoded)
    assert time.process_time() - began < 1


_TEXT = st.text(max_size=400)
_PAYLOADS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | _TEXT | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner),
    max_leaves=60,
)


@given(_PAYLOADS)
def test_every_payload_has_a_beginning_of_its_own_type(value: Any) -> None:
    padded = [value, MEGABYTES[:BRIEF_BYTES], value]
    found = shortened(padded)
    assert isinstance(found[0], type(value))


def test_a_text_is_cut() -> None:
    assert (brief_text(None), brief_text("short")) == (None, "short")
    assert brief_text(MEGABYTES) == "x" * BRIEF_BYTES + "…"
