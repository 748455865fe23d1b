"""Log-probabilities of what was drawn and of what might have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of a drawn token, and of the likeliest ones as `(token, log-probability)`, best first.

    Of the model's own distribution: before bias, penalties and temperature.
    """

    drawn: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: torch.Tensor, drawn: Sequence[int], top: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """For each row of the model's `logits`, `[n, vocab]`: those of `drawn[i]` and of the `top[i]` likeliest tokens.

    None where `top[i]` is None. Equal ones are named in the order of their IDs.
    """
    rows = [row for row, count in enumerate(top) if count is not None]
    answers: list[TokenLogprobs | None] = [None] * len(drawn)
    if not rows:
        return answers
    wide = torch.log_softmax(logits[rows].double(), dim=-1)
    most = min(max(top[row] or 0 for row in rows), wide.shape[-1])
    # A stable sort, and not topk, which orders equal ones as it likes.
    kept = wide.topk(most, dim=-1).values[:, -1:] if most else None
    for index, row in enumerate(rows):
        line, count = wide[index], min(top[row] or 0, most)
        best: list[tuple[int, float]] = []
        if kept is not None and count:
            ids = torch.nonzero(line >= kept[index]).squeeze(1)
            order = ids[torch.argsort(line[ids], descending=True, stable=True)][:count]
            best = list(zip(cast("list[int]", order.tolist()), cast("list[float]", line[order].tolist()), strict=True))
        answers[row] = TokenLogprobs(float(line[drawn[row]]), tuple(best))
    return answers
