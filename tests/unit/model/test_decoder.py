"""Logits equal those of transformers: tiny random models from a directory, the default model from its GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pdd.attention.interface import AttentionBatch, SequenceSlice
from pdd.attention.torch_backend import TorchAttention
from pdd.engine.kv_pool import KvPool
from pdd.kv import KvSpec
from pdd.model.decoder import Decoder
from pdd.model.weights import Checkpoint, fill
from tests.model_fixtures import default_model_path, save_tiny_llama

TOKENS = 50


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Runner:
    """One model with a pool, and one sequence in it."""

    def __init__(self, path: Path, dtype: str = "float32", block_size: int = 4) -> None:
        checkpoint = Checkpoint(path)
        config = checkpoint.config
        self.model = Decoder(config, getattr(torch, dtype))
        fill(self.model.slots(), checkpoint.tensors())
        blocks = -(-128 // block_size)
        pool = KvPool(KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype), blocks + 1)
        self.attention = TorchAttention([pool.layer(index) for index in range(config.num_layers)])
        self.blocks = list(range(blocks, 0, -1))
        self.computed = 0

    def extend(self, tokens: list[int]) -> torch.Tensor:
        """Logits after each of `tokens`, which follow what was computed before."""
        count = len(tokens)
        self.attention.plan(AttentionBatch([SequenceSlice(count, self.computed + count, self.blocks)]))
        positions = torch.arange(self.computed, self.computed + count)
        self.computed += count
        return self.model.forward(torch.tensor(tokens), positions, self.attention, torch.arange(count))


@torch.inference_mode()
def expected_logits(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def random_tokens(vocab: int, count: int = TOKENS) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_tiny_llama(directory)


@pytest.mark.parametrize(
    "cuts",
    [[], [1], [17, 34], [TOKENS - 1], [*range(30, TOKENS)], [*range(1, TOKENS)], [20, 21, 22, 40]],
    ids=["whole", "token then rest", "chunks", "prefill then decode", "prefill then decodes", "decodes", "extend"],
)
def test_logits_equal_transformers(tiny: tuple[Path, LlamaForCausalLM], cuts: list[int]) -> None:
    directory, reference = tiny
    tokens = random_tokens(512)
    runner = Runner(directory)
    edges = [0, *cuts, TOKENS]
    got = torch.cat([runner.extend(tokens[a:b]) for a, b in pairwise(edges)])
    assert (got - expected_logits(reference, tokens)).abs().max() < 1e-4


def test_only_wanted_rows_go_through_the_head(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    directory, reference = tiny
    tokens = random_tokens(512)
    runner = Runner(directory)
    runner.attention.plan(AttentionBatch([SequenceSlice(TOKENS, TOKENS, runner.blocks)]))
    rows = torch.tensor([TOKENS - 1, 3])
    got = runner.model.forward(torch.tensor(tokens), torch.arange(TOKENS), runner.attention, rows)
    assert got.shape == (2, 512)
    assert (got - expected_logits(reference, tokens)[rows]).abs().max() < 1e-4


def test_bfloat16_stays_near_float32(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    directory, reference = tiny
    tokens = random_tokens(512)
    expected = expected_logits(reference, tokens)
    got = Runner(directory, "bfloat16").extend(tokens).float()
    scale = expected.std()
    assert (got - expected).abs().mean() < 0.02 * scale
    # No worse than transformers itself in bfloat16, which rounds more often.
    theirs = expected_logits(LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval(), tokens).float()
    assert (got - expected).abs().mean() < 1.1 * (theirs - expected).abs().mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packing_changes_speed_only(tiny: tuple[Path, LlamaForCausalLM], dtype: str) -> None:
    tokens = random_tokens(512)
    plain, packed = Runner(tiny[0], dtype), Runner(tiny[0], dtype)
    packed.model.pack()
    for chunk in (tokens[:40], tokens[40:41], tokens[41:]):
        torch.testing.assert_close(packed.extend(chunk), plain.extend(chunk))


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    reference = save_tiny_llama(tmp_path, tied=True)
    runner = Runner(tmp_path)
    assert runner.model.head.data_ptr() == runner.model.embedding.data_ptr()
    tokens = random_tokens(512)
    assert (runner.extend(tokens) - expected_logits(reference, tokens)).abs().max() < 1e-4


@pytest.mark.model
def test_the_default_model_equals_transformers() -> None:
    path = default_model_path()
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    runner = Runner(path, block_size=16)
    tokens = random_tokens(49_152, 24)
    expected = expected_logits(reference, tokens)
    got = runner.extend(tokens)
    # Q4_1 weights are equal in both; only the order of sums differs.
    assert (got - expected).abs().max() < 1e-3
    for _ in range(16):
        token = int(got[-1].argmax())
        assert token == int(expected[-1].argmax())
        tokens.append(token)
        got = runner.extend([token])
        expected = expected_logits(reference, tokens)
    assert (got[-1] - expected[-1]).abs().max() < 1e-3
