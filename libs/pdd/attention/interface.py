"""What attention looks like to a model and to those who batch for it.

A step's tokens lie one after the other, sequence by sequence (a ragged batch). A sequence that decodes has one query
token, one that extends has several; both are the same operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

LayerViews = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer of a pool, `[num_blocks, block_size, kv_heads, head_dim]` each."""


@dataclass(frozen=True)
class SequenceSlice:
    """One sequence's part of a step.

    Its last `query_len` of `context_len` tokens are computed now; the KV of the others is in the pool already.
    `blocks[i]` holds tokens `[i * block_size, (i + 1) * block_size)`; there are at least as many as the context needs.
    """

    query_len: int
    context_len: int
    blocks: Sequence[int]


@dataclass(frozen=True)
class AttentionBatch:
    """All sequences of a step, in the order of their tokens."""

    slices: Sequence[SequenceSlice]


class AttentionBackend(Protocol):
    """Causal grouped-query attention over a paged KV pool. One backend serves one pool and one thread."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare everything that all layers share. Called once a step, before any `run`."""
        ...

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write the step's `k` and `v` (`[tokens, kv_heads, head_dim]`, rotated) into the pool, then attend.

        `q` is `[tokens, heads, head_dim]`, and so is the result. Softmax scale is 1 / sqrt(head_dim). Called once a
        layer and step, in any order of layers.
        """
        ...
