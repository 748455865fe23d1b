"""What a model is, as numbers: shapes, RoPE, context length and end tokens.

Reads them from a GGUF header or a Hugging Face `config.json`, and refuses what `pdd.model.llama` does not compute.
Never touches weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import gguf

from pdd.errors import ModelError

T = TypeVar("T", str, int, float)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family: pre-norm, SwiGLU, rotary positions over whole heads, grouped-query attention.

    `context_length` is the longest prompt + output in tokens. `tie_word_embeddings`: the head is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")

    @property
    def rope(self) -> str:
        """How positions are rotated, in words that two peers can compare."""
        return f"default, theta {self.rope_theta:g}, dim {self.head_dim}"

    @staticmethod
    def from_gguf(reader: gguf.GGUFReader) -> ModelConfig:
        """Read a GGUF header. Raises `ModelError` naming what is missing or not supported."""
        architecture = _gguf(reader, "general.architecture", str)
        if architecture != "llama":
            raise ModelError(f"architecture {architecture!r} is not supported (supported: llama)")
        scaling = _gguf(reader, "llama.rope.scaling.type", str, "none")
        if scaling != "none":
            raise ModelError(f"RoPE scaling {scaling!r} is not supported")
        if _gguf(reader, "llama.expert_count", int, 0):
            raise ModelError("mixture-of-experts weights are not supported")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        if "token_embd.weight" not in tensors:
            raise ModelError("missing weight: token_embd.weight")
        hidden_size = _gguf(reader, "llama.embedding_length", int)
        num_heads = _gguf(reader, "llama.attention.head_count", int)
        head_dim = _gguf(reader, "llama.attention.key_length", int, hidden_size // num_heads)
        rotated = _gguf(reader, "llama.rope.dimension_count", int, head_dim)
        if rotated != head_dim:
            raise ModelError(f"RoPE over {rotated} of {head_dim} dimensions is not supported")
        end_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ends = (_gguf(reader, key, int, -1) for key in end_keys)
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(tensors["token_embd.weight"].shape[1]),  # GGUF lists dimensions from the innermost
            hidden_size=hidden_size,
            intermediate_size=_gguf(reader, "llama.feed_forward_length", int),
            num_layers=_gguf(reader, "llama.block_count", int),
            num_heads=num_heads,
            num_kv_heads=_gguf(reader, "llama.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            rms_norm_eps=_gguf(reader, "llama.attention.layer_norm_rms_epsilon", float),
            rope_theta=_gguf(reader, "llama.rope.freq_base", float, 10_000.0),
            context_length=_gguf(reader, "llama.context_length", int),
            tie_word_embeddings="output.weight" not in tensors,
            eos_token_ids=frozenset(end for end in ends if end >= 0),
        )

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`. Raises `ModelError` naming what is missing or not supported."""
        architecture = config.get("model_type")
        if architecture != "llama":
            raise ModelError(f"architecture {architecture!r} is not supported (supported: llama)")
        # Older files write `rope_theta` at the top and scaling apart; newer ones write one `rope_parameters`.
        rope = cast("Mapping[str, Any]", config.get("rope_parameters") or config.get("rope_scaling") or {})
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling != "default":
            raise ModelError(f"RoPE scaling {scaling!r} is not supported")
        for key, supported in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if config.get(key, supported) != supported:
                raise ModelError(f"{key} = {config[key]!r} is not supported (supported: {supported!r})")
        try:
            hidden_size, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            ends = cast("list[int] | int | None", config.get("eos_token_id"))
            return ModelConfig(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=num_heads,
                num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
                head_dim=int(config.get("head_dim") or hidden_size // num_heads),
                rms_norm_eps=float(config["rms_norm_eps"]),
                rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
                context_length=int(config["max_position_embeddings"]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                eos_token_ids=frozenset([] if ends is None else ends if isinstance(ends, list) else [ends]),
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error.args[0]}") from None


def _gguf(reader: gguf.GGUFReader, key: str, kind: type[T], default: T | None = None) -> T:
    field = reader.get_field(key)
    if field is not None:
        return kind(field.contents())
    if default is None:
        raise ModelError(f"the GGUF header lacks {key}")
    return default
