"""Models for tests: the default model's file, and a tiny random Llama that transformers writes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


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
