"""The scheduler's promises, over counts alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdd.engine.scheduler import Pending, StepPlan, schedule
from pdd.types import AttemptKey


def key(index: int) -> AttemptKey:
    return AttemptKey(f"{index:032x}", 1)


def pending(*uncomputed: int, first: int = 0, missing_blocks: int = 0) -> list[Pending]:
    return [Pending(key(first + index), tokens, missing_blocks) for index, tokens in enumerate(uncomputed)]


def tokens(plan: StepPlan) -> list[int]:
    return [chunk.tokens for chunk in plan.chunks]


def plan(
    running: list[Pending], waiting: list[Pending], *, step_tokens: int = 512, seats: int = 16, free_blocks: int = 100
) -> StepPlan:
    return schedule(running, waiting, step_tokens=step_tokens, seats=seats, free_blocks=free_blocks)


def chunks_of_one_prompt(uncomputed: int, budget: int) -> list[int]:
    sizes: list[int] = []
    while uncomputed:
        [chunk] = plan(pending(uncomputed), [], step_tokens=budget).chunks
        sizes.append(chunk.tokens)
        uncomputed -= chunk.tokens
        assert chunk.is_last == (uncomputed == 0)
    return sizes


@given(uncomputed=st.integers(1, 5000), budget=st.integers(1, 700))
def test_a_prompt_is_split_evenly_over_the_fewest_steps(uncomputed: int, budget: int) -> None:
    sizes = chunks_of_one_prompt(uncomputed, budget)
    assert len(sizes) == -(-uncomputed // budget)
    assert max(sizes) - min(sizes) <= 1


def test_a_sliver_never_follows_full_chunks() -> None:
    assert chunks_of_one_prompt(1025, 512) == [342, 342, 341]


def test_decodes_come_before_chunks_and_share_the_step_with_them() -> None:
    running = [*pending(700, 1), *pending(1, first=2)]
    step = plan(running, pending(300, first=3))
    assert [chunk.key for chunk in step.chunks[:3]] == [key(1), key(2), key(0)]
    # 510 tokens are left after the decodes: 700 are halved, and the newcomer's 300 are halved into what remains.
    assert tokens(step) == [1, 1, 350, 150]


def test_waiting_stops_at_the_first_that_does_not_fit() -> None:
    waiting = [*pending(10, missing_blocks=3), *pending(10, first=1, missing_blocks=8), *pending(10, first=2)]
    step = plan([], waiting, free_blocks=10)
    assert step.admitted == (key(0), key(2))  # who lacks nothing has what the first may be waiting for
    assert plan([], waiting, free_blocks=11).admitted == (key(0), key(1), key(2))


def test_seats_hold_back_waiting_sequences() -> None:
    assert plan(pending(1, 1, 1), pending(5, 5, first=3), seats=4).admitted == (key(3),)
    assert plan(pending(1, 1, 1), pending(5, first=3), seats=3).admitted == ()


@given(
    running=st.lists(st.integers(1, 2000), max_size=12),
    waiting=st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 30)), max_size=12),
    step_tokens=st.integers(1, 600),
    seats=st.integers(1, 10),
    free_blocks=st.integers(0, 60),
)
def test_a_step_keeps_within_every_bound(
    running: list[int], waiting: list[tuple[int, int]], step_tokens: int, seats: int, free_blocks: int
) -> None:
    old = pending(*running)
    new = [Pending(key(100 + index), size, missing) for index, (size, missing) in enumerate(waiting)]
    step = plan(old, new, step_tokens=step_tokens, seats=seats, free_blocks=free_blocks)
    wanted = {p.key: p for p in [*old, *new]}
    assert step.scheduled_tokens <= step_tokens
    assert len(step.chunks) <= seats
    assert len({chunk.key for chunk in step.chunks}) == len(step.chunks)
    assert sum(wanted[admitted].missing_blocks for admitted in step.admitted) <= free_blocks
    lacking = [p.key for p in new if p.missing_blocks]
    admitted = [one for one in step.admitted if one in lacking]
    assert admitted == lacking[: len(admitted)]
    for chunk in step.chunks:
        assert 1 <= chunk.tokens <= wanted[chunk.key].uncomputed
        assert chunk.is_last == (chunk.tokens == wanted[chunk.key].uncomputed)
    if old:
        assert step.chunks  # whatever waits, running sequences go on
