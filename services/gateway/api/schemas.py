"""Request bodies: what is accepted, within which bounds, and what is refused by name.

A body is checked here as far as it can be without the model; tokens and the context window are `prepare`'s.
Nothing is ignored silently: a field is used, or it is known to change nothing, or the request is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from services.gateway.api.errors import ApiError, invalid

TokenId = Annotated[int, Meta(ge=0)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`: only `include_usage: true` adds the usage chunk."""

    include_usage: bool = False


class GenerationFields(Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share; the extensions at the end are vLLM's."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Meta(max_length=4)] = msgspec.field(default_factory=list[str])
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = msgspec.field(default_factory=list[int])
    return_token_ids: bool = False
    cache_salt: NonEmpty | None = None


class TextPart(Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat. `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)]


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`: one prompt, as text or token IDs (alone or as the only one of a list)."""

    prompt: NonEmpty | Annotated[list[TokenId | NonEmpty | list[TokenId]], Meta(min_length=1)]


_HARMLESS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
"""Fields that say nothing about the answer."""

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
}
"""Fields that are not supported, with the values that ask for nothing."""

BodyT = TypeVar("BodyT", bound=GenerationFields)


def parse(raw: bytes, kind: type[BodyT]) -> BodyT:
    """Decode and check a request body. Raises `ApiError` (400) that names the field at fault."""
    try:
        fields = _without_nulls(msgspec.json.decode(raw))
    except msgspec.DecodeError as error:
        raise invalid(f"The request body is not valid JSON: {error}", None) from None
    except RecursionError:
        raise invalid("The request body is nested too deeply.", None) from None
    if not isinstance(fields, dict):
        raise invalid("The request body must be a JSON object.", None)
    fields = cast("dict[str, Any]", fields)
    for name, value in fields.items():
        if name not in kind.__struct_fields__:
            _require_harmless(name, value)
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explain(error) from None
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only allowed when stream is true.", "stream_options")
    return body


def _without_nulls(value: Any) -> Any:
    """null means "not given", at every level."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in cast("dict[str, Any]", value).items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[Any]", value)]
    return value


def _require_harmless(name: str, value: Any) -> None:
    if name in _HARMLESS:
        return
    defaults = _DEFAULTS.get(name, ())
    if not any(value == default and isinstance(value, bool) == isinstance(default, bool) for default in defaults):
        known = f" (other than {defaults[0]!r})" if defaults else ""
        raise ApiError(400, f"{name}{known} is not supported.", param=name, code="unsupported_parameter")


_MISSING = re.compile(r"^Object missing required field `(.+?)`")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.+?)`")


def _explain(error: msgspec.ValidationError) -> ApiError:
    """msgspec's `what - at `$.path`` as a message and a parameter name."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if missing := _MISSING.match(what):
        param = ".".join(filter(None, (path, missing[1])))
        return invalid(f"{param} is required.", param, "missing_required_parameter")
    if unknown := _UNKNOWN.match(what):
        param = ".".join(filter(None, (path, unknown[1])))
        return invalid(f"{param} is not supported.", param, "unsupported_parameter")
    return invalid(f"{path}: {what[0].lower()}{what[1:]}.", path, "invalid_value")
