"""The native forward pass: any shape it accepts, and rows that depend on their own sequence alone."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.attention.interface import SequenceSlice
from pdd.engine.engine import SequenceSpec, generate
from pdd.engine.loading import load_engine
from pdd.errors import ConfigError
from pdd.kv import KvNamespace
from pdd.native import build, library
from pdd.types import AttemptKey, Sampling, StopRule
from tests.model_fixtures import default_model_path, save_tiny
from tests.unit.model.runner import Runner

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=f"no native kernels: {library.missing()}")

SHAPES: dict[str, dict[str, Any]] = {
    "half a vector": {"head_dim": 48, "intermediate_size": 80},
    "wide heads": {"hidden_size": 96, "head_dim": 128, "num_attention_heads": 3, "num_key_value_heads": 1},
    "no groups": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "more heads than rows of a tile": {
        "hidden_size": 128,
        "num_attention_heads": 128,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "odd vocabulary": {"vocab_size": 509, "hidden_size": 80, "head_dim": 80},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_shapes(shape: str, threads: int, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", **SHAPES[shape])
    tokens = _tokens(100)
    expected = reference(torch.tensor([tokens])).logits[0]
    runner = Runner(tmp_path, kernels="native", threads=threads)
    got = torch.cat([runner.extend(tokens[a:b]) for a, b in pairwise([0, 70, 71, 100])])
    assert (got - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(directory, "qwen3")
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_row_is_the_same_in_any_batch(dtype: str, tiny: Path, data: st.DataObject) -> None:
    """Several sequences, cut anyhow and batched anyhow, give bit for bit what each gives alone in one step."""
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4).filter(lambda all_: sum(all_) <= 110))
    runner = Runner(tiny, dtype, block_size=4, kernels="native", threads=data.draw(st.integers(1, 3)))
    # Whatever lies in blocks beyond a context is not looked at.
    for index in range(runner.pool.num_blocks):
        runner.pool.block(index)[:] = b"\xff" * runner.pool.spec.block_bytes
    free = iter(data.draw(st.permutations(range(1, runner.pool.num_blocks))))
    texts = [_tokens(length, seed) for seed, length in enumerate(lengths)]
    tables = [[next(free) for _ in range(-(-length // 4))] for length in lengths]
    alone = [Runner(tiny, dtype, kernels="native").extend(text) for text in texts]
    done = [0] * len(texts)
    while any(at < len(text) for at, text in zip(done, texts, strict=True)):
        left = [i for i, text in enumerate(texts) if done[i] < len(text)]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        counts = {i: data.draw(st.integers(1, len(texts[i]) - done[i])) for i in chosen}
        slices = [SequenceSlice(n, done[i] + n, tables[i]) for i, n in counts.items()]
        tokens = [token for i, n in counts.items() for token in texts[i][done[i] : done[i] + n]]
        got = runner.decoder.forward(tokens, slices, list(range(len(tokens))))
        expected = torch.cat([alone[i][done[i] : done[i] + n] for i, n in counts.items()])
        assert torch.equal(got, expected)
        for i, n in counts.items():
            done[i] += n


@pytest.mark.model
def test_bfloat16_goes_on_alike_wherever_another_takes_over() -> None:
    """The KV of an answer's beginning is the same extended at once as decoded token by token: so is what follows."""
    engine = load_engine(
        default_model_path(),
        dtype="bfloat16",
        block_size=16,
        pool_tokens=4096,
        step_tokens=128,
        seats=4,
        prefix_cache=True,
        kernels="native",
    ).engine
    prompt, length = _tokens(300), 24

    def answer(known: list[int]) -> list[int]:
        key = AttemptKey(f"{len(known):032x}", 1)
        blocks = engine.cache.match(KvNamespace(), prompt[:-1])
        assert bool(blocks) == bool(known)
        spec = SequenceSpec(
            key, prompt, known, Sampling(), StopRule(length), 16 * len(blocks), blocks, namespace=KvNamespace()
        )
        return generate(engine, spec)

    whole = answer([])
    assert len(whole) == length
    for position in range(1, length):
        assert answer(whole[:position]) == whole, position


def test_only_pages_of_the_batch_are_written(tiny: Path) -> None:
    runner = Runner(tiny, kernels="native")
    before = {block: bytes(runner.pool.block(block)) for block in range(runner.pool.num_blocks)}
    runner.decoder.forward(_tokens(6), [SequenceSlice(6, 6, [5, 2, 9])], [5])
    assert {block for block in before if bytes(runner.pool.block(block)) != before[block]} == {5, 2}


def test_a_step_may_want_no_logits(tiny: Path) -> None:
    assert Runner(tiny, kernels="native").extend(_tokens(9), []).shape == (0, 512)


def test_shapes_that_do_not_suit_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", head_dim=24)
    size: dict[str, Any] = {"dtype": "float32", "block_size": 4, "pool_tokens": 64, "step_tokens": 16, "seats": 1}
    with pytest.raises(ConfigError, match="head_dim = 24 is not a multiple of 16"):
        load_engine(tmp_path, kernels="native", **size)
    load_engine(tmp_path, kernels="auto", **size)


def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    for file in build.SOURCES.iterdir():
        (sources / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(build, "SOURCES", sources)
    first = build.build()
    assert first.exists()
    (sources / "tile.h").write_text((sources / "tile.h").read_text() + "\n// changed\n")
    assert build.library_path() != first
    second = build.build()
    assert [*second.parent.iterdir()] == [second]  # the old one is gone


def _tokens(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(509), k=count)
