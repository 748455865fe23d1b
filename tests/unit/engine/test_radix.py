"""The radix cache: what is remembered, who may use it, what goes first when blocks run out."""

from __future__ import annotations

import pytest

from pdd.engine.block_pool import BlockPool
from pdd.engine.radix import RadixCache
from pdd.errors import CapacityError
from pdd.kv import KvNamespace
from pdd.prefix.hashing import block_hashes
from pdd.types import KvEventKind

NAMESPACE = KvNamespace()


def make(blocks: int = 8, *, enabled: bool = True) -> RadixCache:
    return RadixCache(BlockPool(blocks + 1), 2, enabled=enabled)


def remember(cache: RadixCache, *tokens: int, namespace: KvNamespace = NAMESPACE) -> list[int]:
    """Let a sequence compute `tokens` and end; its blocks."""
    blocks = cache.match(namespace, tokens)
    blocks += cache.allocate(-(-len(tokens) // 2) - len(blocks))
    cache.retire(namespace, tokens, blocks)
    return blocks


def test_whole_blocks_of_an_ended_sequence_are_matched() -> None:
    cache = make()
    blocks = remember(cache, 1, 2, 3, 4, 5)
    assert (cache.free_blocks, cache.evictable_blocks) == (6, 2)
    assert cache.match(NAMESPACE, [1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert cache.match(NAMESPACE, [1, 2, 3]) == blocks[:1]
    assert cache.match(NAMESPACE, [3, 4]) == []
    assert cache.peek(NAMESPACE, [1, 2, 3, 4, 9, 9]) == 4


def test_namespaces_share_nothing() -> None:
    cache = make()
    remember(cache, 1, 2)
    for other in (KvNamespace(salt="tenant"), KvNamespace(fidelity="float8")):
        assert cache.match(other, [1, 2]) == []
        remember(cache, 1, 2, namespace=other)
    assert cache.cached_blocks == 3


def test_a_published_block_is_shared_while_its_owner_runs() -> None:
    cache = make()
    blocks = cache.allocate(2)
    cache.publish(NAMESPACE, [1, 2, 3], blocks)
    assert cache.match(NAMESPACE, [1, 2, 3, 4]) == blocks[:1]
    assert cache.evictable_blocks == 0
    cache.release(blocks)
    assert (cache.evictable_blocks, cache.free_blocks) == (0, 7)
    cache.release(blocks[:1])
    assert (cache.evictable_blocks, cache.free_blocks) == (1, 7)


def test_a_copy_is_given_back_and_what_follows_it_is_kept() -> None:
    cache = make()
    first, second = cache.allocate(1), cache.allocate(2)
    cache.publish(NAMESPACE, [1, 2], first)
    cache.publish(NAMESPACE, [1, 2, 3, 4], second)
    assert cache.peek(NAMESPACE, [1, 2, 3, 4]) == 2, "its user does not use the block before"
    cache.retire(NAMESPACE, [1, 2, 3, 4], second)
    assert cache.match(NAMESPACE, [1, 2, 3, 4]) == [first[0], second[1]]
    assert cache.free_blocks == 6


def test_leaves_go_first_and_the_longest_unused_of_them() -> None:
    cache = make(6)
    remember(cache, 1, 2, 3, 4)
    remember(cache, 1, 2, 5, 6)
    remember(cache, 7, 8)
    remember(cache, 1, 2, 3, 4)  # used again
    assert cache.free_blocks == 2
    kept = cache.allocate(3)
    assert [cache.peek(NAMESPACE, chain) for chain in ([1, 2, 5, 6], [7, 8], [1, 2, 3, 4])] == [2, 2, 4]
    kept += cache.allocate(1)
    assert [cache.peek(NAMESPACE, chain) for chain in ([1, 2], [7, 8], [1, 2, 3, 4])] == [2, 0, 4]
    cache.release(kept)


def test_blocks_in_use_are_never_evicted() -> None:
    cache = make(4)
    remember(cache, 1, 2, 3, 4)
    used = cache.match(NAMESPACE, [1, 2, 3, 4])
    with pytest.raises(CapacityError, match="3 KV blocks wanted, 2 of 4"):
        cache.allocate(3)
    assert cache.peek(NAMESPACE, [1, 2, 3, 4]) == 4
    cache.release(used)
    assert len(cache.allocate(4)) == 4
    assert cache.cached_blocks == 0


def test_a_disabled_cache_keeps_nothing() -> None:
    cache = make(enabled=False)
    remember(cache, 1, 2, 3, 4)
    cache.expect([b"hash"])
    assert (cache.free_blocks, cache.match(NAMESPACE, [1, 2]), cache.journal.take()) == (8, [], [])


def test_whoever_waits_for_blocks_is_told() -> None:
    cache = make(4)
    seen: list[int] = []
    cache.on_free.append(lambda: seen.append(cache.available_blocks))
    blocks = cache.allocate(3)
    cache.release(blocks[:1])
    cache.retire(NAMESPACE, [1, 2, 3, 4], blocks[1:])
    assert seen == [2, 4]


def test_the_journal_says_what_happened() -> None:
    cache = make(2)
    a, b, c = block_hashes([1, 2, 3, 4, 5, 6], 2)
    cache.expect([a])
    blocks = cache.allocate(2)
    cache.publish(NAMESPACE, [1, 2], blocks)
    cache.settle([a])
    cache.retire(NAMESPACE, [1, 2, 3, 4], blocks)
    cache.expect([b, c])
    cache.settle([b, c])
    cache.release(cache.match(NAMESPACE, [1, 2]))
    cache.release(cache.allocate(1))
    kinds = KvEventKind
    assert [(change.kind, *change.hashes) for change in cache.journal.take()] == [
        (kinds.IN_FLIGHT, a),
        (kinds.STORED, a),
        (kinds.PINNED, a),
        (kinds.STORED, b),
        (kinds.UNPINNED, a),
        (kinds.IN_FLIGHT, c),
        (kinds.REMOVED, c),
        (kinds.PINNED, a),
        (kinds.UNPINNED, a),
        (kinds.REMOVED, b),
    ]
    assert cache.holdings().stored == {a}
    assert cache.holdings().seq == cache.journal.seq


def test_entries_of_the_eviction_order_do_not_pile_up() -> None:
    cache = make(4)
    remember(cache, 1, 2)
    for _ in range(100):
        cache.release(cache.match(NAMESPACE, [1, 2]))
    assert len(cache._leaves) <= 4


def test_what_only_the_cache_holds_cannot_be_given_back() -> None:
    """A second free of a cached block would put it on the free list while the tree still gives it to others."""
    cache = make(4)
    [block] = remember(cache, 1, 2)
    for refused in (cache.release, cache.share):
        with pytest.raises(ValueError, match=f"KV block {block} is not held"):
            refused([block])
    with pytest.raises(ValueError, match="not held"):
        cache.retire(NAMESPACE, [3, 4, 1, 2], [*cache.allocate(1), block])
    assert (cache.free_blocks, cache.evictable_blocks, cache.peek(NAMESPACE, [3, 4])) == (2, 1, 0)


def test_a_copy_above_a_block_in_use_is_held() -> None:
    """Counted as evictable, it would be promised to others, and could not be evicted: the block below is in use."""
    cache = make(5)
    leader = cache.allocate(2)
    remember(cache, 1, 2)
    follower = cache.match(NAMESPACE, [1, 2, 3])
    cache.share(leader[1:])
    cache.publish(NAMESPACE, [1, 2, 3, 4], [*follower, leader[1]])
    cache.release([*follower, leader[1]])
    assert (cache.free_blocks, cache.evictable_blocks) == (2, 0)
    assert len(cache.holdings().pinned) == 2
    cache.release(cache.allocate(cache.available_blocks))
    cache.release(leader)
    assert (cache.free_blocks, cache.evictable_blocks) == (3, 2)
    assert len(cache.allocate(5)) == 5


def test_a_block_is_never_cached_for_two_chains() -> None:
    cache = make(4)
    blocks = cache.allocate(1)
    cache.publish(NAMESPACE, [1, 2], blocks)
    cache.publish(NAMESPACE, [3, 4], blocks)
    cache.retire(KvNamespace(fidelity="float8"), [1, 2], blocks)
    assert (cache.cached_blocks, cache.evictable_blocks, cache.free_blocks) == (1, 1, 3)
    assert cache.peek(NAMESPACE, [3, 4]) == 0


def test_namespaces_without_blocks_are_forgotten() -> None:
    """Or memory grows with each tenant that ever came, whether anything of it was cached or not."""
    cache = make(4)
    for tenant in range(50):
        remember(cache, 1, 2, namespace=KvNamespace(salt=str(tenant)))
        remember(cache, 1, namespace=KvNamespace(salt=f"short {tenant}"))
    assert len(cache._roots) == cache.cached_blocks <= 4


def test_what_is_evicted_while_it_is_on_its_way_is_something_to_wait_for_again() -> None:
    cache = make(1)
    [a] = block_hashes([1, 2], 2)
    remember(cache, 1, 2)
    cache.expect([a])
    cache.release(cache.allocate(1))
    assert cache.holdings().in_flight == {a}
    cache.settle([a])
    changes = [change.kind for change in cache.journal.take()]
    assert changes == [KvEventKind.STORED, KvEventKind.REMOVED, KvEventKind.IN_FLIGHT, KvEventKind.REMOVED]
