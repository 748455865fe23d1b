"""Frames survive the round trip; garbage is refused by an error of ours before anything is allocated."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.errors import TransferError
from pdd.kv import ModelIdentity
from pdd.transfer import wire
from pdd.types import AttemptKey, Peer, Role

text = st.text(max_size=40)
count = st.integers(0, (1 << 31) - 1)
seq = st.integers(0, (1 << 63) - 1)
peers = st.builds(Peer, dc=text, role=st.sampled_from(Role), instance=text, epoch=text)
identities = st.builds(ModelIdentity, text, text, count, count, count, text)
frames = st.one_of(
    st.builds(wire.Hello, count, identities, text, peers),
    st.builds(wire.Welcome, peers),
    st.builds(wire.Refuse, text, text, text),
    st.builds(
        wire.Slice,
        seq,
        text,
        st.builds(AttemptKey, text, count),
        *[count] * 6,
        text,
        st.integers(0, (1 << 64) - 1),
    ),
    st.builds(wire.Ack, seq),
    st.builds(wire.Nack, seq, st.sampled_from(wire.NackReason)),
    st.builds(wire.Ping, st.floats(allow_nan=False)),
    st.builds(wire.Pong, st.floats(allow_nan=False)),
)


@given(frames, st.integers(0, wire.MAX_PAYLOAD_BYTES))
def test_round_trip(frame: wire.Frame, payload_bytes: int) -> None:
    payload_bytes = payload_bytes if isinstance(frame, wire.Slice) else 0
    data = wire.encode(frame, payload_bytes)
    header_bytes, payload = wire.decode_prefix(data[: wire.PREFIX_BYTES])
    header = data[wire.PREFIX_BYTES :]
    assert (header_bytes, payload) == (len(header), payload_bytes)
    assert wire.decode_header(header, payload) == frame


@given(st.binary(min_size=8, max_size=8), st.binary(max_size=200))
def test_garbage_gives_a_frame_within_bounds_or_our_error(prefix: bytes, header: bytes) -> None:
    try:
        header_bytes, payload_bytes = wire.decode_prefix(prefix)
    except TransferError:
        pass
    else:
        assert 0 < header_bytes <= wire.MAX_HEADER_BYTES
        assert payload_bytes <= wire.MAX_PAYLOAD_BYTES
    try:
        frame = wire.decode_header(header, 0)
    except TransferError:
        return
    assert isinstance(frame, wire.Frame)


@given(frames, st.data())
def test_a_flipped_header_gives_a_frame_or_our_error(frame: wire.Frame, data: st.DataObject) -> None:
    header = bytearray(wire.encode(frame)[wire.PREFIX_BYTES :])
    header[data.draw(st.integers(0, len(header) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(TransferError):
        assert isinstance(wire.decode_header(bytes(header), 0), wire.Frame)


@pytest.mark.parametrize(("header_bytes", "payload_bytes"), [(0, 0), (wire.MAX_HEADER_BYTES + 1, 0), (10, 1 << 31)])
def test_lengths_out_of_bounds_are_refused(header_bytes: int, payload_bytes: int) -> None:
    with pytest.raises(TransferError, match="out of bounds"):
        wire.decode_prefix(struct.pack("<II", header_bytes, payload_bytes))


def test_only_a_slice_may_have_a_payload() -> None:
    header = wire.encode(wire.Ack(1))[wire.PREFIX_BYTES :]
    with pytest.raises(TransferError, match="Ack with a payload"):
        wire.decode_header(header, 5)


def test_negative_ranges_are_refused() -> None:
    good = wire.Slice(1, "t", AttemptKey("r", 1), 0, 1, 0, 1, 0, 1, "float32", 0)
    bad = msgspec.structs.replace(good, first_token=-1)
    with pytest.raises(TransferError, match="not a frame"):
        wire.decode_header(wire.encode(bad)[wire.PREFIX_BYTES :], 0)


def test_the_first_difference_is_named() -> None:
    identity = ModelIdentity("w", "a", 1, 2, 3, "r")
    sender = Peer("a", Role.PREFILL, "p", "e")
    ours = wire.Hello(wire.VERSION, identity, "float32", sender)
    theirs = msgspec.structs.replace(ours, identity=msgspec.structs.replace(identity, head_dim=4, rope="x"))
    assert wire.first_difference(ours.meaning(), ours.meaning()) is None
    assert wire.first_difference(ours.meaning(), theirs.meaning()) == wire.Refuse("head_dim", "3", "4")
