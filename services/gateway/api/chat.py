"""The shape of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from pdd.model.tokenizer import ChatTemplateError, Tokenizer
from pdd.types import FinishReason
from services.gateway.api.errors import invalid
from services.gateway.api.schemas import ChatRequest, Message
from services.gateway.api.shape import Limit


class Chat:
    """Chat: messages in, one assistant message out. Without a limit an answer may fill the context window."""

    endpoint = "chat.completions"
    operation = "chat"
    body = ChatRequest
    prompt_field = "messages"
    default_max_tokens: int | None = None
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def tokenize(self, body: ChatRequest, tokenizer: Tokenizer) -> list[int]:
        try:
            return tokenizer.render_chat([_plain(message) for message in body.messages])
        except ChatTemplateError as error:
            raise invalid(f"The model's chat template refuses these messages: {error}", "messages") from error

    def limit(self, body: ChatRequest) -> Limit | None:
        if body.max_completion_tokens is None:
            return None if body.max_tokens is None else Limit("max_tokens", body.max_tokens)
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise invalid("max_tokens and max_completion_tokens contradict each other.", "max_completion_tokens")
        return Limit("max_completion_tokens", body.max_completion_tokens)

    def opening_choice(self) -> dict[str, Any] | None:
        return _choice("delta", {"role": "assistant", "content": ""}, None)

    def delta_choice(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        return _choice("delta", {"content": text} if text else {}, finish)

    def whole_choice(self, text: str, finish: FinishReason) -> dict[str, Any]:
        return _choice("message", {"role": "assistant", "content": text, "refusal": None}, finish)


def _plain(message: Message) -> dict[str, str]:
    """A message as templates know it: one text (parts are joined by newlines, as vLLM does)."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    return {"role": role, "content": content if isinstance(content, str) else "\n".join(part.text for part in content)}


def _choice(kind: str, value: dict[str, Any], finish: FinishReason | None) -> dict[str, Any]:
    return {"index": 0, kind: value, "logprobs": None, "finish_reason": finish}
