"""Every dense family and RoPE variant computes what transformers computes, however the sequence is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from pdd.errors import ModelError
from pdd.local.footprint import weight_count
from pdd.model.config import ModelConfig
from pdd.model.weights import Checkpoint
from tests.model_fixtures import save_tiny
from tests.unit.model.runner import Runner, filled, usable_kernels

TOKENS = 90
ORIGINAL = 32  # most of the tokens lie beyond it

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e4},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 24}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_tokens() -> list[int]:
    return torch.randint(0, 512, (TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()


@torch.inference_mode()
def check(directory: Path, reference: PreTrainedModel, cuts: list[int]) -> None:
    """All kernels that this machine has compute what transformers computes."""
    tokens = random_tokens()
    expected = reference(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.5  # a difference would show
    for kernels in usable_kernels(Checkpoint(directory).config):
        runner = Runner(directory, kernels=kernels)
        got = torch.cat([runner.extend(tokens[a:b]) for a, b in pairwise([0, *cuts, TOKENS])])
        assert (got - expected).abs().max() < 1e-4, kernels


CUTS = ([], [17, 34], [*range(30, TOKENS)], [40, 41, 42, 60])
"""Whole, chunks, prefill then decodes, extends over a cached prefix."""


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, rope: str, tmp_path: Path) -> None:
    model_type, options = FAMILIES[family]
    parameters = {"rope_theta": 1e4} | ROPES[rope]
    reference = save_tiny(tmp_path, model_type, rope_parameters=parameters, **options)
    for cuts in CUTS:
        check(tmp_path, reference, cuts)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_shards_and_tied_embeddings(family: str, tied: bool, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, family, max_shard_size="100KB", tie_word_embeddings=tied)
    checkpoint = Checkpoint(tmp_path)
    assert len(checkpoint.files) > 1
    assert checkpoint.config.tie_word_embeddings is tied
    assert weight_count(checkpoint.config) == sum(parameter.numel() for parameter in reference.parameters())
    check(tmp_path, reference, [40])


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_as_transformers_is(family: str, tmp_path: Path) -> None:
    model_type, options = FAMILIES[family]
    reference = save_tiny(tmp_path, model_type, **options)
    parameters = filled(tmp_path)
    assert weight_count(parameters.config) == sum(slot.numel() for slot in parameters.slots().values())
    tokens = random_tokens()
    expected = reference(torch.tensor([tokens])).logits[0]
    theirs = reference.to(torch.bfloat16)(torch.tensor([tokens])).logits[0].float()
    for kernels in usable_kernels(parameters.config):
        got = Runner(tmp_path, "bfloat16", kernels=kernels).extend(tokens).float()
        assert (got - expected).abs().mean() < 1.2 * (theirs - expected).abs().mean(), kernels


@pytest.mark.parametrize("rope", ROPES)
def test_the_older_spelling_means_the_same(rope: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", rope_parameters={"rope_theta": 1e4} | ROPES[rope])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    new = ModelConfig.from_hf(config)
    scaling = config.pop("rope_parameters")
    older = config | {"rope_theta": scaling.pop("rope_theta")}
    older["rope_scaling"] = {"type": scaling.pop("rope_type")} | scaling
    assert ModelConfig.from_hf(older) == new
    file.write_text(json.dumps(older))
    check(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path).eval(), [40])


def test_what_yarn_and_llama3_leave_out_is_filled_in_as_in_transformers(tmp_path: Path) -> None:
    for kind in ("yarn", "llama3"):
        parameters = {key: value for key, value in ROPES[kind].items() if not key.startswith("original")}
        reference = save_tiny(
            tmp_path, "llama", rope_parameters=parameters | {"rope_theta": 1e4}, max_position_embeddings=100
        )
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        config["rope_parameters"].pop("original_max_position_embeddings", None)
        file.write_text(json.dumps(config))
        check(tmp_path, reference, [40])


def test_peers_tell_ropes_apart() -> None:
    shapes = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
    }
    variants = [*ROPES.values(), ROPES["linear"] | {"factor": 2.0}, ROPES["yarn"] | {"beta_fast": 16}]
    named = [ModelConfig.from_hf(shapes | {"rope_parameters": {"rope_theta": 1e4} | one}).rope for one in variants]
    assert len(set(named)) == len(variants)


@pytest.mark.parametrize(
    ("model_type", "changes", "window"),
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64}, 64),
        ("llama", {"sliding_window": 64}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, 64),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
    ],
)
def test_sliding_windows_are_seen(model_type: str, changes: dict[str, Any], window: int | None) -> None:
    shapes = {
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
    }
    assert ModelConfig.from_hf(shapes | changes).sliding_window == window


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama-biased", "model.layers.1.self_attn.o_proj.bias"),
        ("llama-biased", "model.layers.0.mlp.up_proj.bias"),
        ("qwen2", "model.layers.1.self_attn.v_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_a_missing_weight_is_named(family: str, name: str, tmp_path: Path) -> None:
    model_type, options = FAMILIES[family]
    save_tiny(tmp_path, model_type, **options)
    file = tmp_path / "model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if key != name}, file)
    with pytest.raises(ModelError, match=f"missing weight: {re.escape(name)}"):
        Runner(tmp_path)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_left_over_weight_is_named(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.o_proj.bias"
    save_file(load_file(file) | {name: torch.ones(64)}, file)
    with pytest.raises(ModelError, match=f"unexpected weight: {re.escape(name)}"):
        Runner(tmp_path)


def test_frequencies_that_old_files_hold_are_no_weights(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    check(tmp_path, reference, [40])
