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


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates from best to worst: longest hit first, then least loaded, then by name."""
    return sorted(
        candidates,
        key=lambda c: (-c.hit_tokens, c.waiting + c.committed, max(c.seats_used, c.blocks_used), c.name),
    )
