"""Cutting KV into pieces, and copying pieces between a paged pool and flat bytes. Pure: no I/O, no state.

A piece on the wire is `[layers, 2 (k, v), tokens, kv_heads, head_dim]` in C order, whatever the pages of the two ends
look like. Only host memory is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from pdd.kv import DTYPE_BYTES, KvMemory, KvSpec

Bytes4d = npt.NDArray[np.uint8]
"""`[layers, 2, tokens, bytes of one token's k or v in one layer]`."""


class Piece(msgspec.Struct, frozen=True):
    """Tokens `[first_token, end_token)` of layers `[first_layer, end_layer)`, all heads."""

    first_token: int
    end_token: int
    first_layer: int
    end_layer: int

    def nbytes(self, spec: KvSpec) -> int:
        """Payload bytes of the piece."""
        tokens, layers = self.end_token - self.first_token, self.end_layer - self.first_layer
        return layers * tokens * layer_token_bytes(spec)


def layer_token_bytes(spec: KvSpec) -> int:
    """Bytes of one token in one layer, k and v: the smallest payload."""
    return 2 * _width(spec)


def split(spec: KvSpec, first_token: int, end_token: int, max_bytes: int) -> Iterator[Piece]:
    """Cut `[first_token, end_token)` into pieces of at most `max_bytes`, in token order.

    No piece crosses a block of `spec`. A block that is too large is cut by layers, which keeps a whole block's parts
    contiguous in memory; only a layer that is itself too large is cut by tokens.
    """
    max_units = max_bytes // layer_token_bytes(spec)
    if max_units == 0:
        raise ValueError(f"a piece of {max_bytes} bytes does not hold one token of one layer")
    token = first_token
    while token < end_token:
        end = min(end_token, (token // spec.block_size + 1) * spec.block_size, token + max_units)
        layers = max_units // (end - token)
        for layer in range(0, spec.num_layers, layers):
            yield Piece(token, end, layer, min(layer + layers, spec.num_layers))
        token = end


def gather(memory: KvMemory, blocks: Sequence[int], base_token: int, piece: Piece) -> memoryview:
    """A copy of the bytes of `piece` out of `blocks`, the first of which begins with token `base_token`."""
    tokens, layers = piece.end_token - piece.first_token, piece.end_layer - piece.first_layer
    flat = np.empty((layers, 2, tokens, _width(memory.spec)), np.uint8)
    for index, in_block, in_piece in _runs(memory.spec.block_size, base_token, piece):
        flat[:, :, in_piece] = _block(memory, blocks[index])[piece.first_layer : piece.end_layer, :, in_block]
    return flat.data.cast("B")


def scatter(memory: KvMemory, blocks: Sequence[int], base_token: int, piece: Piece, payload: memoryview) -> None:
    """Copy `payload`, the bytes of `piece`, into `blocks`, the first of which begins with token `base_token`."""
    tokens, layers = piece.end_token - piece.first_token, piece.end_layer - piece.first_layer
    flat = np.frombuffer(payload, np.uint8).reshape(layers, 2, tokens, _width(memory.spec))
    for index, in_block, in_piece in _runs(memory.spec.block_size, base_token, piece):
        _block(memory, blocks[index])[piece.first_layer : piece.end_layer, :, in_block] = flat[:, :, in_piece]


def checksum(payload: memoryview) -> int:
    """xxh3_64 of the bytes."""
    return xxhash.xxh3_64_intdigest(payload)


def piece_checksum(memory: KvMemory, blocks: Sequence[int], base_token: int, piece: Piece) -> int:
    """`checksum` of what `gather` gives, without the copy where the piece is a whole block (its bytes lie in order)."""
    spec = memory.spec
    if piece.nbytes(spec) == spec.block_bytes:
        return checksum(memory.block(blocks[(piece.first_token - base_token) // spec.block_size]))
    return checksum(gather(memory, blocks, base_token, piece))


def _width(spec: KvSpec) -> int:
    return spec.num_kv_heads * spec.head_dim * DTYPE_BYTES[spec.dtype]


def _block(memory: KvMemory, index: int) -> Bytes4d:
    spec = memory.spec
    return np.frombuffer(memory.block(index), np.uint8).reshape(spec.num_layers, 2, spec.block_size, _width(spec))


def _runs(block_size: int, base_token: int, piece: Piece) -> Iterator[tuple[int, slice, slice]]:
    """(position in the block list, tokens within that block, tokens within the piece) of each block it touches."""
    token = piece.first_token
    while token < piece.end_token:
        index, offset = divmod(token - base_token, block_size)
        count = min(block_size - offset, piece.end_token - token)
        start = token - piece.first_token
        yield index, slice(offset, offset + count), slice(start, start + count)
        token += count
