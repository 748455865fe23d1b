"""What the mesh must reproduce: transformers on the same weights, and one bare engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from pdd.engine.sampler import sample, top2_margin
from pdd.types import Sampling


class Drawn(NamedTuple):
    """Output IDs, and how near to a tie each step's two best logits were."""

    tokens: list[int]
    margins: list[float]


class Reference:
    """transformers' own forward passes on the GGUF's weights in fp32, drawn from by greedy choice or our sampler."""

    def __init__(self, model: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model.parent, gguf_file=model.name, dtype=torch.float32
        )
        self._model.eval()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Drawn:
        """transformers' `generate`, greedy, end tokens ignored."""
        output = self._model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        margins = [top2_margin(logits[0]) for logits in output.logits]
        return Drawn(output.sequences[0, len(prompt) :].tolist(), margins)

    @torch.inference_mode()
    def draw(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Drawn:
        """Our sampler on transformers' logits."""
        cache = DynamicCache()
        fed, tokens, margins = list(prompt), list[int](), list[float]()
        while len(tokens) < max_tokens:
            logits = self._model(torch.tensor([fed]), past_key_values=cache, logits_to_keep=1).logits[0]
            tokens += sample(logits, [sampling], [len(prompt) + len(tokens)])
            margins.append(top2_margin(logits[-1]))
            fed = tokens[-1:]
        return Drawn(tokens, margins)
