"""Which instance of a role serves a request. Pure; includes the caller's own commitments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """An instance as placement sees it: its seats and blocks in use, as shares of what it has (0..1), requests
    queued for a seat, how many of the caller's own requests it has, reported or not yet, and the hit length."""

    name: str
    seats_used: float
    blocks_used: float
    waiting: int
    committed: int
    hit_tokens: int = 0


WAITING_TOKENS = 256
"""A request ahead of this one weighs as much as so many tokens that would have to be computed or moved."""


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates from best to worst: longest hit minus load, then least full, then by name.

    A conversation stays where its KV is, and moves when that costs less than waiting.
    """
    return sorted(
        candidates,
        key=lambda c: (
            WAITING_TOKENS * (c.waiting + c.committed) - c.hit_tokens,
            max(c.seats_used, c.blocks_used),
            c.name,
        ),
    )
