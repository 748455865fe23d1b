"""The pool's bytes are where `KvMemory` says they are."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from pdd.engine.kv_pool import KvPool
from pdd.kv import KvSpec

SPEC = KvSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")


def test_a_block_is_one_run_of_bytes_laid_out_as_the_spec_says() -> None:
    pool = KvPool(SPEC, num_blocks=5)
    for layer in range(3):
        for values, base in zip(pool.layer(layer), (0.0, 0.5), strict=True):
            assert values.shape == (5, 4, 2, 8)
            values[3] = layer + base
    block = torch.frombuffer(pool.block(3), dtype=torch.bfloat16).view(3, 2, 4, 2, 8)
    for layer in range(3):
        assert (block[layer, 0] == layer).all()
        assert (block[layer, 1] == layer + 0.5).all()
    assert pool.block(3).nbytes == SPEC.block_bytes
    assert pool.address % mmap.PAGESIZE == 0
    assert ctypes.string_at(pool.address + 3 * SPEC.block_bytes, SPEC.block_bytes) == bytes(pool.block(3))
    assert not any(any(pool.block(other)) for other in (0, 1, 2, 4))


def test_what_is_written_into_a_block_is_what_attention_reads() -> None:
    pool = KvPool(SPEC, num_blocks=3)
    source = torch.randn(3, 2, 4, 2, 8).bfloat16()
    pool.block(2)[:] = memoryview(source.view(torch.uint8).numpy()).cast("B")
    for layer in range(3):
        keys, values = pool.layer(layer)
        assert torch.equal(keys[2], source[layer, 0])
        assert torch.equal(values[2], source[layer, 1])


@pytest.mark.parametrize("index", [-1, 3])
def test_there_are_no_other_blocks(index: int) -> None:
    with pytest.raises(IndexError):
        KvPool(SPEC, num_blocks=3).block(index)
