"""Logits equal those of transformers: tiny random models from a directory, the default model from its GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pdd.native import library
from tests.model_fixtures import default_model_path, save_tiny_llama
from tests.unit.model.runner import Runner, filled

TOKENS = 50


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and (reason := library.missing()):
        pytest.skip(f"no native kernels: {reason}")
    return request.param


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
def test_logits_equal_transformers(tiny: tuple[Path, LlamaForCausalLM], cuts: list[int], kernels: str) -> None:
    directory, reference = tiny
    tokens = random_tokens(512)
    runner = Runner(directory, kernels=kernels)
    edges = [0, *cuts, TOKENS]
    got = torch.cat([runner.extend(tokens[a:b]) for a, b in pairwise(edges)])
    assert (got - expected_logits(reference, tokens)).abs().max() < 1e-4


def test_only_wanted_rows_go_through_the_head(tiny: tuple[Path, LlamaForCausalLM], kernels: str) -> None:
    directory, reference = tiny
    tokens = random_tokens(512)
    rows = [TOKENS - 1, 3]
    got = Runner(directory, kernels=kernels).extend(tokens, rows)
    assert got.shape == (2, 512)
    assert (got - expected_logits(reference, tokens)[rows]).abs().max() < 1e-4


def test_bfloat16_stays_near_float32(tiny: tuple[Path, LlamaForCausalLM], kernels: str) -> None:
    directory, reference = tiny
    tokens = random_tokens(512)
    expected = expected_logits(reference, tokens)
    got = Runner(directory, "bfloat16", kernels=kernels).extend(tokens).float()
    scale = expected.std()
    assert (got - expected).abs().mean() < 0.02 * scale
    # No worse than transformers itself in bfloat16, which rounds more often.
    theirs = expected_logits(LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval(), tokens).float()
    assert (got - expected).abs().mean() < 1.1 * (theirs - expected).abs().mean()


def test_a_tied_head_shares_the_embedding(tmp_path: Path, kernels: str) -> None:
    reference = save_tiny_llama(tmp_path, tied=True)
    parameters = filled(tmp_path)
    assert parameters.head.data_ptr() == parameters.embedding.data_ptr()
    tokens = random_tokens(512)
    got = Runner(tmp_path, kernels=kernels).extend(tokens)
    assert (got - expected_logits(reference, tokens)).abs().max() < 1e-4


@pytest.mark.model
def test_the_default_model_equals_transformers(kernels: str) -> None:
    path = default_model_path()
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    runner = Runner(path, block_size=16, kernels=kernels)
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
