"""The shape of `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from pdd.model.tokenizer import Tokenizer
from pdd.types import FinishReason
from services.gateway.api.errors import invalid
from services.gateway.api.schemas import CompletionRequest
from services.gateway.api.shape import Limit


class Completions:
    """Completions: text or token IDs in, their continuation out. Without a limit 16 tokens, as OpenAI."""

    endpoint = "completions"
    operation = "text_completion"
    body = CompletionRequest
    prompt_field = "prompt"
    default_max_tokens: int | None = 16
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def tokenize(self, body: CompletionRequest, tokenizer: Tokenizer) -> list[int]:
        prompt = _single(body.prompt)
        return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def limit(self, body: CompletionRequest) -> Limit | None:
        return None if body.max_tokens is None else Limit("max_tokens", body.max_tokens)

    def opening_choice(self) -> dict[str, Any] | None:
        return None

    def delta_choice(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}

    def whole_choice(self, text: str, finish: FinishReason) -> dict[str, Any]:
        return self.delta_choice(text, finish)


def _single(prompt: str | list[int | str | list[int]]) -> str | list[int]:
    """The one prompt: OpenAI's field may also hold a list of prompts, of which we take only a list of one."""
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids
    only = prompt[0]
    if len(prompt) > 1 or isinstance(only, int):
        raise invalid("prompt: a list of several prompts is not supported.", "prompt", "unsupported_parameter")
    if not only:
        raise invalid("prompt must not be empty.", "prompt", "invalid_value")
    return only
