"""Frames of the KV stream: their structs, their bytes, their bounds. It opens no socket and touches no pool.

A frame is `u32 header length | u32 payload length | msgpack header | payload`, little-endian. Only `Slice` has a
payload. Every length is checked against its bound before a byte is allocated for it.
"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import Annotated

import msgspec

from pdd.errors import TransferError
from pdd.kv import ModelIdentity
from pdd.types import AttemptKey, Peer

VERSION = 1
"""Of the stream's protocol; peers of different versions refuse each other."""

PREFIX_BYTES = 8
MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Unsigned64 = Annotated[int, msgspec.Meta(ge=0)]


class NackReason(StrEnum):
    """Why a slice was not applied. Only `CHECKSUM` is worth sending the slice again."""

    UNKNOWN = "unknown or closed transfer"
    RANGE = "does not fit the transfer"
    CHECKSUM = "checksum differs"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The sender's first frame on a connection: who sends, and what its KV bytes mean."""

    version: int
    identity: ModelIdentity
    dtype: str
    sender: Peer

    def meaning(self) -> dict[str, object]:
        """Everything that must be equal at both ends."""
        return {"version": self.version, **msgspec.structs.asdict(self.identity), "dtype": self.dtype}


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answer to `Hello`. The sender compares `receiver.epoch` with its tickets."""

    receiver: Peer


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """Answer to `Hello`: `field` is the first property in which the two ends differ. The connection ends."""

    field: str
    receiver_has: str
    sender_has: str


class Slice(msgspec.Struct, frozen=True, tag="slice"):
    """KV of some tokens, layers and heads of one transfer.

    The payload is `[num_layers, 2 (k, v), num_tokens, num_heads, head_dim]` in C order; `checksum` is its xxh3_64.
    `seq` is unique among the sender's unanswered slices.
    """

    seq: int
    transfer_id: str
    key: AttemptKey
    first_token: Count
    num_tokens: Count
    first_layer: Count
    num_layers: Count
    first_head: Count
    num_heads: Count
    dtype: str
    checksum: Unsigned64


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Slice `seq` has been applied in the receiver's pool."""

    seq: int


class Nack(msgspec.Struct, frozen=True, tag="nack"):
    """Slice `seq` was not applied."""

    seq: int
    reason: NackReason


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Sign of life. `clock_s` is the pinger's own clock; it means nothing to anyone else."""

    clock_s: float


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to `Ping`, with its `clock_s`."""

    clock_s: float


def first_difference(receiver: dict[str, object], sender: dict[str, object]) -> Refuse | None:
    """The refusal for the first key, in the receiver's order, under which the two differ; None if there is none."""
    for field, value in receiver.items():
        if sender[field] != value:
            return Refuse(field, str(value), str(sender[field]))
    return None


Frame = Hello | Welcome | Refuse | Slice | Ack | Nack | Ping | Pong

_prefix = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame, payload_bytes: int = 0) -> bytes:
    """Bytes of `frame` up to its payload, which the caller sends right after them."""
    header = _encoder.encode(frame)
    return _prefix.pack(len(header), payload_bytes) + header


def decode_prefix(data: bytes) -> tuple[int, int]:
    """Header and payload length from the first `PREFIX_BYTES` of a frame. Raises `TransferError` out of bounds."""
    header_bytes, payload_bytes = _prefix.unpack(data)
    if not 0 < header_bytes <= MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransferError(f"frame out of bounds: header of {header_bytes} bytes, payload of {payload_bytes}")
    return header_bytes, payload_bytes


def decode_header(data: bytes, payload_bytes: int) -> Frame:
    """The frame whose header is `data`. Raises `TransferError` if it is none, or may not have a payload."""
    try:
        frame = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(f"not a frame: {error}") from error
    if payload_bytes and not isinstance(frame, Slice):
        raise TransferError(f"{type(frame).__name__} with a payload of {payload_bytes} bytes")
    return frame
