"""One sequence on a decoder of its own: what tests compare with transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from pdd.attention.interface import SequenceSlice
from pdd.attention.torch_backend import TorchAttention
from pdd.engine.kv_pool import KvPool
from pdd.kv import KvSpec
from pdd.model.config import ModelConfig
from pdd.model.decoder import Decoder
from pdd.model.parameters import Parameters
from pdd.model.torch_decoder import TorchDecoder
from pdd.model.weights import Checkpoint, fill
from pdd.native import library
from pdd.native.decoder import NativeDecoder, unsupported


def filled(path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Parameters:
    """A checkpoint's parameters, plain."""
    checkpoint = Checkpoint(path)
    parameters = Parameters(checkpoint.config, dtype, torch.device(device))
    fill(parameters.slots(), checkpoint.tensors())
    return parameters


def usable_kernels(config: ModelConfig) -> list[str]:
    """Kernels that this machine has for a model of that shape."""
    return ["torch"] if unsupported(config) or library.missing() else ["torch", "native"]


class Runner:
    """One model with a pool, and one sequence in it."""

    def __init__(
        self,
        path: Path,
        dtype: str = "float32",
        block_size: int = 4,
        kernels: str = "torch",
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        parameters = filled(path, getattr(torch, dtype), device)
        config = self.config = parameters.config
        blocks = -(-128 // block_size)
        spec = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
        self.pool = KvPool(spec, blocks + 1, device)
        views = [self.pool.layer(index) for index in range(config.num_layers)]
        self.decoder: Decoder = (
            NativeDecoder(parameters, views, threads=threads)
            if kernels == "native"
            else TorchDecoder(parameters, TorchAttention(views))
        )
        self.blocks = list(range(blocks, 0, -1))
        self.computed = 0

    def extend(self, tokens: list[int], rows: list[int] | None = None) -> torch.Tensor:
        """Logits after `rows` of `tokens` (after all, if None), which follow what was computed before."""
        count = len(tokens)
        self.computed += count
        part = SequenceSlice(count, self.computed, self.blocks)
        return self.decoder.forward(tokens, [part], list(range(count)) if rows is None else rows)
