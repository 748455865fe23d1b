"""GGUF files of every dense family: names, order of rows, types, and RoPE as llama.cpp writes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from pdd.errors import ModelError
from pdd.model.config import ModelConfig
from pdd.model.rope import frequencies
from pdd.model.weights import Checkpoint
from tests.model_fixtures import save_tiny
from tests.unit.model.runner import filled
from tests.unit.model.test_families import ORIGINAL, ROPES, check

Change = Callable[[gguf.GGUFWriter], object]
Arrays = dict[str, np.ndarray]
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def arrays_of(model: PreTrainedModel) -> Arrays:
    """The model's weights under llama.cpp's names; q and k rows of `llama` in llama.cpp's order."""
    config, arrays = model.config, {}
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name and architecture == "llama":
                paired = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
                values = paired.swapaxes(1, 2).reshape(values.shape)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        arrays[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(values)
    return arrays


def write(
    file: Path, model: PreTrainedModel, arrays: Arrays, *, kind: Kind = Kind.F32, change: Change = lambda _: None
) -> Path:
    """Write matrices as `kind`, all else as F32. Bytes are taken to be quantised already."""
    config = model.config
    writer = gguf.GGUFWriter(file, ARCHITECTURES[config.model_type])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    change(writer)
    for name, values in arrays.items():
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=kind)
        else:
            this = kind if values.ndim == 2 else Kind.F32
            writer.add_tensor(name, gguf.quantize(values, this), raw_dtype=this)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 32}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_a_file_equals_its_original(family: str, options: dict[str, object], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, family, **options)
    file = write(tmp_path / "tiny.gguf", reference, arrays_of(reference))
    ours, theirs = filled(file), filled(tmp_path)
    assert ours.slots().keys() == theirs.slots().keys()
    for name, slot in ours.slots().items():
        assert torch.equal(slot, theirs.slots()[name]), name
    check(file, reference, [40])


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_matrices_are_what_gguf_makes_of_them(family: str, kind: Kind, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, family)
    file = write(tmp_path / "tiny.gguf", reference, arrays_of(reference), kind=kind)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    check(file, reference, [40])


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_blocks_of_256_are_what_gguf_makes_of_them(kind: Kind, tmp_path: Path) -> None:
    """gguf cannot write these, so the blocks are random bytes with scales that are finite."""
    reference = save_tiny(tmp_path, "qwen2", hidden_size=256, intermediate_size=256, vocab_size=32)
    random, arrays = np.random.default_rng(0), arrays_of(reference)
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    scales_at = {Kind.Q4_K: (0, 2), Kind.Q6_K: (block_bytes - 2,)}[kind]
    quantised: Arrays = {}
    for name, values in arrays.items():
        if values.ndim == 2:
            blocks = random.integers(0, 256, (values.shape[0], values.shape[1] // 256, block_bytes), dtype=np.uint8)
            for at in scales_at:
                blocks[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
            quantised[name] = blocks.reshape(values.shape[0], -1)
    file = write(tmp_path / "tiny.gguf", reference, arrays | quantised, kind=kind)
    slots = filled(file).slots()
    compared = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "lm_head.weight": "output.weight",
    }
    for name, stored in compared.items():
        expected = torch.from_numpy(gguf.dequantize(quantised[stored], kind))
        assert expected.std() > 0
        assert torch.equal(slots[name], expected), name


def scaled(kind: str, **numbers: float) -> Change:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        for name, number in numbers.items():
            getattr(writer, f"add_rope_scaling_{name}")(number)

    return change


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_scaling_equals_transformers(rope: str, family: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, family, rope_parameters={"rope_theta": 1e4} | ROPES[rope])
    check(write(tmp_path / "tiny.gguf", reference, arrays_of(reference), change=scaled(rope)), reference, [40])


def test_the_numbers_of_yarn_are_read(tmp_path: Path) -> None:
    parameters = ROPES["yarn"] | {"rope_theta": 1e4, "beta_fast": 16.0, "beta_slow": 2.0}
    parameters["attention_factor"] = 0.5 * (0.1 * math.log(4.0) + 1)  # llama.cpp's is a factor on top of YaRN's own
    reference = save_tiny(tmp_path, "qwen3", rope_parameters=parameters)
    change = scaled("yarn", yarn_beta_fast=16.0, yarn_beta_slow=2.0, yarn_attn_factor=0.5)
    check(write(tmp_path / "tiny.gguf", reference, arrays_of(reference), change=change), reference, [40])


def test_llama3_scaling_comes_as_a_tensor(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama", rope_parameters={"rope_theta": 1e4} | ROPES["llama3"])
    config = ModelConfig.from_hf(reference.config.to_dict())
    plain = 1e4 ** -(np.arange(0, 16, 2) / 16)
    divisors = (plain / frequencies(config.rotary, config.head_dim).numpy()).astype(np.float32)
    assert divisors.max() == pytest.approx(8.0)
    arrays = arrays_of(reference) | {"rope_freqs.weight": divisors}
    file = write(tmp_path / "tiny.gguf", reference, arrays)
    check(file, reference, [40])
    other = write(tmp_path / "other.gguf", reference, arrays | {"rope_freqs.weight": divisors * 2})
    assert Checkpoint(file).config.rope != Checkpoint(other).config.rope
    cut = write(tmp_path / "cut.gguf", reference, arrays | {"rope_freqs.weight": divisors[1:]})
    with pytest.raises(ModelError, match="7 RoPE divisors"):
        Checkpoint(cut)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (scaled("longrope"), "longrope"),
        (scaled("yarn", yarn_ext_factor=0.5), "yarn_ext_factor"),
        (scaled("yarn", yarn_log_mul=0.1), "yarn_log_multiplier"),
        (lambda writer: writer.add_expert_count(4), "mixture-of-experts"),
        (lambda writer: writer.add_uint16("split.count", 2), "several files"),
        (lambda writer: writer.add_rope_dimension_count(8), "8 of 16"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(change: Change, named: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen2")
    file = write(tmp_path / "tiny.gguf", reference, arrays_of(reference), change=change)
    with pytest.raises(ModelError, match=named):
        Checkpoint(file)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="gemma3"):
        Checkpoint(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("family", "missing"),
    [("qwen2", "blk.1.attn_k.bias"), ("qwen2", "blk.0.attn_q.bias"), ("qwen3", "blk.1.attn_q_norm.weight")],
)
def test_a_missing_weight_is_named(family: str, missing: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, family)
    arrays = arrays_of(reference)
    arrays.pop(missing)
    part = {"attn_k": "k_proj.bias", "attn_q": "q_proj.bias", "attn_q_norm": "q_norm.weight"}[missing.split(".")[2]]
    with pytest.raises(ModelError, match=f"missing weight: .*{part}"):
        filled(write(tmp_path / "tiny.gguf", reference, arrays))


@pytest.mark.parametrize(
    ("extra", "named"), [("blk.0.attn_q_norm.weight", "q_norm"), ("blk.0.attn_rot.weight", "attn_rot")]
)
def test_a_left_over_weight_is_named(extra: str, named: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama")
    arrays = arrays_of(reference) | {extra: np.ones(16, np.float32)}
    with pytest.raises(ModelError, match=f"unexpected weight: .*{named}"):
        filled(write(tmp_path / "tiny.gguf", reference, arrays))
