"""Attention with torch's own kernels, for CPUs and for any device without a specialised backend.

Gathers each sequence's pages and calls scaled-dot-product attention, sequence by sequence. Owns nothing: it reads
and writes the pool it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdd.attention.interface import AttentionBatch, LayerViews


@dataclass(frozen=True)
class _Planned:
    """One sequence: its rows in the step, its pages, and how its queries see its context."""

    first: int
    end: int
    context_len: int
    pages: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool


class TorchAttention:
    """An `AttentionBackend` over `layers`, the pool's views of each layer."""

    def __init__(self, layers: Sequence[LayerViews]) -> None:
        self._layers = layers
        self._block_size = layers[0][0].shape[1]
        self._device = layers[0][0].device
        self._planned: list[_Planned] = []
        self._blocks = self._offsets = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        size = self._block_size
        planned: list[_Planned] = []
        blocks: list[int] = []
        offsets: list[int] = []
        row = 0
        for part in batch.slices:
            query, context = part.query_len, part.context_len
            written = range(context - query, context)
            blocks.extend(part.blocks[position // size] for position in written)
            offsets.extend(position % size for position in written)
            # `is_causal` aligns the mask's top left, which is right for a square one only; a single query sees all.
            square = query == context
            mask = None
            if query > 1 and not square:
                mask = torch.ones(query, context, dtype=torch.bool, device=self._device).tril(context - query)
            pages = torch.tensor(part.blocks[: -(-context // size)], device=self._device)
            planned.append(_Planned(row, row + query, context, pages, mask, is_causal=query > 1 and square))
            row += query
        self._planned = planned
        self._blocks = torch.tensor(blocks, device=self._device)
        self._offsets = torch.tensor(offsets, device=self._device)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend`."""
        keys, values = self._layers[layer]
        keys[self._blocks, self._offsets] = k
        values[self._blocks, self._offsets] = v
        if len(self._planned) == 1:
            return self._attend(self._planned[0], keys, values, q)
        return torch.cat([self._attend(part, keys, values, q[part.first : part.end]) for part in self._planned])

    @staticmethod
    def _attend(part: _Planned, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        # Sequences' pages, one after the other: [pages * block_size, kv_heads, head_dim], cut to the context.
        k = keys.index_select(0, part.pages).flatten(0, 1)[: part.context_len]
        v = values.index_select(0, part.pages).flatten(0, 1)[: part.context_len]
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k.transpose(0, 1).unsqueeze(0),
            v.transpose(0, 1).unsqueeze(0),
            attn_mask=part.mask,
            is_causal=part.is_causal,
            enable_gqa=True,
        )
        return attended.squeeze(0).transpose(0, 1)
