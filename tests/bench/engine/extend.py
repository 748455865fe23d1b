"""What an extend of n tokens costs beside a decode step, and where that stops being a bargain."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.bench.engine.measuring import timed
from tests.bench.engine.ours import Ours
from tests.bench.engine.settings import BATCHES, CONTEXT, EXTENDS, KNEE, ROUNDS


def ratios(model: Path, threads: int, batch: int) -> dict[int, float]:
    """By n: time of a step in which one of the batch extends by n tokens and the others decode, over that of the step
    before it, in which all decode. Medians."""
    ours = Ours(model, threads, step_tokens=2 * max(EXTENDS))
    keys = ours.start(batch)
    ours.decode()
    others = keys[1:]
    ours.stop(keys[:1])
    measured: dict[int, list[float]] = {n: [] for n in EXTENDS}
    for _ in range(ROUNDS):
        for n in EXTENDS:
            for key in others:
                ours.engine.freeze(key)
            extended = ours.add(ours.tokens(CONTEXT - 1), limit=1)
            list(ours.run())
            ours.engine.set_sample_limit(extended, 2)
            for key in others:
                ours.engine.thaw(key)
            decode = timed(ours.engine.step)
            # The token drawn last is not computed yet, either.
            ours.engine.append(extended, ours.tokens(n - 1))
            ours.engine.set_sample_limit(extended, n + 2)
            measured[n].append(timed(ours.engine.step) / decode)
            ours.stop([extended])
    ours.stop(others)
    return {n: statistics.median(all_) for n, all_ in measured.items()}


def knee(by_tokens: dict[int, float]) -> int:
    """The longest extend within `KNEE` decode steps' time."""
    return max((n for n, ratio in by_tokens.items() if ratio <= KNEE), default=0)


def lines(model: Path, threads: int) -> Iterator[str]:
    """The table and its knees."""
    columns = {batch: ratios(model, threads, batch) for batch in BATCHES}
    yield "| n | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |"
    yield "|---|" + "---|" * len(BATCHES)
    for n in EXTENDS:
        yield f"| {n} | " + " | ".join(f"{column[n]:.2f}" for column in columns.values()) + " |"
    yield ""
    knees = ", ".join(f"{knee(column)} at batch {batch}" for batch, column in columns.items())
    yield f"The knee, the longest extend within {KNEE:g} decode steps' time: {knees}."
