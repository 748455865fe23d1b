"""The torch path on other devices than the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.model_fixtures import save_tiny
from tests.unit.model.runner import Runner

PARTS = [list(random.Random(part).choices(range(512), k=count)) for part, count in enumerate((21, 6, 1))]
"""A prompt, an extension and one more token."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny(directory, "qwen3")
    return directory


def test_a_step_leaves_the_device_with_its_logits_and_not_before(tiny: Path) -> None:
    """On the meta device nothing is computed, but a tensor that was left on the CPU is an error of another kind."""
    runner = Runner(tiny, device="meta")
    for part in PARTS:
        with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
            runner.extend(part)


def test_bytes_that_the_host_cannot_reach_are_not_handed_out(tiny: Path) -> None:
    with pytest.raises(TypeError, match="lies on meta"):
        Runner(tiny, device="meta").pool.block(1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_logits_of_a_gpu_are_those_of_the_cpu(tiny: Path) -> None:
    here, there = Runner(tiny), Runner(tiny, device="cuda")
    for part in PARTS:
        got = there.extend(part)
        assert got.is_cpu
        assert (got - here.extend(part)).abs().max() < 1e-4
