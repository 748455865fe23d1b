"""Who holds which KV block: reference counts and the free list, as plain integers.

Never sees a tensor. Safe to use from any thread: the network side reserves blocks for KV that will arrive while the
step loop runs.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from pdd.engine.kv_pool import NULL_BLOCK
from pdd.errors import CapacityError


class BlockPool:
    """Blocks `1 .. num_blocks - 1` of a `KvPool`. At any time `free + referenced == total_blocks`.

    Whoever allocates a block holds one reference to it and gives it back with `decref`, once. `RadixCache` is the only
    one to call it in a stage: it evicts what it holds when blocks run out.
    """

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the null block, which is never handed out."""
        self._lock = threading.Lock()
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))
        self._references = [0] * num_blocks

    @property
    def total_blocks(self) -> int:
        """How many blocks there are to hand out."""
        return len(self._references) - 1

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        """Whether `count` blocks are free. Only a hint where several threads allocate: `allocate` decides."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, the longest unused first, with one reference each. Raises `CapacityError`."""
        with self._lock:
            if count > len(self._free):
                raise CapacityError(f"{count} KV blocks wanted, {len(self._free)} of {self.total_blocks} are free")
            taken = [self._free.popleft() for _ in range(count)]
            for block in taken:
                self._references[block] = 1
            return taken

    def incref(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. Raises `ValueError`, changing nothing, if one is free."""
        with self._lock:
            self._require(blocks, references=1)
            for block in blocks:
                self._references[block] += 1

    def decref(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block (two to one that is listed twice); a block without any is free.

        Raises `ValueError`, changing nothing, if there are not as many.
        """
        with self._lock:
            for block, times in Counter(blocks).items():
                self._require([block], references=times)
            # From the back, so that the tail of a sequence is used again before its head.
            for block in reversed(blocks):
                self._references[block] -= 1
                if self._references[block] == 0:
                    self._free.append(block)

    def references(self, block: int) -> int:
        """How many references there are to a block; 0: it is free."""
        return self._references[block]

    def _require(self, blocks: Iterable[int], references: int) -> None:
        for block in blocks:
            if not NULL_BLOCK < block < len(self._references) or self._references[block] < references:
                raise ValueError(f"KV block {block} is not held {references} times")
