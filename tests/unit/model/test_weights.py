"""What a checkpoint may look like, and what is refused, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from pdd.errors import ModelError
from pdd.model.config import ModelConfig
from pdd.model.parameters import Parameters
from pdd.model.weights import Checkpoint
from tests.model_fixtures import save_tiny_llama
from tests.unit.model.runner import filled


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save_tiny_llama(directory)
    return directory


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def configure(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same(a: Parameters, b: Parameters) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.slots().values(), b.slots().values(), strict=True))


def test_shards_load_like_one_file_and_have_their_own_identity(saved: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(saved).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(Checkpoint(tmp_path).files) > 1
    assert same(filled(tmp_path), filled(saved))
    assert Checkpoint(tmp_path).identity() != Checkpoint(saved).identity()


def test_identity_follows_the_bytes(directory: Path) -> None:
    before = Checkpoint(directory).identity()
    assert Checkpoint(directory).identity() == before
    rewrite(directory, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert Checkpoint(directory).identity() != before


def test_a_missing_weight_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"missing weight: model\.layers\.1\.mlp\.up_proj\.weight"):
        filled(directory)


def test_a_left_over_weight_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"unexpected weight: model\.layers\.0\.self_attn\.q_proj\.bias"):
        filled(directory)


def test_a_weight_of_the_wrong_shape_is_named(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(65,\), expected \(64,\)"):
        filled(directory)


def test_a_missing_head_is_an_error_unless_it_is_tied(directory: Path) -> None:
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        filled(directory)
    configure(directory, tie_word_embeddings=True)
    model = filled(directory)
    assert model.head is model.embedding


def test_a_head_in_the_files_wins_over_the_flag_as_in_transformers(directory: Path) -> None:
    configure(directory, tie_word_embeddings=True)
    theirs = LlamaForCausalLM.from_pretrained(directory)
    assert torch.equal(filled(directory).head, theirs.lm_head.weight)
    assert not torch.equal(filled(directory).head, theirs.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3_text"}, "gemma3_text"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}}, "longrope"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"vocab_size": None}, "a number that is none"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(directory: Path, changes: dict[str, object], named: str) -> None:
    configure(directory, **changes)
    with pytest.raises(ModelError, match=named):
        Checkpoint(directory)


def test_files_that_are_no_models_are_refused(directory: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    with pytest.raises(ModelError, match=r"notes\.txt"):
        Checkpoint(text)
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        filled(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(directory)


def test_hf_configuration_is_read_old_and_new() -> None:
    shapes: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "eos_token_id": [2, 7],
    }
    old = ModelConfig.from_hf(shapes | {"rope_theta": 5e5, "head_dim": 32})
    new = ModelConfig.from_hf(shapes | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "head_dim": 32})
    assert old == new
    assert (old.head_dim, old.num_kv_heads, old.rotary.theta) == (32, 4, 5e5)
    assert old.eos_token_ids == {2, 7}
    with pytest.raises(ModelError, match="vocab_size"):
        ModelConfig.from_hf({key: value for key, value in shapes.items() if key != "vocab_size"})


def write_gguf(file: Path, model: LlamaForCausalLM, **scaling: str) -> None:
    """Write `model` as llama.cpp does: its own names, q and k rows paired, matrices quantised to Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")  # what transformers reads along with the weights
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_token_merges(["t 1"])
    if "rope" in scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope"]))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                rows, columns = values.shape
                values = values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_weights_equal_what_transformers_reads(saved: Path, tmp_path: Path) -> None:
    """q and k rows are put back for 4 query and 2 KV heads; the untied head is found."""
    write_gguf(tmp_path / "tiny.gguf", LlamaForCausalLM.from_pretrained(saved))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).state_dict()
    ours = filled(tmp_path / "tiny.gguf").slots()
    assert set(ours) == set(theirs)
    for name, slot in ours.items():
        assert torch.equal(slot, theirs[name]), name


def test_gguf_with_another_rope_scaling_is_refused(saved: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "scaled.gguf", LlamaForCausalLM.from_pretrained(saved), rope="longrope")
    with pytest.raises(ModelError, match="longrope"):
        Checkpoint(tmp_path / "scaled.gguf")
