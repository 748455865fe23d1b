"""A decode step beside the least it has to do: its matrices, one after the other, and nothing between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pdd.attention.interface import SequenceSlice
from pdd.model.config import ModelConfig
from pdd.model.linear import Linear
from pdd.native.decoder import NativeDecoder
from tests.bench.engine.measuring import Figure, Probe, in_turn, timed
from tests.bench.engine.ours import Ours
from tests.bench.engine.settings import CONTEXT, ROUNDS, STEPS
from tests.bench.engine.targets import Target

MATRICES_GOAL, OVERHEAD_GOAL, OVERHEAD_BATCH = 0.85, 5.0, 8
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class AloneOrNot:
    """A batch-1 decode step; its matrices alone by the best kernel, `best`; what both read."""

    decode: Figure
    alone: Figure
    best: str
    weight_bytes: int
    memory_gb_s: float

    @property
    def ratio(self) -> float:
        """The share of a step that its matrices would need alone."""
        return self.alone.median / self.decode.median

    def lines(self) -> Iterator[str]:
        """For the page."""
        rate = self.weight_bytes / self.decode.median / 1e6
        yield (
            f"A decode step at batch 1 and context {CONTEXT} takes {self.decode}; its matrices alone, one row, back to"
            f" back, take {self.alone} with the best kernel ({self.best}): {self.ratio:.2f} of the step. The step reads"
            f" weights at {rate:.1f} GB/s, {rate / self.memory_gb_s:.0%} of the {self.memory_gb_s:.1f} GB/s at which"
            " a sum over a gigabyte reads memory."
        )

    def target(self) -> Target:
        """See `lines`."""
        return Target("batch-1 decode: its matrices' time alone over the step's", MATRICES_GOAL, self.ratio)


def beside_its_matrices(ours: Ours, config: ModelConfig) -> AloneOrNot:
    """Measure a batch-1 step and its matrices by each kernel, in turn."""
    kernels = _torch_kernels(config)
    decoder = ours.decoder
    if isinstance(decoder, NativeDecoder):
        kernels["native"] = _repeated(lambda: decoder.products(1))
    memory = torch.ones(256 << 20)
    keys = ours.start(1)
    figures = in_turn({"decode": ours.decode, "memory": lambda: timed(memory.sum)} | kernels)
    ours.stop(keys)
    best = min(kernels, key=lambda name: figures[name].median)
    weight_bytes = 2 * (sum(rows * columns for rows, columns in _shapes(config)))
    return AloneOrNot(
        figures["decode"], figures[best], best, weight_bytes, memory.nbytes / figures["memory"].median / 1e6
    )


def overhead(ours: Ours) -> Target:
    """Per cent of a decode step that pass outside the forward pass."""
    decoder, inside = ours.decoder, 0.0
    forward = decoder.forward

    def watched(tokens: Sequence[int], slices: Sequence[SequenceSlice], rows: Sequence[int]) -> torch.Tensor:
        nonlocal inside
        began = time.perf_counter()
        try:
            return forward(tokens, slices, rows)
        finally:
            inside += time.perf_counter() - began

    keys = ours.start(OVERHEAD_BATCH)
    ours.decode()
    decoder.forward = watched
    whole = sum(ours.decode() for _ in range(ROUNDS)) * STEPS
    del decoder.forward
    ours.stop(keys)
    what = f"per cent of a decode step at batch {OVERHEAD_BATCH} outside the forward pass"
    return Target(what, OVERHEAD_GOAL, 100 * (1 - inside / whole), is_ceiling=True)


def _shapes(config: ModelConfig) -> list[tuple[int, int]]:
    heads = config.num_heads * config.head_dim
    layer = [
        (heads + 2 * config.num_kv_heads * config.head_dim, config.hidden_size),
        (config.hidden_size, heads),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]
    return layer * config.num_layers + [(config.vocab_size, config.hidden_size)]


def _torch_kernels(config: ModelConfig) -> dict[str, Probe]:
    """Torch's products of one row with plain matrices, and with those that it has put into its own order."""
    shapes = _shapes(config)
    inputs = [torch.randn(1, columns).bfloat16() for _, columns in shapes]
    plain = [torch.randn(shape).bfloat16() for shape in shapes]
    packed: list[Linear] = []
    for (rows, columns), weight in zip(shapes, plain, strict=True):
        linear = Linear(rows, columns, torch.bfloat16, _CPU, bias=False)
        linear.weight.copy_(weight)
        linear.pack()
        packed.append(linear)

    @torch.inference_mode()
    def by_plain() -> None:
        for x, weight in zip(inputs, plain, strict=True):
            F.linear(x, weight)

    @torch.inference_mode()
    def by_packed() -> None:
        for x, linear in zip(inputs, packed, strict=True):
            linear(x)

    return {"torch": _repeated(by_plain), "torch, packed": _repeated(by_packed)}


def _repeated(work: Callable[[], None]) -> Probe:
    return lambda: timed(lambda: [work() for _ in range(STEPS)]) / STEPS
