"""Paged attention over ragged batches equals attention written out, whatever the pages and the query lengths."""

from __future__ import annotations

import math
import random

import pytest
import torch

from pdd.attention.interface import AttentionBatch, SequenceSlice
from pdd.attention.torch_backend import TorchAttention
from pdd.engine.kv_pool import KvPool
from pdd.kv import KvSpec

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 16
NUM_BLOCKS = 64


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last `len(q)` of `len(k)` tokens, one query and head at a time, in float64."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for row in range(len(q)):
        visible = len(k) - len(q) + row + 1
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = k[:visible, shared].double() @ q[row, head].double() / math.sqrt(HEAD_DIM)
            out[row, head] = torch.softmax(scores, 0) @ v[:visible, shared].double()
    return out


class Conversation:
    """One sequence: all its keys and values, layer by layer, and the scattered pages they go to."""

    def __init__(self, length: int, blocks: list[int]) -> None:
        self.blocks = blocks
        self.q = torch.randn(LAYERS, length, HEADS, HEAD_DIM)
        self.k = torch.randn(LAYERS, length, KV_HEADS, HEAD_DIM)
        self.v = torch.randn(LAYERS, length, KV_HEADS, HEAD_DIM)
        self.computed = 0


def step(backend: TorchAttention, parts: list[tuple[Conversation, int]]) -> None:
    """Extend each conversation by some tokens in one batch, and compare every layer's result."""
    slices = [SequenceSlice(count, c.computed + count, c.blocks) for c, count in parts]
    backend.plan(AttentionBatch(slices))
    for layer in range(LAYERS):
        rows = [slice(c.computed, c.computed + count) for c, count in parts]
        q, k, v = (
            torch.cat([getattr(c, name)[layer, row] for (c, _), row in zip(parts, rows, strict=True)]) for name in "qkv"
        )
        expected = torch.cat(
            [
                written_out(c.q[layer, row], c.k[layer, : row.stop], c.v[layer, : row.stop])
                for (c, _), row in zip(parts, rows, strict=True)
            ]
        )
        torch.testing.assert_close(backend.run(layer, q, k, v).double(), expected, atol=1e-5, rtol=1e-5)
    for c, count in parts:
        c.computed += count


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefill_extend_and_decode_share_batches(block_size: int) -> None:
    torch.manual_seed(block_size)
    pool = KvPool(KvSpec(LAYERS, KV_HEADS, HEAD_DIM, block_size, "float32"), NUM_BLOCKS)
    free = random.Random(block_size).sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    lengths = (21, 13, 18)
    a, b, c = (Conversation(n, [free.pop() for _ in range(-(-n // block_size))]) for n in lengths)
    backend = TorchAttention([pool.layer(index) for index in range(LAYERS)])
    step(backend, [(a, 9)])  # a whole prompt
    step(backend, [(b, 5), (a, 1)])  # a prompt beside a decode
    step(backend, [(a, 1), (b, 1)])  # decodes
    step(backend, [(c, 7), (a, 6), (b, 1)])  # prompt, extend, decode
    step(backend, [(b, 4), (c, 11), (a, 4)])  # extends only


def test_pages_outside_the_batch_are_left_alone() -> None:
    pool = KvPool(KvSpec(LAYERS, KV_HEADS, HEAD_DIM, 4, "float32"), 8)
    for block in range(8):
        pool.block(block)[:] = bytes([block]) * pool.spec.block_bytes
    before = {block: bytes(pool.block(block)) for block in range(8)}
    backend = TorchAttention([pool.layer(index) for index in range(LAYERS)])
    step(backend, [(Conversation(6, [5, 2]), 6)])
    assert {block for block in range(8) if bytes(pool.block(block)) != before[block]} == {5, 2}
