"""Draws next tokens for a whole batch.

Random numbers are counter-based: the draw for one token depends on (seed, position) alone, so any stage, in any batch,
draws the same token from the same logits. The draw inverts the cumulative distribution in vocabulary order, not in
order of probability: two near-equal logits that swap ranks through rounding do not change what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdd.types import Sampling

_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Next token of each row of `logits` [n, vocab].

    `positions` are the indices, in prompt + output, of the tokens drawn.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        chosen = [samplings[row] for row in drawn]
        uniforms = [uniform(samplings[row].seed, positions[row]) for row in drawn]
        tokens[drawn] = _draw(logits[drawn], chosen, torch.tensor(uniforms, dtype=torch.float64))
    return tokens.tolist()


def uniform(seed: int, position: int) -> float:
    """A double in [0, 1) from (seed, position): two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014)."""
    return (_mix(_mix(seed & _MASK) ^ position) >> 11) / 2.0**53


def top2_margin(row: torch.Tensor) -> float:
    """Difference of the two largest logits of one row: how near to a tie greedy decoding was."""
    first, second = row.float().topk(2).values.tolist()
    return first - second


def _draw(logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: torch.Tensor) -> torch.Tensor:
    temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float64).unsqueeze(1)
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if any(s.top_k or s.top_p < 1 for s in samplings):
        probabilities = probabilities * _kept(probabilities, samplings)
    cumulative = probabilities.cumsum(dim=-1)
    threshold = uniforms.unsqueeze(1) * cumulative[:, -1:]
    # The first entry above the threshold has probability > 0, so a token that was cut is never drawn.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_(max=logits.shape[-1] - 1)


def _kept(probabilities: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Mask of tokens that top-k, then top-p leave: both keep every token tied with the last one kept."""
    ordered = probabilities.sort(dim=-1, descending=True).values
    vocab = probabilities.shape[-1]
    top_k = torch.tensor([min(s.top_k, vocab) or vocab for s in samplings]).unsqueeze(1)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64).unsqueeze(1)
    within_k = torch.where(torch.arange(vocab) < top_k, ordered, torch.zeros_like(ordered))
    before = within_k.cumsum(dim=-1) - within_k
    reached = before < top_p * within_k.sum(dim=-1, keepdim=True)
    count = (reached & (within_k > 0)).sum(dim=-1, keepdim=True).clamp_(min=1)
    smallest = ordered.gather(1, count - 1)
    return probabilities >= smallest


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
