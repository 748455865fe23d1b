"""What the two ends of the NIXL fabric say to each other, each message one NIXL notification. No I/O.

    sender   Offer ->            who it is, what its KV means
    receiver       <- Accepted | Refused | Failed
    sender   writes blocks, then Written -> (with each write; NIXL delivers it after the bytes)
    receiver       <- Applied | Failed

Nothing is written before `Accepted`.
"""

from __future__ import annotations

import msgspec

from pdd.errors import TransferError
from pdd.kv import KvSpec, ModelIdentity
from pdd.transfer import wire
from pdd.types import AttemptKey, Peer


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """The sender wants to write into the blocks of ticket `transfer_id`. `metadata` lets the receiver answer."""

    version: int
    identity: ModelIdentity
    spec: KvSpec
    sender: Peer
    metadata: bytes
    transfer_id: str
    key: AttemptKey

    def meaning(self) -> dict[str, object]:
        """Everything that must be equal at both ends: bytes are copied as they are, so the page layout too."""
        asdict = msgspec.structs.asdict
        return {"version": self.version, **asdict(self.identity), **asdict(self.spec)}


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The sender may write. It compares `receiver.epoch` with its ticket first."""

    transfer_id: str
    receiver: Peer


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The two ends cannot exchange KV."""

    transfer_id: str
    refusal: wire.Refuse


class WrittenPiece(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one block, all layers. `checksum` is xxh3_64 over these tokens only, `[layers, 2, tokens, ...]`."""

    first_token: wire.Count
    end_token: wire.Count
    checksum: wire.Unsigned64


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The blocks of `pieces` are in the receiver's pool."""

    transfer_id: str
    seq: int
    pieces: list[WrittenPiece]


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """The receiver has verified the pieces of `Written` `seq` over its own memory."""

    transfer_id: str
    seq: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The receiver takes nothing more for this transfer."""

    transfer_id: str
    reason: wire.NackReason


Message = Offer | Accepted | Refused | Written | Applied | Failed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Bytes of a notification."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message of a notification. Raises `TransferError` if it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransferError(f"not a fabric message: {error}") from error
