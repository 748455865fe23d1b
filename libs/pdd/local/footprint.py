"""How much memory a stage will take, estimated from the model's shapes. Reads no weights."""

from __future__ import annotations

import json
from pathlib import Path

import gguf

from pdd.errors import ModelError
from pdd.kv import DTYPE_BYTES, KvSpec
from pdd.model.config import ModelConfig

PROCESS_BYTES = 450_000_000
"""A stage without weights and KV: the interpreter, torch, and the buffers of a step."""


def read_config(model: Path) -> ModelConfig:
    """Shapes of a GGUF file or a Hugging Face directory. Raises `ModelError`."""
    try:
        if model.is_dir():
            return ModelConfig.from_hf(json.loads((model / "config.json").read_bytes()))
        return ModelConfig.from_gguf(gguf.GGUFReader(model))
    except (OSError, ValueError, LookupError) as error:
        raise ModelError(f"{model.name} is no model: {error}") from None


def weight_count(config: ModelConfig) -> int:
    """Number of weights of a dense decoder."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = 2 * config.hidden_size * (query + key_value)  # q and out, k and v
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    layer += config.qkv_bias * (query + 2 * key_value) + config.attention_out_bias * config.hidden_size
    layer += config.mlp_bias * (2 * config.intermediate_size + config.hidden_size)
    layer += config.qk_norm * 2 * config.head_dim
    embedding = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * layer + embedding + config.hidden_size


def stage_bytes(config: ModelConfig, dtype: str, pool_tokens: int) -> int:
    """Memory of one stage with `dtype` weights and KV and a pool of `pool_tokens`."""
    kv = KvSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size=1, dtype=dtype)
    return PROCESS_BYTES + weight_count(config) * DTYPE_BYTES[dtype] + kv.token_bytes * pool_tokens
