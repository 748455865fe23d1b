"""Models for tests: the default model's file, and tiny random ones that transformers writes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel


def default_model_path() -> Path:
    """The default model's GGUF: `PDD_MODEL`, or the user's cache (downloaded if absent)."""
    from pdd.model.source import ensure_default_model

    named = os.environ.get("PDD_MODEL")
    return Path(named) if named else ensure_default_model()


def save_tiny_llama(directory: Path, *, seed: int = 0, tied: bool = False) -> LlamaForCausalLM:
    """Save a random two-layer Llama to `directory` as Hugging Face lays it out, and return it (float32, eval)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,  # large enough for logits that differ clearly from token to token
        tie_word_embeddings=tied,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def save_tiny(
    directory: Path, family: str, *, seed: int = 0, max_shard_size: str = "1GB", **options: object
) -> PreTrainedModel:
    """Save a random two-layer model of `family` to `directory`, and return it (float32, eval).

    Biases and norms are random, too: transformers' zeros and ones would hide those that are left out.
    """
    torch.manual_seed(seed)
    shapes: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "mistral":
        shapes["sliding_window"] = None
    if family == "qwen3":
        shapes["head_dim"] = 32  # not hidden_size / num_attention_heads
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shapes | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0, 0.3)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
