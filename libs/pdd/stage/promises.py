"""How much of a pool reservations may hold while they wait for their KV, so that somebody can always go on.

Running sequences grow, and the newest give their blocks up when there are none; the oldest goes on to its end. A
reservation holds blocks for its KV only, and takes the rest, to begin with, when the KV is there. Two rules keep that
from getting stuck:

- What idle reservations hold stays under a share of the pool, unless there is only one.
- When nothing runs any more, what they hold and the largest rest that one of them will want fit into the pool together:
  so that one can go on, end, and make room for the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdd.errors import CapacityError
from pdd.types import AttemptKey


@dataclass(frozen=True)
class _Promise:
    blocks: tuple[int, ...]
    rest: int


class Promises:
    """Idle reservations of one pool: the blocks they hold (shared ones count once) and those they will still want."""

    def __init__(self, total_blocks: int, idle_share: float) -> None:
        self._total = total_blocks
        self._most_idle = int(idle_share * total_blocks)
        self._promises: dict[AttemptKey, _Promise] = {}
        self._held: Counter[int] = Counter()

    def check(self, shared: Sequence[int], own: int, rest: int) -> None:
        """Raise `CapacityError` unless one more fits: `shared` blocks, `own` empty ones now and `rest` more later."""
        held = len(self._held) + own + sum(block not in self._held for block in shared)
        if self._promises and held > self._most_idle:
            raise CapacityError(f"reservations would hold {held} KV blocks, {self._most_idle} may wait for their KV")
        if held + max([rest, *(promise.rest for promise in self._promises.values())]) > self._total:
            raise CapacityError(f"reservations would hold {held} of {self._total} KV blocks and leave too few to go on")

    def add(self, key: AttemptKey, blocks: Sequence[int], rest: int) -> None:
        """`key` holds `blocks` and will want `rest` more."""
        self._promises[key] = _Promise(tuple(blocks), rest)
        self._held.update(blocks)

    def remove(self, key: AttemptKey) -> None:
        """`key` has what it needs, or is over. Fine for one that is unknown."""
        promise = self._promises.pop(key, None)
        if promise is None:
            return
        self._held.subtract(promise.blocks)
        for block in promise.blocks:
            if self._held[block] <= 0:
                del self._held[block]
