"""What a request changes of the model's logits before anything is drawn: biases, and penalties for what was said.

Both depend on the tokens alone, so that any stage changes the same logits alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdd.types import Sampling


@dataclass(frozen=True)
class History:
    """A row's request: what it wants, the tokens so far, and how many of these are the prompt."""

    sampling: Sampling
    tokens: Sequence[int]
    prompt_len: int


def adjusted(logits: torch.Tensor, histories: Sequence[History]) -> torch.Tensor:
    """Apply biases, then penalties (see `Sampling`) to `logits`, `[n, vocab]`; row i is that of `histories[i]`.

    Returns `logits` itself if no row wants anything, else a changed copy in float32.
    """
    biased = [(row, h) for row, h in enumerate(histories) if h.sampling.logit_bias]
    penalised = [(row, h) for row, h in enumerate(histories) if h.sampling.penalises]
    if not biased and not penalised:
        return logits
    logits = logits.float().clone()
    for row, history in biased:
        tokens, values = zip(*history.sampling.logit_bias, strict=True)
        logits[row].index_add_(0, torch.tensor(tokens), torch.tensor(values, dtype=logits.dtype))
    if penalised:
        rows = [row for row, _ in penalised]
        logits[rows] = _penalised(logits[rows], [history for _, history in penalised])
    return logits


def _penalised(logits: torch.Tensor, histories: Sequence[History]) -> torch.Tensor:
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype).unsqueeze(1)

    repetition = column([h.sampling.repetition_penalty for h in histories])
    presence = column([h.sampling.presence_penalty for h in histories])
    frequency = column([h.sampling.frequency_penalty for h in histories])
    said = _counts(logits, [h.tokens[h.prompt_len :] for h in histories])
    seen = said + _counts(logits, [h.tokens[: h.prompt_len] for h in histories])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen > 0, repeated, logits)
    return logits - frequency * said - presence * (said > 0)


def _counts(like: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """How often each token of the vocabulary occurs in each row's tokens, `[n, vocab]`."""
    counts = torch.zeros_like(like)
    rows = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor([len(row) for row in tokens]))
    ids = torch.tensor([token for row in tokens for token in row], dtype=torch.int64)
    return counts.index_put_((rows, ids), torch.ones(len(ids), dtype=like.dtype), accumulate=True)
