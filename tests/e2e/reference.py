"""What the mesh must reproduce: transformers on the same weights, and one bare engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from pdd.engine.sampler import sample, top2_margin
from pdd.types import Sampling

GREEDY = Sampling()


class Reference:
    """transformers' own forward passes on the GGUF's weights in fp32, drawn from by greedy choice or our sampler."""

    def __init__(self, model: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
        )
        self._model.eval()

    def generate(self, prompt: Sequence[int], max_tokens: int, stop: frozenset[int]) -> list[int]:
        """transformers' `generate`, greedy."""
        output = self._model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=sorted(stop) or None,
            pad_token_id=0,
        )
        return output[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def draw(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> tuple[list[int], list[float]]:
        """Our sampler on transformers' logits; the tokens, and how near to a tie each step's two best logits were."""
        cache = DynamicCache()
        fed, tokens, margins = list(prompt), list[int](), list[float]()
        while len(tokens) < max_tokens:
            logits = self._model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0]
            tokens += sample(logits, [sampling], [len(prompt) + len(tokens)])
            margins.append(top2_margin(logits[-1]))
            fed = tokens[-1:]
        return tokens, margins
