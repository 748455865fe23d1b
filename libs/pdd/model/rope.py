"""How fast each pair of a head's dimensions turns with the position: RoPE and its scaled variants.

A pure function of the configuration, computed as transformers does (`modeling_rope_utils`), in float32. Frequencies
never depend on how long a sequence is: cached keys must mean the same whatever follows them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from pdd.attention.interface import SequenceSlice
from pdd.model.config import ModelConfig, RopeConfig


@functools.cache
def frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of the pairs (i, i + head_dim / 2), `[head_dim / 2]` float32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case "default" | "dynamic":
            # Dynamic scaling begins beyond the context length, which no sequence exceeds.
            return plain
        case "linear":
            return plain / rope.factor
        case "divisors":
            return plain / torch.tensor(rope.divisors)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)


def rotation(config: ModelConfig, slices: Sequence[SequenceSlice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, `[tokens, head_dim / 2]` float32 each, of a step's tokens; scaled as the variant wants."""
    positions = [position for s in slices for position in range(s.context_len - s.query_len, s.context_len)]
    angles = torch.outer(torch.tensor(positions, dtype=torch.float32), frequencies(config.rotary, config.head_dim))
    scale = config.rotary.attention_factor
    return angles.cos() * scale, angles.sin() * scale


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Keep high frequencies, divide low ones by the factor, and blend those between."""
    turns = rope.original_context * plain / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Keep pairs that turn more than `beta_fast` times in the original context, divide those that turn less than
    `beta_slow` times by the factor, and blend those between along the dimensions."""
    head_dim = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(rope.original_context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    slow = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * slow + plain * (1 - slow)
