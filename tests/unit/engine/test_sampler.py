"""Draws follow the distribution, and depend on (seed, position, logits) alone."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
import torch
from transformers import MinPLogitsWarper

from pdd.engine.penalties import History, adjusted
from pdd.engine.sampler import _kept, sample, top2_margin, uniform
from pdd.types import Sampling

VOCAB = 64


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def chi_square(counts: Counter[int], probabilities: torch.Tensor, draws: int) -> tuple[float, int]:
    """Statistic over the cells expected at least five times (the rest pooled), and its degrees of freedom."""
    expected = (probabilities.double() * draws).tolist()
    large = [token for token, count in enumerate(expected) if count >= 5]
    cells = [(counts[token], expected[token]) for token in large]
    rest = draws - sum(e for _, e in cells)
    if rest >= 5:
        cells.append((draws - sum(o for o, _ in cells), rest))
    return sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1


def critical(freedom: int) -> float:
    """Chi-square value passed with probability 1e-4 (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_softmax(logits: torch.Tensor, temperature: float, vary: str) -> None:
    draws = 20_000
    rows = logits[:1].expand(draws, -1)
    seeds = range(draws) if vary == "seed" else [7] * draws
    positions = list(range(draws)) if vary == "position" else [7] * draws
    tokens = sample(rows, [Sampling(temperature=temperature, seed=seed) for seed in seeds], positions)
    statistic, freedom = chi_square(Counter(tokens), torch.softmax(logits[0] / temperature, 0), draws)
    assert statistic < critical(freedom)


def test_neighbouring_draws_are_independent() -> None:
    draws, side = 40_000, 8
    values = [int(uniform(3, position) * side) for position in range(draws + 1)]
    pairs = Counter(a * side + b for a, b in pairwise(values))
    statistic, freedom = chi_square(pairs, torch.full((side * side,), 1 / side**2), draws)
    assert statistic < critical(freedom)


def test_top_k_and_top_p_keep_the_head_of_the_distribution(logits: torch.Tensor) -> None:
    draws = 20_000
    row = logits[0]
    probabilities = torch.softmax(row, 0)
    order = probabilities.argsort(descending=True)
    top_k = probabilities[order[:10]] / probabilities[order[:10]].sum()
    nucleus = int((top_k.cumsum(0) < 0.8).sum()) + 1  # the fewest of the ten that reach 0.8 of their mass
    kept = torch.zeros(VOCAB)
    kept[order[:nucleus]] = top_k[:nucleus] / top_k[:nucleus].sum()

    sampling = Sampling(temperature=1.0, top_k=10, top_p=0.8, seed=5)
    tokens = sample(row.expand(draws, -1), [sampling] * draws, list(range(draws)))
    assert set(tokens) == set(order[:nucleus].tolist())
    statistic, freedom = chi_square(Counter(tokens), kept, draws)
    assert statistic < critical(freedom)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_min_p_cuts_what_is_less_likely_than_its_share_of_the_likeliest(
    logits: torch.Tensor, temperature: float
) -> None:
    draws = 20_000
    scaled = logits[0] / temperature
    theirs = MinPLogitsWarper(0.2)(torch.zeros(1, 1, dtype=torch.int64), scaled.unsqueeze(0))[0]
    kept = torch.softmax(theirs, 0)
    sampling = Sampling(temperature=temperature, min_p=0.2, seed=8)
    tokens = sample(logits[:1].expand(draws, -1), [sampling] * draws, list(range(draws)))
    assert set(tokens) <= set(torch.nonzero(kept).squeeze(1).tolist())
    statistic, freedom = chi_square(Counter(tokens), kept, draws)
    assert statistic < critical(freedom)


def test_draws_with_penalties_follow_the_changed_distribution(logits: torch.Tensor) -> None:
    draws = 20_000
    sampling = Sampling(
        temperature=0.9,
        seed=12,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias=((9, 1.5),),
    )
    likely = logits[0].topk(4).indices.tolist()
    history = History(sampling, [*likely, likely[0], likely[0]], 2)
    changed = adjusted(logits[:1], [history])
    tokens = sample(changed.expand(draws, -1), [sampling] * draws, list(range(draws)))
    statistic, freedom = chi_square(Counter(tokens), torch.softmax(changed[0] / 0.9, 0), draws)
    assert statistic < critical(freedom)
    unchanged, _ = chi_square(Counter(tokens), torch.softmax(logits[0] / 0.9, 0), draws)
    assert unchanged > 10 * critical(freedom)


def test_the_batch_makes_no_difference(logits: torch.Tensor) -> None:
    samplings = [
        Sampling(),
        Sampling(temperature=0.8, seed=1),
        Sampling(temperature=0.8, top_p=0.9, seed=2),
        Sampling(temperature=1.3, top_k=5, seed=3),
        Sampling(temperature=1.0, top_k=5, top_p=0.5, seed=4),
        Sampling(),
        Sampling(temperature=2.0, seed=2**64 - 1),
        Sampling(temperature=0.9, top_p=0.99, min_p=0.1, seed=6),
    ]
    positions = [3, 3, 10, 500, 7, 7, 1, 0]
    alone = [sample(logits[i : i + 1], [samplings[i]], [positions[i]])[0] for i in range(8)]
    assert sample(logits, samplings, positions) == alone
    back = list(reversed(range(8)))
    assert sample(logits[back], [samplings[i] for i in back], [positions[i] for i in back]) == alone[::-1]


def test_greedy_takes_the_largest_and_the_extremes_of_sampling_agree(logits: torch.Tensor) -> None:
    best = logits.argmax(-1).tolist()
    positions = list(range(8))
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.0, top_p=1e-9)):
        assert sample(logits, [sampling] * 8, positions) == best


def test_rounding_that_swaps_two_ranks_does_not_change_the_draw(logits: torch.Tensor) -> None:
    near = logits[:1].repeat(2, 1)
    first, second = near[0].topk(2).indices.tolist()
    near[:, second] = near[0, first]
    near[0, first] += 1e-6
    near[1, second] += 1e-6
    for position in range(500):
        sampling = Sampling(temperature=0.9, seed=11)
        assert len(set(sample(near, [sampling] * 2, [position] * 2))) == 1


def test_a_cut_token_is_never_drawn_at_the_very_end_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.engine.sampler.uniform", lambda seed, position: 1 - 2.0**-53)
    row = torch.zeros(1, VOCAB)
    row[0, :3] = 5.0
    assert sample(row, [Sampling(temperature=1.0, top_k=3)], [0]) == [2]


def test_uniform_is_fixed_for_ever() -> None:
    """Stages of different versions draw together: these values must not change."""
    drawn = [uniform(0, 0), uniform(20_261_201, 17), uniform(2**64 - 1, 2**20)]
    assert drawn == [0.6524484863740322, 0.7307431486195377, 0.9333723244935486]


def test_top2_margin() -> None:
    assert top2_margin(torch.tensor([1.0, 4.5, 4.0, -3.0])) == 0.5


@pytest.mark.parametrize("temperature", [1e-308, 5e-324, 1e-30, 2.0])
def test_any_temperature_draws_a_token_of_the_vocabulary(temperature: float) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(temperature=temperature, top_p=0.5, seed=1)
    drawn = [sample(logits, [sampling], [position])[0] for position in range(64)]
    assert all(0 <= token < 50 for token in drawn)
    if temperature < 1e-6:
        assert set(drawn) == {int(logits.argmax())}


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 6.0])
def test_a_large_vocabulary_is_cut_alike_whoever_is_beside_it(sharpness: float) -> None:
    """However far down the cut lies, and however far its neighbour's does."""
    vocab = 5000
    rows = torch.randn(4, vocab, generator=torch.Generator().manual_seed(4)) * sharpness
    samplings = [
        Sampling(temperature=1.0, top_p=0.9, seed=1),
        Sampling(temperature=1.0, top_k=700, top_p=0.6, seed=2),
        Sampling(temperature=1.0, top_k=3000, seed=3),
        Sampling(temperature=0.3, top_p=0.2, seed=4),
    ]
    probabilities = torch.softmax(rows.double() / torch.tensor([[1.0], [1.0], [1.0], [0.3]]), -1)
    kept = _kept(probabilities, samplings)
    for index, sampling in enumerate(samplings):
        assert torch.equal(_kept(probabilities[index : index + 1], [sampling])[0], kept[index])
        ordered = probabilities[index].sort(descending=True).values[: sampling.top_k or vocab]
        before = ordered.cumsum(0) - ordered
        assert int(kept[index].sum()) == int((before < sampling.top_p * ordered.sum()).sum())
