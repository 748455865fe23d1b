"""What running streams see while a long prompt is computed among them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from tests.bench.engine.measuring import timed
from tests.bench.engine.ours import Ours
from tests.bench.engine.settings import LONG_PROMPT, ROUNDS, STEP_TOKENS, STEPS, STREAMS


def lines(ours: Ours) -> Iterator[str]:
    """Inter-token latency before and meanwhile, and how long the prompt took."""
    alone: list[float] = []
    during: list[float] = []
    steps = 0
    for _ in range(ROUNDS):
        keys = ours.start(STREAMS)
        ours.decode()
        alone += [timed(ours.engine.step) * 1e3 for _ in range(STEPS)]
        long = ours.add(ours.tokens(LONG_PROMPT), limit=1)
        first = len(during)
        while not ours.engine.outputs(long):
            during.append(timed(ours.engine.step) * 1e3)
        steps = len(during) - first
        ours.stop([*keys, long])
    yield (
        f"{STREAMS} streams at {statistics.median(alone):.1f} ms a token get theirs every"
        f" {statistics.median(during):.0f} ms, at most {max(during):.0f} ms, during the {steps} steps in which a prompt"
        f" of {LONG_PROMPT:,} tokens is computed among them, {STEP_TOKENS} tokens a step: a token in every step, none"
        f" left out ({ROUNDS} times)."
    )
