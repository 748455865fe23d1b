"""Pools and identities for tests of the KV data plane: page-aligned numpy memory, no engine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdd.kv import KvSpec, ModelIdentity
from pdd.types import AttemptKey, Peer, Role

PAGE_BYTES = 4096
TINY = KvSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
IDENTITY = ModelIdentity(
    weights="sha256:w", architecture="tiny", num_layers=3, num_kv_heads=2, head_dim=8, rope="theta=10000"
)
KEY = AttemptKey("0123456789abcdef0123456789abcdef", 1)


def peer(role: Role, epoch: str = "e1") -> Peer:
    return Peer(dc="a", role=role, instance=f"{role}-0", epoch=epoch)


class NumpyPool:
    """A `KvMemory` in host memory."""

    def __init__(self, spec: KvSpec, num_blocks: int) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        raw = np.zeros(spec.block_bytes * num_blocks + PAGE_BYTES, np.uint8)
        start = -raw.ctypes.data % PAGE_BYTES
        self.bytes: npt.NDArray[np.uint8] = raw[start : start + spec.block_bytes * num_blocks]

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def block(self, index: int) -> memoryview:
        size = self.spec.block_bytes
        return memoryview(self.bytes[index * size : (index + 1) * size])

    def fill(self, seed: int) -> None:
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.size, np.uint8)

    def tokens(self, blocks: list[int], first: int, end: int) -> npt.NDArray[np.uint8]:
        """KV of positions `[first, end)` in `blocks`, `[layers, 2, tokens, bytes]`. Written plainly, as an oracle."""
        spec = self.spec
        pool = self.bytes.reshape(self.num_blocks, spec.num_layers, 2, spec.block_size, -1)
        where = [(blocks[token // spec.block_size], token % spec.block_size) for token in range(first, end)]
        parts = [pool[block, :, :, slot] for block, slot in where]
        return np.stack(parts, axis=2) if parts else np.empty((spec.num_layers, 2, 0, 0), np.uint8)
