"""How much memory a stage will take, estimated from what the model's files say about themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import msgspec

from pdd.errors import ModelError
from pdd.kv import DTYPE_BYTES, KvSpec

PROCESS_BYTES = 450_000_000
"""A stage without weights and KV: the interpreter, torch, and the buffers of a step."""


class ModelSize(msgspec.Struct, frozen=True):
    """What memory depends on: the number of weights, and the KV shape."""

    weights: int
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def stage_bytes(self, dtype: str, pool_tokens: int) -> int:
        """Memory of one stage with `dtype` weights and KV and a pool of `pool_tokens`."""
        kv = KvSpec(self.num_layers, self.num_kv_heads, self.head_dim, block_size=1, dtype=dtype)
        return PROCESS_BYTES + self.weights * DTYPE_BYTES[dtype] + kv.token_bytes * pool_tokens


def model_size(model: Path) -> ModelSize:
    """Read the size of a GGUF file or a Hugging Face directory. Raises `ModelError`."""
    try:
        return _of_directory(model) if model.is_dir() else _of_gguf(model)
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise ModelError(f"{model.name} does not say how large the model is: {error!r}") from None


def _of_gguf(path: Path) -> ModelSize:
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        return int(reader.fields[f"{architecture}.{key}"].contents())

    heads = number("attention.head_count")
    has_head_dim = f"{architecture}.attention.key_length" in reader.fields
    return ModelSize(
        weights=sum(int(tensor.n_elements) for tensor in reader.tensors),
        num_layers=number("block_count"),
        num_kv_heads=number("attention.head_count_kv"),
        head_dim=number("attention.key_length") if has_head_dim else number("embedding_length") // heads,
    )


def _of_directory(folder: Path) -> ModelSize:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    stored_bytes = DTYPE_BYTES[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
    return ModelSize(
        weights=sum(file.stat().st_size for file in folder.glob("*.safetensors")) // stored_bytes,
        num_layers=config["num_hidden_layers"],
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
    )
