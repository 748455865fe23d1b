"""Remembers KV: the cached blocks of a pool as a tree, so that equal prefixes are stored, sent and computed once.

An uncompressed radix tree: one node for each block, found by the block's own token IDs under its parent, so that a
match is a match of tokens and never of hashes. The cache holds one reference to each of its blocks; every further one
belongs to a user (a sequence, a reservation). Blocks that nobody uses are evicted when the pool runs out: leaves
first, the longest unused first.

A block is held if somebody uses it or a block below it: whoever shares a block may use another copy of what is before
it. All others are evictable, and as eviction takes leaves only, each of them can be evicted in the end. So
`free + evictable + held == total`, and as many blocks as are free or evictable can be allocated.

Safe to use from any thread: the network side reserves and matches while the step loop runs.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pdd.engine.block_pool import BlockPool
from pdd.engine.kv_pool import NULL_BLOCK
from pdd.errors import CapacityError
from pdd.kv import KvNamespace
from pdd.prefix.hashing import next_hash, root_hash
from pdd.prefix.journal import Holdings, KvJournal
from pdd.types import KvEventKind


@dataclass(eq=False, repr=False, slots=True)
class _Node:
    """One cached block. A root stands for a namespace and has no block."""

    namespace: KvNamespace
    hash: bytes
    block: int
    parent: _Node | None
    tokens: tuple[int, ...]
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict[tuple[int, ...], "_Node"])
    held: bool = False
    held_children: int = 0
    last_use: int = 0


class RadixCache:
    """See the module. What it does to blocks is written to `journal`."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True) -> None:
        """A cache that is not `enabled` keeps nothing: blocks are free as soon as nobody uses them."""
        self.journal = KvJournal()
        self.on_free: list[Callable[[], None]] = []
        """Called, outside the lock and on the caller's thread, after blocks were given up."""
        self.block_size = block_size
        self._pool = pool
        self._enabled = enabled
        self._lock = threading.Lock()
        self._roots: dict[KvNamespace, _Node] = {}
        self._nodes: dict[int, _Node] = {}
        """Cached blocks by number."""
        self._unheld = 0
        self._leaves: list[tuple[int, int, _Node]] = []
        """Heap of leaves that are not held, by last use. An entry may be outdated: see `_is_evictable`."""
        self._ticks = itertools.count(1)
        self._stored: set[bytes] = set()
        self._in_flight: Counter[bytes] = Counter()

    @property
    def total_blocks(self) -> int:
        """How many blocks there are."""
        return self._pool.total_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._pool.free_blocks

    @property
    def evictable_blocks(self) -> int:
        """Blocks that are cached and not held."""
        return self._unheld

    @property
    def cached_blocks(self) -> int:
        """Blocks that are cached, in use or not."""
        return len(self._nodes)

    @property
    def available_blocks(self) -> int:
        """How many blocks could be allocated. Takes no lock: where several threads allocate, `allocate` decides."""
        return self._pool.free_blocks + self._unheld

    def peek(self, namespace: KvNamespace, tokens: Sequence[int]) -> int:
        """How many leading tokens are cached right now."""
        with self._lock:
            return self.block_size * sum(1 for _ in self._path(namespace, tokens))

    def match(self, namespace: KvNamespace, tokens: Sequence[int]) -> list[int]:
        """Blocks that hold the KV of leading whole blocks of `tokens`, with a reference to each for the caller.

        A prompt that will be computed here must leave its last token out: that one gives the logits.
        """
        with self._lock:
            nodes = list(self._path(namespace, tokens))
            blocks = [node.block for node in nodes]
            self._pool.incref(blocks)
            self._record_turned(self._refresh(nodes))
            return blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` empty blocks, evicting as many as that needs. Raises `CapacityError`, changing nothing."""
        with self._lock:
            if count > self.available_blocks:
                raise CapacityError(
                    f"{count} KV blocks wanted, {self.available_blocks} of {self.total_blocks} are not in use"
                )
            evicted: list[bytes] = []
            while self._pool.free_blocks < count:
                evicted.append(self._evict_one())
            self.journal.record(KvEventKind.REMOVED, evicted)
            self.journal.record(KvEventKind.IN_FLIGHT, [one for one in evicted if one in self._in_flight])
            return self._pool.allocate(count)

    def share(self, blocks: Sequence[int]) -> None:
        """Take a further reference to blocks in use. Raises `ValueError`, changing nothing, if nobody uses one."""
        with self._lock:
            self._require_used(blocks)
            self._pool.incref(blocks)

    def publish(self, namespace: KvNamespace, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Enter `blocks`, which hold verified KV of `tokens`; the caller goes on using them.

        Only whole blocks are entered, up to the first that the tree has in another's copy. Raises `ValueError`,
        changing nothing, if nobody uses one of `blocks`.
        """
        with self._lock:
            self._require_used(blocks)
            new, _ = self._enter(namespace, tokens, blocks, past_copies=False)
            self.journal.record(KvEventKind.STORED, [node.hash for node in new])
            self._record_turned(self._refresh(new))

    def retire(self, namespace: KvNamespace, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Enter `blocks`, which hold verified KV of `tokens` and perhaps more, and give them up.

        Where the tree has another's copy of a block, the caller's is free afterwards. Raises as `release` does.
        """
        with self._lock:
            self._require_used(blocks)
            new, copies = self._enter(namespace, tokens, blocks, past_copies=True)
            self.journal.record(KvEventKind.STORED, [node.hash for node in new])
            turned = self._refresh(new)
            turned += self._release(blocks)
            self._touch([node for node in copies if not node.held])
            self._record_turned(turned)
        self._tell_freed()

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block (two to one that is listed twice). Those that are cached stay so.

        Raises `ValueError`, changing nothing, if there are not as many: the cache's own is not for users to give up.
        """
        with self._lock:
            self._require_used(blocks)
            self._record_turned(self._release(blocks))
        self._tell_freed()

    def expect(self, hashes: Sequence[bytes]) -> None:
        """KV of these blocks is on its way here, until `settle`: that is published, as something to wait for."""
        if not self._enabled:
            return
        with self._lock:
            new = [one for one in dict.fromkeys(hashes) if one not in self._in_flight and one not in self._stored]
            self._in_flight.update(hashes)
            self.journal.record(KvEventKind.IN_FLIGHT, new)

    def settle(self, hashes: Sequence[bytes]) -> None:
        """Of these blocks, each announced by `expect`, nothing more will come that way.

        Those that came have been published before; the others are taken back.
        """
        if not self._enabled:
            return
        with self._lock:
            self._in_flight.subtract(hashes)
            ended = [one for one in dict.fromkeys(hashes) if self._in_flight[one] <= 0]
            for one in ended:
                del self._in_flight[one]
            self.journal.record(KvEventKind.REMOVED, [one for one in ended if one not in self._stored])

    def holdings(self) -> Holdings:
        """All that is held right now, and the number of the journal's newest change."""
        with self._lock:
            return Holdings(
                seq=self.journal.seq,
                stored=frozenset(self._stored),
                pinned=frozenset(node.hash for node in self._nodes.values() if node.held),
                in_flight=frozenset(self._in_flight) - self._stored,
            )

    def _path(self, namespace: KvNamespace, tokens: Sequence[int]) -> Iterator[_Node]:
        node = self._roots.get(namespace)
        for key in self._keys(tokens):
            node = node.children.get(key) if node is not None else None
            if node is None:
                return
            yield node

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self.block_size
        return (tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size))

    def _require_used(self, blocks: Sequence[int]) -> None:
        """Raise `ValueError` unless each block has as many users as it is listed times."""
        for block, times in Counter(blocks).items():
            is_one = NULL_BLOCK < block <= self.total_blocks
            if not is_one or self._pool.references(block) - (block in self._nodes) < times:
                raise ValueError(f"KV block {block} is not held {times} times")

    def _enter(
        self, namespace: KvNamespace, tokens: Sequence[int], blocks: Sequence[int], *, past_copies: bool
    ) -> tuple[list[_Node], list[_Node]]:
        """Add nodes. Those, for `_refresh`, and the copies of others that were passed on the way."""
        new: list[_Node] = []
        copies: list[_Node] = []
        if not self._enabled:
            return new, copies
        node = self._roots.get(namespace)
        if node is None:
            node = _Node(namespace, root_hash(namespace.salt, namespace.fidelity), -1, None, ())
        for key, block in zip(self._keys(tokens), blocks, strict=False):
            child = node.children.get(key)
            if child is None:
                if block in self._nodes:
                    break  # for other tokens: a block has one place
                child = _Node(namespace, next_hash(node.hash, key), block, node, key)
                self._pool.incref([block])
                node.children[key] = self._nodes[block] = child
                self._stored.add(child.hash)
                self._unheld += 1
                new.append(child)
                if node.parent is None:
                    self._roots[namespace] = node
            elif child.block != block:
                if not past_copies:
                    break
                copies.append(child)
            node = child
        return new, copies

    def _release(self, blocks: Sequence[int]) -> list[_Node]:
        """Give up references that are there; the nodes that turned."""
        self._pool.decref(blocks)
        turned = self._refresh([node for block in blocks if (node := self._nodes.get(block))])
        self._touch([node for node in turned if not node.held])
        return turned

    def _refresh(self, nodes: Sequence[_Node]) -> list[_Node]:
        """After a change in who uses `nodes`: those, and nodes above them, that turned from held to not or back."""
        turned: list[_Node] = []
        for start in nodes:
            node, parent = start, start.parent
            while parent is not None:
                held = node.held_children > 0 or self._pool.references(node.block) > 1
                if held == node.held:
                    break
                node.held = held
                parent.held_children += 1 if held else -1
                self._unheld += -1 if held else 1
                turned.append(node)
                node, parent = parent, parent.parent
        return turned

    def _record_turned(self, turned: Sequence[_Node]) -> None:
        """Tell which nodes are held now and were not before, or the other way round."""
        once = [node for node, times in Counter(turned).items() if times % 2]
        self.journal.record(KvEventKind.PINNED, [node.hash for node in once if node.held])
        self.journal.record(KvEventKind.UNPINNED, [node.hash for node in once if not node.held])

    def _touch(self, unheld: Sequence[_Node]) -> None:
        """These, which are not held, were in use until now."""
        tick = next(self._ticks)
        for node in unheld:
            node.last_use = tick
            if not node.children:
                self._offer(node)

    def _offer(self, leaf: _Node) -> None:
        """Put a leaf that is not held up for eviction."""
        if len(self._leaves) > 2 * len(self._nodes):
            self._leaves = [entry for entry in self._leaves if self._is_evictable(entry[2], entry[0])]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (leaf.last_use, leaf.block, leaf))

    def _is_evictable(self, node: _Node, last_use: int) -> bool:
        """Whether a heap entry still holds."""
        is_here = self._nodes.get(node.block) is node and node.last_use == last_use
        return is_here and not node.children and not node.held

    def _evict_one(self) -> bytes:
        while True:
            last_use, _, node = heapq.heappop(self._leaves)
            if self._is_evictable(node, last_use):
                break
        del self._nodes[node.block]
        self._stored.discard(node.hash)
        self._unheld -= 1
        self._pool.decref([node.block])
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if parent.parent is None:
            if not parent.children:
                del self._roots[node.namespace]
        elif not parent.children and not parent.held:
            self._offer(parent)
        return node.hash

    def _tell_freed(self) -> None:
        for told in self.on_free:
            told()
