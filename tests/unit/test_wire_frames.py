"""Frames out of a byte stream, however it is cut."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.commands._base import ErrorReply, Ok
from headrace.frames import Frames
from headrace.wire import append_reply

bodies = st.lists(st.binary(max_size=40), max_size=12)


def stream(parts: list[bytes]) -> bytes:
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


@settings(max_examples=200)
@given(bodies, st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_any_cut_gives_the_same_frames(parts: list[bytes], sizes: list[int]) -> None:
    data, frames, got, turn = stream(parts), Frames(), [], 0
    while data:
        size = sizes[turn % len(sizes)]
        turn += 1
        got += frames.feed(data[:size])
        data = data[size:]
    assert [bytes(frame) for frame in got] == parts
    assert not frames.held
    assert frames.violation is None


alike = st.integers(0, 9).flatmap(lambda length: st.lists(st.binary(min_size=length, max_size=length), max_size=9))
full_of_heads = st.lists(st.sampled_from([b"\0\0\0\x04", b"\0\0\0", b"\0", b"\x04"]), max_size=9).map(b"".join)


@settings(max_examples=300)
@given(st.one_of(alike.map(stream), full_of_heads), st.binary(max_size=3))
def test_frames_of_one_length_are_split_as_any_others(data: bytes, rest: bytes) -> None:
    at_once, byte_by_byte = Frames(), Frames()
    got = at_once.feed(data + rest)
    assume(at_once.violation is None)
    assert got == [frame for n in range(len(data + rest)) for frame in byte_by_byte.feed((data + rest)[n : n + 1])]
    assert (at_once.held, at_once.awaited) == (byte_by_byte.held, byte_by_byte.awaited)


def test_the_limit_holds_for_frames_of_one_length_too() -> None:
    frames = Frames(limit=10)
    assert frames.feed(stream([b"x" * 11] * 3)) == []
    assert frames.violation is not None


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_frame_that_has_begun_is_partial_until_it_ends(cut: int) -> None:
    frames, data = Frames(), stream([b"abcde"])
    assert frames.feed(data[:cut]) == []
    assert frames.held
    assert [bytes(frame) for frame in frames.feed(data[cut:])] == [b"abcde"]
    assert not frames.held


def test_the_limit_itself_is_allowed_and_one_more_is_not() -> None:
    frames = Frames(limit=10)
    assert len(frames.feed(stream([b"x" * 10]))) == 1
    assert frames.feed(struct.pack(">I", 11)) == []
    assert str(frames.violation) == "Frame too large: 11 bytes exceeds maximum 10"


def test_a_length_beyond_the_limit_is_refused_before_its_body_comes() -> None:
    frames = Frames(limit=10)
    assert [bytes(frame) for frame in frames.feed(stream([b"good"]) + b"\xff\xff\xff\xff")] == [b"good"]
    assert frames.violation is not None


def test_a_length_that_comes_byte_by_byte_is_refused_at_its_last() -> None:
    frames = Frames(limit=10)
    for byte in (b"\x00", b"\x00", b"\x01"):
        frames.feed(byte)
        assert frames.violation is None
    frames.feed(b"\x00")
    assert frames.violation is not None


def test_many_small_reads_of_a_large_frame_are_joined_once() -> None:
    frames, body = Frames(), b"z" * 1_000_000
    data = stream([body])
    for at in range(0, len(data) - 1000, 1000):
        assert frames.feed(data[at : at + 1000]) == []
    (frame,) = frames.feed(data[len(data) - len(data) % 1000 - (1000 if len(data) % 1000 == 0 else 0) :])
    assert len(frame) == len(body)


@pytest.mark.parametrize("req_id", [b"", msgspec.msgpack.encode("r1"), msgspec.msgpack.encode(7), b"\xc0"])
def test_a_reply_carries_its_request_id_as_it_came(req_id: bytes) -> None:
    out = bytearray(b"before")
    length = append_reply(out, Ok(), req_id)
    assert out[:6] == b"before"
    assert struct.unpack(">I", out[6:10]) == (length,)
    reply = msgspec.msgpack.decode(bytes(out[10:]))
    assert reply.pop("ok") is True
    assert reply == ({"reqId": msgspec.msgpack.decode(req_id)} if req_id else {})


def test_replies_follow_each_other_in_one_outbox() -> None:
    out = bytearray()
    append_reply(out, Ok(), b"\x01")
    append_reply(out, ErrorReply(error="no"), b"\x02")
    decoded = [msgspec.msgpack.decode(bytes(frame)) for frame in Frames().feed(bytes(out))]
    assert decoded == [{"ok": True, "reqId": 1}, {"error": "no", "ok": False, "reqId": 2}]
