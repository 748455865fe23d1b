"""Promises of room: whatever reservations were accepted, somebody can always go on."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.errors import CapacityError
from pdd.stage.promises import Promises
from pdd.types import AttemptKey


def key(number: int) -> AttemptKey:
    return AttemptKey(f"{number:032x}", 1)


def test_one_may_exceed_the_idle_share_and_two_may_not() -> None:
    promises = Promises(100, 0.3)
    promises.check([], 60, 40)
    promises.add(key(1), range(60), 40)
    with pytest.raises(CapacityError, match="30 may wait for their KV"):
        promises.check([], 1, 0)
    promises.remove(key(1))
    promises.check([], 1, 0)


def test_shared_blocks_count_once() -> None:
    promises = Promises(100, 0.3)
    promises.add(key(1), range(20), 5)
    promises.check(range(20), 10, 5)
    with pytest.raises(CapacityError):
        promises.check(range(20), 11, 5)
    promises.add(key(2), range(30), 5)
    promises.remove(key(1))
    with pytest.raises(CapacityError):
        promises.check([], 1, 0)
    promises.remove(key(2))
    promises.remove(key(2))
    promises.check([], 100, 0)


def test_the_largest_rest_must_fit_beside_all_that_is_held() -> None:
    promises = Promises(100, 1.0)
    promises.add(key(1), range(15), 80)
    with pytest.raises(CapacityError, match="leave too few to go on"):
        promises.check([], 6, 1)
    promises.check([], 5, 80)


@given(
    total=st.integers(4, 60),
    share=st.sampled_from([0.3, 0.5, 1.0]),
    wishes=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 50)), min_size=1, max_size=25),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None)
def test_everybody_who_fits_alone_is_served_in_the_end(
    total: int, share: float, wishes: list[tuple[int, int]], seed: int
) -> None:
    """A pool, requests that wait for a reservation, for their KV (which comes in any order), for the blocks of their
    answer, and then run and end. If nobody can go on while somebody waits, that is a deadlock."""
    order = random.Random(seed)
    promises = Promises(total, share)
    free = list(range(total))
    waiting = [(number, kv, rest) for number, (kv, rest) in enumerate(wishes) if kv + rest <= total]
    idle: list[tuple[int, list[int], int]] = []
    ready: list[tuple[int, list[int], int]] = []
    running: list[list[int]] = []
    while waiting or idle or ready or running:
        moved = False
        for one in list(waiting):
            number, kv, rest = one
            try:
                promises.check([], kv, rest)
            except CapacityError:
                continue
            if kv > len(free):
                continue
            blocks = [free.pop() for _ in range(kv)]
            promises.add(key(number), blocks, rest)
            idle.append((number, blocks, rest))
            waiting.remove(one)
            moved = True
        if idle:
            ready.append(idle.pop(order.randrange(len(idle))))
            moved = True
        while ready and ready[0][2] <= len(free):
            number, blocks, rest = ready.pop(0)
            promises.remove(key(number))
            running.append([*blocks, *(free.pop() for _ in range(rest))])
            moved = True
        if running and (not moved or order.random() < 0.5):
            free += running.pop(order.randrange(len(running)))
            moved = True
        assert moved, f"{waiting} {idle} {ready}: nobody can go on with {len(free)} of {total} blocks"
    assert sorted(free) == list(range(total))
