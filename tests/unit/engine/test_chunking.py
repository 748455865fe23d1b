"""At no hit rate is there a dip: a queue of prompts takes the fewest steps that its tokens allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chunking import naive, scheduled

PROMPT_TOKENS = 4096
STEP_TOKENS = 512
PROMPTS = 16


def uncached(hit_percent: int) -> int:
    return -(-PROMPT_TOKENS * (100 - hit_percent) // 100)


@pytest.mark.parametrize("hit_percent", range(100))
def test_the_fewest_steps_at_every_hit_rate(hit_percent: int) -> None:
    tokens = uncached(hit_percent)
    ours = scheduled(tokens, PROMPTS, step_tokens=STEP_TOKENS)
    baseline = naive(tokens, PROMPTS, step_tokens=STEP_TOKENS)
    assert ours.steps == -(-tokens * PROMPTS // STEP_TOKENS)
    assert ours.utilisation >= baseline.utilisation
    assert ours.first_done <= baseline.first_done  # nobody pays for it with a later first token


def test_where_naive_chunking_dips() -> None:
    """Where the rest is smallest: a little below each hit rate that leaves full chunks only."""
    used = {hit: naive(uncached(hit), PROMPTS, step_tokens=STEP_TOKENS).utilisation for hit in range(100)}
    dips = [hit for hit in range(1, 99) if used[hit] < used[hit - 1] and used[hit] < used[hit + 1]]
    assert dips == [12, 24, 37, 49, 62, 74, 87]
    assert [round(used[hit], 2) for hit in dips] == [0.88, 0.87, 0.84, 0.82, 0.76, 0.69, 0.52]
    ours = [scheduled(uncached(hit), PROMPTS, step_tokens=STEP_TOKENS).utilisation for hit in dips]
    assert min(ours) > 0.97


@given(tokens=st.integers(1, 3000), prompts=st.integers(1, 20), step_tokens=st.integers(16, 600))
def test_with_seats_for_all_at_most_one_step_more_than_the_fewest(tokens: int, prompts: int, step_tokens: int) -> None:
    """The last prompts' even shares may leave some of their steps unfilled, when nobody is left to join them."""
    ours = scheduled(tokens, prompts, step_tokens=step_tokens, seats=20)
    assert 0 <= ours.steps - -(-tokens * prompts // step_tokens) <= 1
