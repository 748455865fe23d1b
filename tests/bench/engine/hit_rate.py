"""Throughput of prompts over the share of them that is cached, chunked evenly and naively."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import matplotlib as mpl
import matplotlib.pyplot as plt

from pdd.engine.scheduler import Chunk, Pending, StepPlan
from pdd.kv import KvNamespace
from tests.bench.engine.measuring import timed
from tests.bench.engine.ours import Ours
from tests.bench.engine.settings import BLOCK_SIZE, HIT_CONTEXT, HIT_PROMPTS, HIT_RATES, HIT_ROUNDS, STEP_TOKENS
from tests.chunking import naive, scheduled

_EVEN, _NAIVE = "even shares, tails together", "full chunks and a rest, alone"


@dataclass(frozen=True)
class Point:
    """At one hit rate: uncached tokens of a prompt, and of those computed each second by each way of chunking."""

    hit_rate: int
    uncached: int
    even: float
    naive: float


def measure(ours: Ours) -> list[Point]:
    """`HIT_PROMPTS` prompts of one prefix at once, at each of `HIT_RATES`, the two ways in turn."""
    namespace = KvNamespace("hit-rate benchmark")
    points: list[Point] = []
    for rate in HIT_RATES:
        cached = HIT_CONTEXT * rate // 100 // BLOCK_SIZE * BLOCK_SIZE
        uncached = HIT_CONTEXT - cached
        even: list[float] = []
        alone: list[float] = []
        for _ in range(HIT_ROUNDS):
            even.append(_throughput(ours, cached, namespace))
            with patch("pdd.engine.engine.schedule", _naively):
                alone.append(_throughput(ours, cached, namespace))
        points.append(Point(rate, uncached, statistics.median(even), statistics.median(alone)))
    return points


def table(points: Sequence[Point]) -> Iterator[str]:
    """Measured throughput beside the share of each step's budget that the schedule alone says is used."""
    yield "| hit rate | uncached tokens | tokens/s, even | budget used | tokens/s, naive | budget used |"
    yield "|---|---|---|---|---|---|"
    for point in points:
        even = scheduled(point.uncached, HIT_PROMPTS, step_tokens=STEP_TOKENS).utilisation
        rest = naive(point.uncached, HIT_PROMPTS, step_tokens=STEP_TOKENS).utilisation
        yield (
            f"| {point.hit_rate} % | {point.uncached:,} | {point.even:,.0f} | {even:.0%} | {point.naive:,.0f}"
            f" | {rest:.0%} |"
        )


def plot(points: Sequence[Point], to: Path) -> None:
    """The table as a picture; readable in grey."""
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "pdd"
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    rates = [point.hit_rate for point in points]
    axes.plot(rates, [point.even for point in points], "o-", color="#00497a", label=_EVEN)
    axes.plot(rates, [point.naive for point in points], "s--", color="#e07b00", label=_NAIVE)
    axes.set(
        xlabel=f"hit rate of prompts of {HIT_CONTEXT:,} tokens, %",
        ylabel="uncached tokens computed / s",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(to, metadata={"Date": None})
    plt.close(figure)


def _throughput(ours: Ours, cached: int, namespace: KvNamespace) -> float:
    """Uncached tokens a second of `HIT_PROMPTS` prompts behind a fresh prefix of `cached` tokens."""
    prefix = ours.tokens(cached)
    if prefix:
        key = ours.add([*prefix, 0], limit=1, namespace=namespace)
        list(ours.run())
        ours.stop([key])
    rest = HIT_CONTEXT - cached
    keys = [ours.add(prefix + ours.tokens(rest), limit=1, namespace=namespace) for _ in range(HIT_PROMPTS)]
    took = timed(lambda: list(ours.run()))
    ours.stop(keys)
    return HIT_PROMPTS * rest / took


def _naively(
    running: Sequence[Pending], waiting: Sequence[Pending], *, step_tokens: int, seats: int, free_blocks: int
) -> StepPlan:
    """`pdd.engine.scheduler.schedule` as chunking is often done: the first prompt's next full chunk or rest, alone."""
    first = next(iter([*running, *waiting]), None)
    if first is None:
        return StepPlan((), ())
    tokens = min(first.uncomputed, step_tokens)
    chunk = Chunk(first.key, tokens, is_last=tokens == first.uncomputed)
    return StepPlan((chunk,), () if running else (first.key,))
