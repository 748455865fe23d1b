"""The memory that KV lies in: one tensor, block by block.

Owns the bytes and nothing else; which block belongs to whom is `BlockPool`'s.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from pdd.kv import KvSpec

NULL_BLOCK = 0
"""Reserved: never allocated, so that padding in a block table has somewhere harmless to point."""


class KvPool:
    """A paged KV pool, a `pdd.kv.KvMemory` if it lies in the host's memory.

    One tensor `[num_blocks, num_layers, 2 (k, v), block_size, num_kv_heads, head_dim]`: block-major, so that a block
    is one contiguous run of bytes that can be sent, or written by a fabric, without a staging copy.
    """

    def __init__(self, spec: KvSpec, num_blocks: int, device: str = "cpu") -> None:
        """`num_blocks` counts the null block, too."""
        self._spec = spec
        shape = (num_blocks, spec.num_layers, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Zeros touch every page now: memory that is not there shows at start, not under load.
        memory = torch.zeros(num_blocks * spec.block_bytes + mmap.PAGESIZE, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % mmap.PAGESIZE
        aligned = memory[start : start + num_blocks * spec.block_bytes]
        self._tensor = aligned.view(getattr(torch, spec.dtype)).view(shape)
        self._bytes = memoryview(b"")
        if self._tensor.is_cpu:
            self._bytes = memoryview((ctypes.c_char * self._tensor.nbytes).from_address(self.address)).cast("B")

    @property
    def spec(self) -> KvSpec:
        return self._spec

    @property
    def num_blocks(self) -> int:
        return self._tensor.shape[0]

    @property
    def address(self) -> int:
        """Address of block 0 in this process, or on the device; aligned to a page."""
        return self._tensor.data_ptr()

    def block(self, index: int) -> memoryview:
        """Writable bytes of block `index`, valid as long as the pool lives.

        Raises `IndexError` if there is none, `TypeError` if the host cannot reach it.
        """
        if not self._tensor.is_cpu:
            raise TypeError(f"the pool lies on {self._tensor.device}, where the host has no bytes of it")
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of {self.num_blocks}")
        size = self._spec.block_bytes
        return self._bytes[index * size : (index + 1) * size]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer: strided views `[num_blocks, block_size, num_kv_heads, head_dim]`."""
        layer = self._tensor[:, index]
        return layer[:, 0], layer[:, 1]
