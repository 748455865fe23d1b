"""A radix cache and, beside it, a naive model in plain Python that says what must be true of it after each operation.

The model keeps what is cached as a dict of token prefixes, finds what to evict by looking at everything, and knows for
each block whose KV lies in it: a match that gives KV of other tokens is seen, also after eviction and reuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest

from pdd.engine.block_pool import BlockPool
from pdd.engine.radix import RadixCache
from pdd.errors import CapacityError
from pdd.kv import KvNamespace
from pdd.prefix.hashing import block_hashes
from pdd.prefix.journal import KvChange
from pdd.types import KvEventKind

NAMESPACES = (KvNamespace(), KvNamespace(salt="exact"), KvNamespace(fidelity="float8"))

Chain = tuple[KvNamespace, tuple[int, ...]]
"""Whole tokens from the first on: whose KV a block holds (that of the last of them)."""


@dataclass(eq=False)
class User:
    """Somebody who holds a chain of blocks, of which the KV of the first `computed` tokens is there.

    Who shares the blocks of another `waits`, and writes nothing.
    """

    namespace: KvNamespace
    tokens: tuple[int, ...]
    blocks: list[int]
    computed: int
    waits: bool = False


@dataclass
class Entry:
    """A block that is cached, and when it was last in use."""

    block: int
    last_use: int = 0


class World:
    """See the module. Operations take numbers to choose by, so that any source of them will do."""

    def __init__(self, block_size: int, blocks: int) -> None:
        self.cache = RadixCache(BlockPool(blocks + 1), block_size)
        self.size = block_size
        self.total = blocks
        self.users: list[User] = []
        self.cached: dict[Chain, Entry] = {}
        self.kv: dict[int, Chain] = {}
        self.expected: list[tuple[bytes, ...]] = []
        self.stored: set[bytes] = set()
        self.pinned: set[bytes] = set()
        self.in_flight: set[bytes] = set()
        self.now = 0

    def tokens(self, letters: Sequence[int], tail: int) -> tuple[int, ...]:
        """Blocks of one letter each, and the first `tail` tokens (less than a block) of a further one."""
        whole = [letter for letter in letters for _ in range(self.size)]
        return (*whole, *([letters[0]] * (tail % self.size)))

    # What is done to the cache.

    def start(self, namespace: KvNamespace, tokens: tuple[int, ...], expect: int) -> None:
        """Somebody looks a prompt up and gets room for the rest of it; or gives all up if there is none."""
        matched = self.match(namespace, tokens[:-1])
        missing = -(-len(tokens) // self.size) - len(matched)
        user = User(namespace, tokens, matched, len(matched) * self.size)
        self.users.append(user)
        if expect % 2:
            self.expect(namespace, tokens)
        room = self.allocate(missing)
        if room is None:
            self.leave(self.users.index(user), retire=expect % 3 == 0)
        else:
            user.blocks.extend(room)

    def match(self, namespace: KvNamespace, tokens: tuple[int, ...]) -> list[int]:
        assert self.cache.peek(namespace, tokens) == self.cached_tokens(namespace, tokens)
        blocks = self.cache.match(namespace, tokens)
        assert len(blocks) * self.size == self.cached_tokens(namespace, tokens)
        for index, block in enumerate(blocks):
            assert self.kv[block] == (namespace, tokens[: (index + 1) * self.size]), "KV of other tokens"
        return blocks

    def compute(self, pick: int, count: int) -> None:
        """KV of the next tokens is written."""
        user = self.pick(pick)
        if user is None:
            return
        if user.waits:
            user.computed = self.written(user)
            return
        end = min(user.computed + count, len(user.tokens), len(user.blocks) * self.size)
        for index in range(user.computed // self.size, -(-end // self.size)):
            block = user.blocks[index]
            if end > user.computed:
                assert block not in {entry.block for entry in self.cached.values()}, "a cached block is written"
                self.kv[block] = (user.namespace, user.tokens[: min(end, (index + 1) * self.size)])
        user.computed = max(end, user.computed)

    def publish(self, pick: int) -> None:
        user = self.pick(pick)
        if user is not None:
            self.cache.publish(user.namespace, user.tokens[: user.computed], user.blocks)
            self.enter(user, past_copies=False)

    def leave(self, pick: int, *, retire: bool) -> None:
        user = self.pick(pick)
        if user is None:
            return
        self.now += 1
        used = self.held_chains()
        if retire:
            self.cache.retire(user.namespace, user.tokens[: user.computed], user.blocks)
            self.enter(user, past_copies=True)
            used.update(self.chain_of(user))
        else:
            self.cache.release(user.blocks)
        self.users.remove(user)
        self.used_until_now(used)

    def share(self, pick: int, count: int) -> None:
        """Somebody else waits for the same KV, in the same blocks; or for the first of them."""
        user = self.pick(pick)
        if user is not None:
            blocks = user.blocks[: count % (len(user.blocks) + 1)]
            self.cache.share(blocks)
            self.users.append(User(user.namespace, user.tokens, blocks, 0, waits=True))

    def shorten(self, pick: int) -> None:
        """Somebody who shares blocks gives the last of them up."""
        user = self.pick(pick)
        if user is not None and user.blocks:
            self.now += 1
            before = self.held_chains()
            last = user.blocks.pop()
            self.cache.release([last])
            user.computed = min(user.computed, len(user.blocks) * self.size)
            self.used_until_now(before)

    def follow(self, pick: int) -> None:
        """Somebody uses what is cached and waits for the rest in another's blocks: a tail without its head."""
        user = self.pick(pick)
        if user is not None:
            hit = self.match(user.namespace, user.tokens)
            coming = user.blocks[len(hit) :]
            self.cache.share(coming)
            self.users.append(User(user.namespace, user.tokens, [*hit, *coming], 0, waits=True))

    def allocate(self, count: int) -> list[int] | None:
        """Blocks for nobody yet; None, with nothing changed, if there are not as many."""
        if count > self.cache.available_blocks:
            self.must_refuse(CapacityError, lambda: self.cache.allocate(count))
            return None
        for _ in range(max(count - self.cache.free_blocks, 0)):
            del self.cached[self.next_evicted()]
        blocks = self.cache.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & (self.held() | self.cached_blocks()), "a block that holds something was handed out"
        for block in blocks:
            self.kv.pop(block, None)
        return blocks

    def allocate_and_give_back(self, count: int) -> None:
        blocks = self.allocate(count)
        if blocks is not None:
            self.cache.release(blocks)

    def allocate_all_that_is_available(self) -> None:
        count = self.cache.available_blocks
        blocks = self.allocate(count)
        assert blocks is not None
        assert self.cache.available_blocks == 0
        self.check(len(blocks))
        self.cache.release(blocks)
        assert self.cache.free_blocks == count

    def give_back_what_is_not_held(self, block: int) -> None:
        """A second free: of a block that is free, or cached for nobody, or held fewer times than it is given back."""
        users = Counter(block for user in self.users for block in user.blocks)
        blocks = [*self.held(), *([block] * (users[block] + 1))]
        chain = self.tokens([1, 0, 1], 0)
        for refused in (
            lambda: self.cache.release(blocks),
            lambda: self.cache.retire(NAMESPACES[0], chain, blocks),
            lambda: self.cache.publish(NAMESPACES[0], chain, blocks),
        ):
            self.must_refuse(ValueError, refused)
        if not users[block]:
            self.must_refuse(ValueError, lambda: self.cache.share([*self.held(), block]))

    def expect(self, namespace: KvNamespace, tokens: tuple[int, ...]) -> None:
        hashes = self.hashes(namespace, tokens)
        self.cache.expect(hashes)
        self.expected.append(hashes)

    def settle(self, pick: int) -> None:
        if self.expected:
            self.cache.settle(self.expected.pop(pick % len(self.expected)))

    # What the naive model says of it.

    def pick(self, number: int) -> User | None:
        return self.users[number % len(self.users)] if self.users else None

    def written(self, user: User) -> int:
        """How many leading whole blocks hold the KV that a user waits for, as a number of tokens."""
        ends = range(self.size, min(len(user.blocks) * self.size, len(user.tokens)) + 1, self.size)
        for index, end in enumerate(ends):
            if self.kv.get(user.blocks[index]) != (user.namespace, user.tokens[:end]):
                return index * self.size
        return len(ends) * self.size

    def held(self) -> set[int]:
        return {block for user in self.users for block in user.blocks}

    def cached_blocks(self) -> set[int]:
        return {entry.block for entry in self.cached.values()}

    def cached_tokens(self, namespace: KvNamespace, tokens: tuple[int, ...]) -> int:
        """The longest prefix of which each whole block is cached."""
        end = 0
        while end + self.size <= len(tokens) and (namespace, tokens[: end + self.size]) in self.cached:
            end += self.size
        return end

    def chain_of(self, user: User) -> list[Chain]:
        ends = range(self.size, user.computed + 1, self.size)
        return [(user.namespace, user.tokens[:end]) for end in ends]

    def enter(self, user: User, *, past_copies: bool) -> None:
        """Enter a user's blocks."""
        for block, chain in zip(user.blocks, self.chain_of(user), strict=False):
            assert self.kv[block] == chain
            entry = self.cached.setdefault(chain, Entry(block))
            if entry.block != block and not past_copies:
                break

    def held_chains(self) -> set[Chain]:
        """Cached chains that somebody uses, or uses one that goes on from them."""
        held = self.held()
        used = [chain for chain, entry in self.cached.items() if entry.block in held]
        return {
            (namespace, tokens[:end])
            for namespace, tokens in used
            for end in range(self.size, len(tokens) + 1, self.size)
        }

    def used_until_now(self, chains: Iterable[Chain]) -> None:
        """Those of them that are not held now were until now."""
        for chain in set(chains) - self.held_chains():
            self.cached[chain].last_use = self.now

    def next_evicted(self) -> Chain:
        """Of the chains that are not held and that no cached one goes on from: the longest unused."""
        held = self.held_chains()
        goes_on = {(namespace, tokens[: -self.size]) for namespace, tokens in self.cached}
        leaves = [chain for chain in self.cached if chain not in held | goes_on]
        return min(leaves, key=lambda chain: self.cached[chain].last_use)

    def hashes(self, namespace: KvNamespace, tokens: tuple[int, ...]) -> tuple[bytes, ...]:
        return tuple(block_hashes(tokens, self.size, salt=namespace.salt, fidelity=namespace.fidelity))

    def must_refuse(self, error: type[Exception], operation: Callable[[], object]) -> None:
        before = self.state()
        with pytest.raises(error):
            operation()
        assert self.state() == before, "refused, and yet something changed"

    def state(self) -> object:
        cache = self.cache
        references = [cache._pool.references(block) for block in range(1, self.total + 1)]
        nodes = {block: (node.last_use, len(node.children)) for block, node in cache._nodes.items()}
        return (
            list(cache._pool._free),
            references,
            cache.evictable_blocks,
            nodes,
            sorted(cache._leaves),
            cache.holdings(),
        )

    # What must hold after each operation.

    def check(self, elsewhere: int = 0) -> None:
        """The books balance; `elsewhere` blocks are held by no user."""
        cache, pool = self.cache, self.cache._pool
        held, cached = self.held(), self.cached_blocks()
        users = Counter(block for user in self.users for block in user.blocks)
        assert len(cached) == len(self.cached) == cache.cached_blocks, "one block under two names, or none"
        pinned = self.held_chains()
        held_in_all = held | {self.cached[chain].block for chain in pinned}
        assert cache.evictable_blocks == len(self.cached) - len(pinned)
        assert cache.free_blocks + cache.evictable_blocks + len(held_in_all) + elsewhere == self.total
        assert cache.total_blocks == self.total
        assert cache.available_blocks == cache.free_blocks + cache.evictable_blocks
        free = list(pool._free)
        assert len(free) == len(set(free)), "a block is free twice"
        assert not set(free) & (held | cached), "a block is free and in use"
        assert set(cache._nodes) == cached
        for block in held | cached:
            assert pool.references(block) == users[block] + (block in cached)
        for (namespace, tokens), entry in self.cached.items():
            assert cache.peek(namespace, tokens) == len(tokens)
            assert self.kv[entry.block] == (namespace, tokens), "a cached block was overwritten"
        assert set(cache._roots) == {namespace for namespace, _ in self.cached}, "a namespace without blocks stays"
        assert len(cache._leaves) <= 2 * self.total + 1
        self.check_journal()

    def check_journal(self) -> None:
        """Whoever replays all changes from nothing knows what is held."""
        for change in self.cache.journal.take():
            self.replay(change)
        now = self.cache.holdings()
        assert (self.stored, self.pinned, self.in_flight) == (now.stored, now.pinned, now.in_flight)
        hashes = {chain: self.hashes(*chain)[-1] for chain in self.cached}
        assert now.stored == set(hashes.values())
        assert now.pinned == {hashes[chain] for chain in self.held_chains()}
        assert now.in_flight == {one for hashes in self.expected for one in hashes} - now.stored

    def replay(self, change: KvChange) -> None:
        hashes = set(change.hashes)
        assert len(hashes) == len(change.hashes)
        match change.kind:
            case KvEventKind.STORED:
                assert not hashes & self.stored
                self.stored |= hashes
                self.in_flight -= hashes
            case KvEventKind.REMOVED:
                assert hashes <= self.stored | self.in_flight, "taken back what was never told"
                for kept in (self.stored, self.pinned, self.in_flight):
                    kept -= hashes
            case KvEventKind.PINNED:
                assert hashes <= self.stored - self.pinned
                self.pinned |= hashes
            case KvEventKind.UNPINNED:
                assert hashes <= self.pinned
                self.pinned -= hashes
            case KvEventKind.IN_FLIGHT:
                assert not hashes & (self.stored | self.in_flight)
                self.in_flight |= hashes
            case KvEventKind.CLEARED:
                raise AssertionError("nothing clears the cache")
