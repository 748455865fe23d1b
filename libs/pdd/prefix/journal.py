"""What happened to an instance's cached blocks, in order and numbered: the source of its KV events.

Written by the radix cache on any thread, read by whoever publishes. Bounded: a reader that falls behind loses the
oldest changes and sees so by the gap in their numbers; a snapshot (`Holdings`) makes up for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdd.types import KvEventKind


@dataclass(frozen=True)
class KvChange:
    """One change. `seq` counts from 1, without holes; `hashes` are block hashes (`pdd.prefix.hashing`)."""

    seq: int
    kind: KvEventKind
    hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Holdings:
    """All that an instance holds after change `seq`. `pinned` is a subset of `stored`; `in_flight` is disjoint."""

    seq: int
    stored: frozenset[bytes]
    pinned: frozenset[bytes]
    in_flight: frozenset[bytes]


MAX_HASHES = 1024
"""Most blocks of one change; more become several changes, each with a number of its own. So a change always fits into
a message, and nothing that numbers changes ever has to cut one."""


class KvJournal:
    """See the module. Keeps at most `capacity` changes that were not taken."""

    def __init__(self, capacity: int = 4096) -> None:
        self.on_record: Callable[[], None] = lambda: None
        """Called after each `record`, on the writer's thread; must not block."""
        self._lock = threading.Lock()
        self._changes: deque[KvChange] = deque(maxlen=capacity)
        self._seq = 0

    @property
    def seq(self) -> int:
        """Number of the newest change, 0 before the first."""
        return self._seq

    def record(self, kind: KvEventKind, hashes: Sequence[bytes]) -> None:
        """Note that `hashes` changed, as one change for each `MAX_HASHES` of them; nothing if there are none."""
        if not hashes:
            return
        with self._lock:
            for start in range(0, len(hashes), MAX_HASHES):
                self._seq += 1
                self._changes.append(KvChange(self._seq, kind, tuple(hashes[start : start + MAX_HASHES])))
        self.on_record()

    def take(self) -> list[KvChange]:
        """All changes since the last call, oldest first."""
        with self._lock:
            taken = list(self._changes)
            self._changes.clear()
        return taken
