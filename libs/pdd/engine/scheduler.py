"""What one step computes. A pure function of counts: no prefill phase and no decode phase.

Each sequence has tokens (prompt + output) and a number of them computed; a step hands out a token budget to let the
computed ones catch up. Running sequences come first, decodes before chunks; then waiting ones, first come first
served, up to the first that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.types import AttemptKey


@dataclass(frozen=True)
class Pending:
    """A sequence as the scheduler sees it: tokens not yet computed, and blocks it lacks to be admitted."""

    key: AttemptKey
    uncomputed: int
    blocks_needed: int = 0


@dataclass(frozen=True)
class Chunk:
    """`tokens` more tokens of one sequence. The last chunk of what is known, and only it, is sampled."""

    key: AttemptKey
    tokens: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, and which waiting sequences it admits for that."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[AttemptKey, ...]


def schedule(
    running: Sequence[Pending], waiting: Sequence[Pending], *, budget: int, free_seats: int, free_blocks: int
) -> StepPlan:
    """Hand out `budget` tokens; see the module."""
    chunks: list[Chunk] = []
    admitted: list[AttemptKey] = []
    left = budget
    for pending in sorted(running, key=lambda p: p.uncomputed > 1):
        chunk = _chunk(pending, budget, left)
        if chunk is not None:
            chunks.append(chunk)
            left -= chunk.tokens
    for pending in waiting:
        if left == 0 or free_seats == 0 or pending.blocks_needed > free_blocks:
            break
        chunk = _chunk(pending, budget, left)
        if chunk is not None:
            chunks.append(chunk)
            left -= chunk.tokens
        admitted.append(pending.key)
        free_seats -= 1
        free_blocks -= pending.blocks_needed
    return StepPlan(tuple(chunks), tuple(admitted))


def _chunk(pending: Pending, budget: int, left: int) -> Chunk | None:
    """An even share: what is uncomputed, over as few steps as the budget allows; never a full chunk and a sliver."""
    steps = -(-pending.uncomputed // budget)
    if steps == 0 or left == 0:
        return None
    tokens = min(-(-pending.uncomputed // steps), left)
    return Chunk(pending.key, tokens, tokens == pending.uncomputed)
