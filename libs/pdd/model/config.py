"""What a model is, as numbers: shapes, RoPE, context length and end tokens.

Reads them from a GGUF header or a Hugging Face `config.json`, and refuses what no decoder here computes.
Never touches weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, cast

import gguf

from pdd.errors import ModelError

T = TypeVar("T", str, int, float)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
"""Mistral is written as `llama`: the arithmetic is the same."""

GGUF_ROPE_DIVISORS = "rope_freqs.weight"
"""The tensor in which a GGUF file keeps Llama 3's scaling, worked out per frequency."""


@dataclass(frozen=True)
class RopeConfig:
    """How positions are rotated. Fields that a kind does not use keep their defaults.

    `linear` divides all frequencies by `factor`, `divisors` each by its own (`head_dim / 2` of them); for `llama3` and
    `yarn` see `pdd.model.rope`. `dynamic` scaling begins beyond the context length, which no sequence here exceeds:
    until there it equals `default`. Cosines and sines are multiplied by `attention_factor`. `original_context` is in
    tokens.
    """

    kind: Literal["default", "dynamic", "linear", "llama3", "yarn", "divisors"]
    theta: float
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    def __str__(self) -> str:
        """All that differs from the defaults, in words that two peers can compare."""
        words = [self.kind, f"theta {self.theta!r}"]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = hashlib.sha256(repr(value).encode()).hexdigest()[:16] if field.name == "divisors" else value
                words.append(f"{field.name} {shown}")
        return ", ".join(words)

    @staticmethod
    def from_gguf(reader: gguf.GGUFReader, architecture: str) -> RopeConfig:
        """Read a GGUF header, as llama.cpp does. Raises `ModelError` naming what is not supported."""
        key = f"{architecture}.rope.scaling"
        theta = _gguf(reader, f"{architecture}.rope.freq_base", float, 10_000.0)
        factor = _gguf(reader, f"{architecture}.rope.scale_linear", float, 0.0)
        factor = _gguf(reader, f"{key}.factor", float, factor) or 1.0
        kind = _gguf(reader, f"{key}.type", str, "linear")
        if kind not in ("none", "linear", "yarn"):
            raise ModelError(f"RoPE scaling {kind!r} is not supported (supported: none, linear, yarn)")
        divisors = [tensor for tensor in reader.tensors if tensor.name == GGUF_ROPE_DIVISORS]
        if divisors:
            if kind == "yarn" or (kind == "linear" and factor != 1.0):
                raise ModelError(f"RoPE scaling {kind!r} together with {GGUF_ROPE_DIVISORS} is not supported")
            values = gguf.dequantize(divisors[0].data, divisors[0].tensor_type)
            return RopeConfig("divisors", theta, divisors=tuple(float(value) for value in values.ravel()))
        if kind == "none" or factor == 1.0:
            return RopeConfig("default", theta)
        if kind == "linear":
            return RopeConfig("linear", theta, factor)
        for name, supported in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
            if _gguf(reader, f"{key}.{name}", float, supported) != supported:
                raise ModelError(f"{key}.{name} other than {supported:g} is not supported")
        attention_factor = _yarn_attention(factor)
        for name in ("attn_factor", "yarn_attn_factor"):
            attention_factor *= _gguf(reader, f"{key}.{name}", float, 1.0)
        context = _gguf(reader, f"{architecture}.context_length", int)
        return RopeConfig(
            "yarn",
            theta,
            factor,
            original_context=_gguf(reader, f"{key}.original_context_length", int, context),
            beta_fast=_gguf(reader, f"{key}.yarn_beta_fast", float, 32.0),
            beta_slow=_gguf(reader, f"{key}.yarn_beta_slow", float, 1.0),
            attention_factor=attention_factor,
        )

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> RopeConfig:
        """Read a Hugging Face `config.json`. Raises `ModelError` if a kind is not supported, `KeyError` if one of its
        numbers is missing."""
        # Older files write `rope_theta` at the top and scaling apart; newer ones write one `rope_parameters`.
        rope = cast("Mapping[str, Any]", config.get("rope_scaling") or config.get("rope_parameters") or {})
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ModelError("rope_parameters that differ from layer to layer are not supported")
        rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rotated not in (None, 1):
            raise ModelError(f"partial_rotary_factor = {rotated!r} is not supported (supported: 1)")
        context = config["max_position_embeddings"]
        original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        match kind:
            case "default" | "dynamic":
                return RopeConfig(kind, theta)
            case "linear":
                return RopeConfig(kind, theta, float(rope["factor"]))
            case "llama3":
                return RopeConfig(
                    kind,
                    theta,
                    float(rope["factor"]),
                    original_context=int(original or context),
                    low_freq_factor=float(rope["low_freq_factor"]),
                    high_freq_factor=float(rope["high_freq_factor"]),
                )
            case "yarn":
                original = int(original or context)
                factor = float(rope["factor"] or context / original)
                attention, mscale, mscale_all = (
                    rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
                )
                if attention is None and mscale and mscale_all:
                    attention = _yarn_attention(factor, float(mscale)) / _yarn_attention(factor, float(mscale_all))
                return RopeConfig(
                    kind,
                    theta,
                    factor,
                    original_context=original,
                    beta_fast=float(rope.get("beta_fast") or 32),
                    beta_slow=float(rope.get("beta_slow") or 1),
                    truncate=bool(rope.get("truncate", True)),
                    attention_factor=_yarn_attention(factor) if attention is None else float(attention),
                )
            case _:
                raise ModelError(
                    f"RoPE scaling {kind!r} is not supported (supported: default, dynamic, linear, llama3, yarn)"
                )


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: pre-norm, SwiGLU, rotary positions over whole heads, grouped-query attention.

    `context_length` is the longest prompt + output in tokens. `tie_word_embeddings`: the head is the embedding.
    `qk_norm`: each head of q and k goes through an RMSNorm before it is rotated. `sliding_window`: some layers see the
    last so many tokens only, which nothing here computes; contexts up to that length are not affected.
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
    rotary: RopeConfig
    context_length: int
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.rotary.kind == "divisors" and len(self.rotary.divisors) != self.head_dim // 2:
            raise ModelError(f"{len(self.rotary.divisors)} RoPE divisors do not fit {self.head_dim} dimensions")

    @property
    def rope(self) -> str:
        """How positions are rotated, in words that two peers can compare."""
        return f"{self.rotary}, dim {self.head_dim}"

    @staticmethod
    def from_gguf(reader: gguf.GGUFReader) -> ModelConfig:
        """Read a GGUF header. Raises `ModelError` naming what is missing or not supported."""
        architecture = _gguf(reader, "general.architecture", str)
        if architecture not in GGUF_FAMILIES:
            raise ModelError(f"architecture {architecture!r} is not supported (supported: {', '.join(GGUF_FAMILIES)})")
        if _gguf(reader, "split.count", int, 1) > 1:
            raise ModelError("a GGUF model split over several files is not supported")
        if _gguf(reader, f"{architecture}.expert_count", int, 0):
            raise ModelError("mixture-of-experts weights are not supported")
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        if "token_embd.weight" not in tensors:
            raise ModelError("missing weight: token_embd.weight")
        hidden_size = _gguf(reader, f"{architecture}.embedding_length", int)
        num_heads = _gguf(reader, f"{architecture}.attention.head_count", int)
        head_dim = _gguf(reader, f"{architecture}.attention.key_length", int, hidden_size // num_heads)
        rotated = _gguf(reader, f"{architecture}.rope.dimension_count", int, head_dim)
        if rotated != head_dim:
            raise ModelError(f"RoPE over {rotated} of {head_dim} dimensions is not supported")
        end_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ends = (_gguf(reader, key, int, -1) for key in end_keys)
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(tensors["token_embd.weight"].shape[1]),  # GGUF lists dimensions from the innermost
            hidden_size=hidden_size,
            intermediate_size=_gguf(reader, f"{architecture}.feed_forward_length", int),
            num_layers=_gguf(reader, f"{architecture}.block_count", int),
            num_heads=num_heads,
            num_kv_heads=_gguf(reader, f"{architecture}.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            rms_norm_eps=_gguf(reader, f"{architecture}.attention.layer_norm_rms_epsilon", float),
            rotary=RopeConfig.from_gguf(reader, architecture),
            context_length=_gguf(reader, f"{architecture}.context_length", int),
            tie_word_embeddings="output.weight" not in tensors,
            eos_token_ids=frozenset(end for end in ends if end >= 0),
            qkv_bias=architecture == "qwen2" or "blk.0.attn_q.bias" in tensors,
            attention_out_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            qk_norm=architecture == "qwen3",
            sliding_window=_gguf(reader, f"{architecture}.attention.sliding_window", int, 0) or None,
        )

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json`. Raises `ModelError` naming what is missing or not supported."""
        architecture = config.get("model_type")
        if architecture not in FAMILIES:
            raise ModelError(f"architecture {architecture!r} is not supported (supported: {', '.join(FAMILIES)})")
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"hidden_act = {config['hidden_act']!r} is not supported (supported: 'silu')")
        # Only these two families read the flag; elsewhere it means nothing.
        attention_bias = architecture in ("llama", "qwen3") and bool(config.get("attention_bias", False))
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
                head_dim=int(config.get("head_dim") or (128 if architecture == "qwen3" else hidden_size // num_heads)),
                rms_norm_eps=float(config["rms_norm_eps"]),
                rotary=RopeConfig.from_hf(config),
                context_length=int(config["max_position_embeddings"]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                eos_token_ids=frozenset([] if ends is None else ends if isinstance(ends, list) else [ends]),
                qkv_bias=architecture == "qwen2" or attention_bias,
                attention_out_bias=attention_bias,
                mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
                qk_norm=architecture == "qwen3",
                sliding_window=_hf_sliding_window(architecture, config),
            )
        except KeyError as error:
            raise ModelError(f"config.json lacks {error.args[0]}") from None
        except (TypeError, ValueError) as error:
            raise ModelError(f"config.json holds a number that is none: {error}") from None


def _hf_sliding_window(architecture: str, config: Mapping[str, Any]) -> int | None:
    """The window of the layers that have one, with transformers' defaults for what the file does not say."""
    if architecture == "mistral":
        return config.get("sliding_window", 4096)
    if architecture == "llama":
        return None
    kinds = cast("list[str] | None", config.get("layer_types"))
    if kinds is not None and (other := set(kinds) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"layer_types {min(other)!r} is not supported (supported: 'full_attention')")
    if kinds is None:
        windowed = bool(config.get("use_sliding_window")) and config.get("max_window_layers", 28) < int(
            config["num_hidden_layers"]
        )
    else:
        windowed = "sliding_attention" in kinds
    return config.get("sliding_window", 4096) if windowed else None


def _yarn_attention(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _gguf(reader: gguf.GGUFReader, key: str, kind: type[T], default: T | None = None) -> T:
    field = reader.get_field(key)
    if field is not None:
        return kind(field.contents())
    if default is None:
        raise ModelError(f"the GGUF header lacks {key}")
    return default
