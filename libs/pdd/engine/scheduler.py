"""What one step computes: a pure function of counts.

Each sequence has tokens it has not computed; a step hands out a token budget. Running sequences come first, decodes
before chunks, then waiting ones, first come first served, up to the first that does not fit; behind it only those go
on that lack no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.types import AttemptKey


@dataclass(frozen=True)
class Pending:
    """A sequence with something to compute: `uncomputed` tokens, and the blocks it lacks to be admitted."""

    key: AttemptKey
    uncomputed: int
    missing_blocks: int = 0


@dataclass(frozen=True)
class Chunk:
    """`tokens` further tokens of one sequence. Only the last chunk of what is known may be sampled."""

    key: AttemptKey
    tokens: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, in the order of its batch, and which waiting sequences it admits for that."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[AttemptKey, ...]

    @property
    def scheduled_tokens(self) -> int:
        """Tokens that go through the forward pass."""
        return sum(chunk.tokens for chunk in self.chunks)


def schedule(
    running: Sequence[Pending], waiting: Sequence[Pending], *, step_tokens: int, seats: int, free_blocks: int
) -> StepPlan:
    """Plan a step of at most `step_tokens` tokens of at most `seats` sequences.

    `running` and `waiting` are in order of arrival. Admitting takes `missing_blocks` of `free_blocks`.
    """
    chunks: list[Chunk] = []
    admitted: list[AttemptKey] = []
    left = step_tokens

    def is_full() -> bool:
        return left == 0 or len(chunks) == seats

    for pending in sorted(running, key=lambda pending: pending.uncomputed > 1):
        if is_full():
            break
        chunks.append(_chunk(pending, left))
        left -= chunks[-1].tokens
    # A running sequence without a place in this step keeps its seat.
    seats_left = seats - len(running)
    blocked = False
    for pending in waiting:
        if is_full() or len(admitted) >= seats_left:
            break
        blocked = blocked or pending.missing_blocks > free_blocks
        if blocked and pending.missing_blocks:
            continue
        admitted.append(pending.key)
        free_blocks -= pending.missing_blocks
        chunks.append(_chunk(pending, left))
        left -= chunks[-1].tokens
    return StepPlan(tuple(chunks), tuple(admitted))


def _chunk(pending: Pending, left: int) -> Chunk:
    """An even share: what is uncomputed, over as few steps as the budget allows; never full chunks and a sliver."""
    steps = -(-pending.uncomputed // left)
    tokens = -(-pending.uncomputed // steps)
    return Chunk(pending.key, tokens, is_last=tokens == pending.uncomputed)
