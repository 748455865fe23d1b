"""A queue of prompts through the scheduler, counted in steps and tokens: what chunking costs, without a clock.

The baseline is naive chunking: each prompt takes full chunks and then what is left, alone in its step. Its dips follow
from that: of u uncached tokens and a budget of B a step, it uses u / (B * ceil(u / B)) of what it pays for.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdd.engine.scheduler import Pending, schedule
from pdd.types import AttemptKey


@dataclass(frozen=True)
class Chunking:
    """`steps` for all prompts, the share of their `budget` that was used, and the steps until the first was done."""

    steps: int
    utilisation: float
    first_done: int


def scheduled(uncached_tokens: int, prompts: int, *, step_tokens: int, seats: int = 16) -> Chunking:
    """Run that many equal prompts, all there from the start, through the scheduler."""
    left = {AttemptKey(f"{index:032x}", 1): uncached_tokens for index in range(prompts)}
    admitted: set[AttemptKey] = set()
    steps, tokens, first_done = 0, 0, 0
    while left:
        running = [Pending(key, rest) for key, rest in left.items() if key in admitted]
        waiting = [Pending(key, rest) for key, rest in left.items() if key not in admitted]
        plan = schedule(running, waiting, step_tokens=step_tokens, seats=seats, free_blocks=0)
        admitted |= set(plan.admitted)
        steps, tokens = steps + 1, tokens + plan.scheduled_tokens
        for chunk in plan.chunks:
            left[chunk.key] -= chunk.tokens
            if not left[chunk.key]:
                del left[chunk.key]
                first_done = first_done or steps
    return Chunking(steps, tokens / (steps * step_tokens), first_done)


def naive(uncached_tokens: int, prompts: int, *, step_tokens: int) -> Chunking:
    """The same by full chunks and a rest, one prompt after the other."""
    each = -(-uncached_tokens // step_tokens)
    return Chunking(each * prompts, uncached_tokens / (each * step_tokens), each)
