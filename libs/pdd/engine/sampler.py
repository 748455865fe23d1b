"""Draws next tokens for a whole batch.

Random numbers are counter-based: the draw for one token depends on (seed, position) alone, so any stage, in any batch,
draws the same token from the same logits. The draw inverts the cumulative distribution in vocabulary order, not in
order of probability: two near-equal logits that swap ranks through rounding do not change what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from pdd.types import Sampling

_MASK = (1 << 64) - 1
_HEAD = 256
_WIDER = 8


def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Draw the next token of each row of `logits`, `[n, vocab]`.

    `positions[i]` is the index, in prompt + output, of the token drawn from row i. Bias and penalties are
    `pdd.engine.penalties`' business.
    """
    logits = logits.float()  # of bfloat16, torch reads one at a time
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        chosen = [samplings[row] for row in drawn]
        uniforms = [uniform(samplings[row].seed, positions[row]) for row in drawn]
        tokens[drawn] = _draw(logits[drawn], chosen, torch.tensor(uniforms, dtype=torch.float64))
    return cast("list[int]", tokens.tolist())


def uniform(seed: int, position: int) -> float:
    """A double in [0, 1) from (seed, position): SplitMix64's finaliser (Steele, Lea, Flood 2014) over each in turn."""
    return (_mix(_mix(seed & _MASK) ^ position) >> 11) / 2.0**53


def top2_margin(row: torch.Tensor) -> float:
    """Difference of the two largest logits of one row, `[vocab]`: how near to a tie a greedy choice was."""
    best = row.float().topk(2).values
    return float(best[0] - best[1])


def _draw(logits: torch.Tensor, samplings: Sequence[Sampling], uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution, in vocabulary order, at `uniforms` `[n]` float64."""
    temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float64).unsqueeze(1)
    # The maximum first: a temperature close to zero then gives minus infinity at worst, never infinity over infinity.
    wide = logits.double()
    probabilities = torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / temperature, dim=-1)
    if any(s.min_p > 0 for s in samplings):
        min_p = torch.tensor([s.min_p for s in samplings], dtype=torch.float64).unsqueeze(1)
        likely = probabilities >= min_p * probabilities.amax(dim=-1, keepdim=True)
        probabilities = torch.where(likely, probabilities, torch.zeros_like(probabilities))
    if cut := [row for row, s in enumerate(samplings) if s.top_k or s.top_p < 1]:
        whole = probabilities[cut]
        probabilities[cut] = whole * _kept(whole, [samplings[row] for row in cut])
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, whatever the product rounds to: then the first entry above the threshold is a token of
    # probability > 0, so one that was cut is never drawn.
    threshold = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def _kept(probabilities: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Mask of what top-k, then top-p leave. Both keep every token that ties with the last one kept."""
    vocab = probabilities.shape[-1]
    top_k = torch.tensor([min(s.top_k, vocab) or vocab for s in samplings]).unsqueeze(1)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64).unsqueeze(1)
    # Sorting a whole vocabulary takes longer than a small model's step, and the head is nearly always enough.
    width = min(_HEAD, vocab)
    while True:
        ordered = probabilities.topk(width, dim=-1).values
        reached = ordered.cumsum(dim=-1)
        by_k = top_k <= width
        # Neither sum depends on `width`, which is the batch's: what a row keeps is its own affair.
        all_of_it = probabilities.sum(dim=-1, keepdim=True)
        target = top_p * torch.where(by_k, reached.gather(1, top_k.clamp(max=width) - 1), all_of_it)
        if width == vocab or bool((by_k | ((reached[:, -1:] >= target) & (top_k == vocab))).all()):
            break
        width = min(width * _WIDER, vocab)
    within = (torch.arange(width) < top_k) & (reached - ordered < target) & (ordered > 0)
    count = within.sum(dim=-1, keepdim=True).clamp_(min=1)
    return probabilities >= ordered.gather(1, count - 1)


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
