"""Engines on a tiny random Llama, fresh for each test; the weights are made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pdd.engine.loading import LoadedEngine, load_engine
from tests.model_fixtures import save_tiny_llama

Tiny = tuple[Path, LlamaForCausalLM]
MakeEngine = Callable[..., LoadedEngine]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_tiny_llama(directory)


@pytest.fixture
def make_engine(tiny: Tiny) -> MakeEngine:
    def make(
        *,
        block_size: int = 4,
        pool_tokens: int = 512,
        step_tokens: int = 16,
        seats: int = 4,
        dtype: str = "float32",
        prefix_cache: bool = False,
    ) -> LoadedEngine:
        return load_engine(
            tiny[0],
            dtype=dtype,
            block_size=block_size,
            pool_tokens=pool_tokens,
            step_tokens=step_tokens,
            seats=seats,
            prefix_cache=prefix_cache,
        )

    return make
