"""transformers, in each of the ways that could be its fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, StaticCache

from pdd.model.weights import Checkpoint
from tests.bench.engine.measuring import Probe, timed
from tests.bench.engine.settings import CONTEXT, ROUNDS, STEPS


class Rival(Protocol):
    """What else could run the model."""

    def prefill(self, count: int) -> float:
        """Seconds from a prompt of `count` tokens to the logits after its last."""
        ...

    def start(self, batch: int) -> Probe:
        """A batch of contexts of `CONTEXT` tokens; each call decodes `STEPS` more and says how long a step took."""
        ...


class Theirs:
    """transformers with one attention implementation and one kind of cache."""

    def __init__(self, model: PreTrainedModel, *, static_cache: bool = False) -> None:
        self._model = model.eval()
        self._static = static_cache

    @classmethod
    def packed(cls, model: Path) -> Theirs:
        """As it loads a GGUF file: weights stay packed, kernels compute in float32, which it calls its fastest way."""
        return cls(AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32))

    @classmethod
    def plain(cls, model: Path, attention: str, dtype: torch.dtype) -> Theirs:
        """As it runs a directory with the same weights, unpacked."""
        config = AutoConfig.from_pretrained(model.parent, gguf_file=model.name)
        made = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        made.load_state_dict(dict(Checkpoint(model).tensors()), strict=not config.tie_word_embeddings)
        made.tie_weights()
        return cls(made)

    def with_static_cache(self) -> Theirs:
        """The same model with KV in tensors of a fixed size."""
        return Theirs(self._model, static_cache=True)

    @torch.inference_mode()
    def prefill(self, count: int) -> float:
        """See `Rival`."""
        tokens = torch.randint(1000, 40_000, (1, count))
        cache = self._cache(count)
        return timed(lambda: self._model(tokens, past_key_values=cache, logits_to_keep=1))

    @torch.inference_mode()
    def start(self, batch: int) -> Probe:
        """See `Rival`."""
        cache = self._cache(CONTEXT + (ROUNDS + 1) * STEPS)
        self._model(torch.randint(1000, 40_000, (batch, CONTEXT)), past_key_values=cache, logits_to_keep=1)
        last = torch.full((batch, 1), 1000)

        @torch.inference_mode()
        def steps() -> None:
            nonlocal last
            for _ in range(STEPS):
                last = self._model(last, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)

        return lambda: timed(steps) / STEPS

    def _cache(self, length: int) -> Cache:
        return StaticCache(config=self._model.config, max_cache_len=length) if self._static else DynamicCache()
