"""What KV looks like to those who move it: its shape, its identity, and where a peer accepts it."""

from __future__ import annotations

import hashlib
from typing import Protocol

import msgspec

from pdd.types import Peer

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvSpec(msgspec.Struct, frozen=True):
    """Shape of a paged KV pool. A block is `[num_layers, 2 (k, v), block_size, num_kv_heads, head_dim]`, C order."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, all layers, k and v."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` tokens."""
        return -(-tokens // self.block_size)


class KvMemory(Protocol):
    """A paged KV pool as bytes. Block `i` lies at `address + i * spec.block_bytes`."""

    @property
    def spec(self) -> KvSpec: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def address(self) -> int:
        """Address of block 0 in this process, for registration with a fabric."""
        ...

    def block(self, index: int) -> memoryview:
        """Writable bytes of block `index` (host memory), `spec.block_bytes` long."""
        ...


class ModelIdentity(msgspec.Struct, frozen=True):
    """Everything that the meaning of KV bytes depends on. Page size, layout and dtype are not in it."""

    weights: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over all fields."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class KvNamespace(msgspec.Struct, frozen=True):
    """Who may share KV blocks of equal tokens: `salt` keeps tenants apart, `fidelity` is the coarsest type that the
    bytes went through (`exact`: as computed)."""

    salt: str = ""
    fidelity: str = "exact"


class StreamEndpoint(msgspec.Struct, frozen=True, tag="stream"):
    """KV is accepted by the project's own TCP stream at this address."""

    host: str
    port: int


class NixlEndpoint(msgspec.Struct, frozen=True, tag="nixl"):
    """KV is written by NIXL straight into the receiver's registered pool, which starts at `address`.

    `block_ids` are the receiver's blocks in token order, the first one holding token `Ticket.first_token`.
    """

    agent: str
    metadata: bytes
    address: int
    block_ids: list[int]


Endpoint = StreamEndpoint | NixlEndpoint


class Ticket(msgspec.Struct, frozen=True):
    """Room that `holder` keeps for KV of tokens `[first_token, end_token)`, and where to send it.

    `first_token` is the receiver's exact hit length (block aligned). Tokens up to `in_flight_end` are on their way to
    it under another ticket, into the same blocks: they are sent under this one only if the holder asks for them.
    `transfer_id` (32 hex digits) is fresh for every ticket: bytes that arrive under any other ID are refused.
    """

    transfer_id: str
    holder: Peer
    first_token: int
    in_flight_end: int
    end_token: int
    spec: KvSpec
    endpoint: Endpoint
