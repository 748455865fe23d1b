"""From a request's body and headers to a `GenerationRequest`: everything that can be refused before any work is."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.datastructures import Headers

from pdd.telemetry.tracing import Trace
from pdd.types import Pipeline, Sampling, StopRule
from services.gateway.api import headers as wishes
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.schemas import GenerationFields, parse
from services.gateway.api.shape import Limit, Shape
from services.gateway.api.surface import Surface
from services.gateway.generation import GenerationRequest

BodyT = TypeVar("BodyT", bound=GenerationFields)

_SEED_MASK = 2**63 - 1


@dataclass(frozen=True)
class Call:
    """A request that has passed every check."""

    request: GenerationRequest
    stops: Sequence[str]
    stream: bool
    include_usage: bool
    return_token_ids: bool


async def prepare(
    surface: Surface, shape: Shape[BodyT], raw: bytes, headers: Headers, request_id: str, trace: Trace
) -> Call:
    """Check and translate a request. Raises `ApiError` that names the field at fault."""
    body = await surface.workers.run(lambda: parse(raw, shape.body))
    require_model(surface, body.model)
    pipeline = wishes.wanted_pipeline(headers, surface.default_pipeline)
    handoff_at = wishes.wanted_handoff(headers)
    if handoff_at is not None and pipeline is not Pipeline.PDD:
        raise invalid(f"x-pdd-handoff-at needs the pipeline pdd, not {pipeline}.", "x-pdd-handoff-at")
    limit = shape.limit(body)
    _require_known_ids(surface, body.stop_token_ids, "stop_token_ids")
    with trace.during("tokenise"):
        prompt = await surface.workers.run(lambda: shape.tokenize(body, surface.tokenizer))
    _require_known_ids(surface, prompt, shape.prompt_field)
    request = GenerationRequest(
        request_id=request_id,
        context=trace.context,
        prompt=prompt,
        sampling=_sampling(body),
        stop=StopRule(max_tokens=_max_tokens(surface, shape, len(prompt), limit), stop_token_ids=_stops(surface, body)),
        pipeline=pipeline,
        handoff_at=handoff_at,
        salt=body.cache_salt or "",
    )
    return Call(
        request=request,
        stops=[body.stop] if isinstance(body.stop, str) else body.stop,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        return_token_ids=body.return_token_ids,
    )


def require_model(surface: Surface, name: str) -> None:
    """Raise `ApiError` (404) if `name` is not our model."""
    if name != surface.model_name:
        raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")


def _require_known_ids(surface: Surface, ids: Sequence[int], field: str) -> None:
    size = surface.tokenizer.vocab_size
    if ids and max(ids) >= size:
        index = next(index for index, token in enumerate(ids) if token >= size)
        raise invalid(f"{field}[{index}]: token {ids[index]} is not in the vocabulary of {size}.", field)


def _sampling(body: GenerationFields) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
    )


def _stops(surface: Surface, body: GenerationFields) -> frozenset[int]:
    own = frozenset[int]() if body.ignore_eos else surface.tokenizer.stop_token_ids
    return own.union(body.stop_token_ids)


def _max_tokens(surface: Surface, shape: Shape[BodyT], prompt_tokens: int, limit: Limit | None) -> int:
    """Output tokens the request may have: what it asks for, or the default, within the context window."""
    window = surface.max_model_len
    remaining = window - prompt_tokens
    if prompt_tokens == 0:
        raise invalid(f"{shape.prompt_field} holds no token.", shape.prompt_field, "invalid_value")
    if remaining <= 0:
        message = (
            f"This model's maximum context length is {window} tokens, but {shape.prompt_field} has {prompt_tokens} "
            "tokens and leaves no room for an answer."
        )
        raise invalid(message, shape.prompt_field, "context_length_exceeded")
    if limit is None:
        return min(shape.default_max_tokens or surface.default_max_tokens, remaining)
    if limit.tokens > remaining:
        message = (
            f"This model's maximum context length is {window} tokens, but {prompt_tokens} tokens in "
            f"{shape.prompt_field} and {limit.field} = {limit.tokens} make {prompt_tokens + limit.tokens}."
        )
        raise invalid(message, limit.field, "context_length_exceeded")
    return limit.tokens
