"""No order of operations loses a block, hands one out twice, or frees one twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdd.engine.block_pool import BlockPool
from pdd.errors import CapacityError

BLOCKS = 9


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders with lists of references, against a pool of eight blocks and the null block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, BLOCKS))
    def allocate(self, count: int) -> None:
        free = self.pool.free_blocks
        assert self.pool.can_allocate(count) == (count <= free)
        if count > free:
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            assert self.pool.free_blocks == free
        else:
            taken = self.pool.allocate(count)
            assert len(set(taken)) == count
            assert not set(taken) & self.held()
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.incref(blocks)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.decref(self.holders.pop(index))

    @rule(block=st.integers(-1, BLOCKS))
    def give_back_what_nobody_holds(self, block: int) -> None:
        if block in self.held():
            return
        held = sorted(self.held())
        for refused in (self.pool.decref, self.pool.incref):
            with pytest.raises(ValueError, match="not held"):
                refused([*held, block])

    @invariant()
    def books_balance(self) -> None:
        assert self.pool.free_blocks + len(self.held()) == self.pool.total_blocks == BLOCKS - 1
        assert self.held() <= set(range(1, BLOCKS))
        references = Counter(block for blocks in self.holders for block in blocks)
        assert [self.pool.references(block) for block in range(BLOCKS)] == [
            references[block] for block in range(BLOCKS)
        ]

    def held(self) -> set[int]:
        return {block for blocks in self.holders for block in blocks}


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_one_call_cannot_free_a_block_twice() -> None:
    pool = BlockPool(4)
    [block] = pool.allocate(1)
    with pytest.raises(ValueError, match="not held"):
        pool.decref([block, block])
    assert pool.free_blocks == 2
    pool.decref([block])
    assert pool.free_blocks == 3


def test_the_longest_unused_block_is_handed_out_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.decref([first, second])
    assert pool.allocate(3) == [3, second, first]
