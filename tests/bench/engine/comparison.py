"""Prefill and decode, the engine's and everybody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.bench.engine.measuring import Figure, Probe, in_turn
from tests.bench.engine.ours import Ours
from tests.bench.engine.settings import BATCHES, CONTEXT, PREFILLS
from tests.bench.engine.targets import Target
from tests.bench.engine.theirs import Rival

PDD = "PDD"
TRANSFORMERS = "transformers"
"""What the names of its ways begin with."""

PREFILL_GOAL, BATCH_GOAL, BATCH_OF_GOAL = 1.3, 2.5, 8


@dataclass(frozen=True)
class Row:
    """One piece of work, done in each of the ways, and the tokens that it computes."""

    what: str
    tokens: int
    figures: Mapping[str, Figure]

    @property
    def fastest(self) -> str:
        """Name of the fastest of transformers' ways."""
        ways = [name for name in self.figures if name.startswith(TRANSFORMERS)]
        return min(ways, key=lambda name: self.figures[name].median)

    @property
    def ratio(self) -> float:
        """Its time over the engine's."""
        return self.figures[self.fastest].median / self.figures[PDD].median

    def rate(self, name: str) -> float:
        """Tokens per second."""
        return self.tokens / self.figures[name].median * 1e3


def prefill_rows(ours: Ours, rivals: Mapping[str, Rival]) -> list[Row]:
    """Prompts of `PREFILLS` tokens, alone."""
    rows: list[Row] = []
    for count in PREFILLS:
        probes: dict[str, Probe] = {PDD: _prefill(ours.prefill, count)}
        probes |= {name: _prefill(rival.prefill, count) for name, rival in rivals.items()}
        rows.append(Row(f"prefill of {count:,} tokens", count, in_turn(probes)))
    return rows


def decode_rows(ours: Ours, rivals: Mapping[str, Rival]) -> list[Row]:
    """Decode steps of `BATCHES`."""
    rows: list[Row] = []
    for batch in BATCHES:
        keys = ours.start(batch)
        figures = in_turn({PDD: ours.decode} | {name: rival.start(batch) for name, rival in rivals.items()})
        ours.stop(keys)
        rows.append(Row(f"decode step, batch {batch}, context {CONTEXT}", batch, figures))
    return rows


def scaling(ours: Ours, batches: tuple[int, ...]) -> dict[int, float]:
    """Decode throughput of the engine alone, tokens per second by batch."""
    throughput: dict[int, float] = {}
    for batch in batches:
        keys = ours.start(batch)
        throughput[batch] = batch / in_turn({PDD: ours.decode})[PDD].median * 1e3
        ours.stop(keys)
    return throughput


def summary(rows: list[Row]) -> Iterator[str]:
    """The engine beside the fastest of transformers' ways."""
    yield "| what | PDD | tokens/s | transformers, its fastest way | ratio |"
    yield "|---|---|---|---|---|"
    for row in rows:
        other = f"{row.figures[row.fastest]}: {row.fastest.removeprefix(TRANSFORMERS + ', ')}"
        yield f"| {row.what} | {row.figures[PDD]} | {row.rate(PDD):,.0f} | {other} | {row.ratio:.2f} |"


def all_ways(rows: list[Row]) -> Iterator[str]:
    """Medians of everything, in milliseconds, the fastest in bold."""
    yield "| way, ms | " + " | ".join(row.what for row in rows) + " |"
    yield "|---|" + "---|" * len(rows)
    for name in rows[0].figures:
        cells: list[str] = []
        for row in rows:
            cell = f"{row.figures[name].median:.1f}"
            is_best = row.figures[name].median == min(figure.median for figure in row.figures.values())
            cells.append(f"**{cell}**" if is_best else cell)
        yield f"| {name} | " + " | ".join(cells) + " |"


def targets(prefills: list[Row], decodes: list[Row], throughput: Mapping[int, float]) -> Iterator[Target]:
    """Those that this module measures."""
    for row in prefills:
        yield Target(f"{row.what}, transformers' time over the engine's", PREFILL_GOAL, row.ratio)
    eight = decodes[BATCHES.index(BATCH_OF_GOAL)]
    yield Target(f"{eight.what}, transformers' time over the engine's", BATCH_GOAL, eight.ratio)
    below = max(batch for batch in throughput if batch < max(BATCHES))
    rise = throughput[max(BATCHES)] / throughput[below]
    yield Target(f"decode throughput at batch {max(BATCHES)} over that at batch {below}: still rising", 1.0, rise)


def _prefill(of: Callable[[int], float], count: int) -> Probe:
    return lambda: of(count)
