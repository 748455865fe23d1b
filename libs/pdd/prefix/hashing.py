"""Names of KV blocks: h(i) = H(h(i-1), token IDs of block i), rooted in salt and fidelity.

Deterministic across processes, restarts and machines: no per-process randomness, fixed byte order. Every field of the
root is tagged with its length, so that different kinds of key can never join to the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 16


def root_hash(salt: str = "", fidelity: str = "exact") -> bytes:
    """What the chain of a namespace begins with; see `pdd.kv.KvNamespace`."""
    root = b"".join(struct.pack("<I", len(part)) + part for part in (salt.encode(), fidelity.encode()))
    return hashlib.blake2b(root, digest_size=HASH_BYTES, person=b"pdd-root").digest()


def next_hash(parent: bytes, block: Sequence[int]) -> bytes:
    """Hash of a block of token IDs that follows the block with hash `parent`."""
    packed = struct.pack(f"<{len(block)}I", *block)
    return hashlib.blake2b(parent + packed, digest_size=HASH_BYTES, person=b"pdd-block").digest()


def block_hashes(tokens: Sequence[int], block_size: int, *, salt: str = "", fidelity: str = "exact") -> list[bytes]:
    """Hashes (16 bytes each) of the whole blocks of `tokens`; a last block that is not full has none.

    `salt` keeps tenants apart; `fidelity` is the coarsest dtype that the bytes went through.
    """
    parent = root_hash(salt, fidelity)
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = next_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)
    return hashes
