"""What the engine asks of a model: the logits of a ragged step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from pdd.attention.interface import SequenceSlice


class Decoder(Protocol):
    """A model with the KV pool it reads and writes. For one thread."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are to choose from."""
        ...

    def forward(self, tokens: Sequence[int], slices: Sequence[SequenceSlice], rows: Sequence[int]) -> torch.Tensor:
        """Compute a planned step and return the logits after some of its tokens.

        `tokens` lie sequence by sequence, as `slices` say, which tell their positions too; their KV is in the pool
        afterwards. `rows` are indices into `tokens`. Returns `[len(rows), vocab_size]` in the host's memory: there the
        same sampler draws for every device.
        """
        ...
