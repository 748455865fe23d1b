"""What every request to the API needs at hand."""

from __future__ import annotations

from dataclasses import dataclass

from pdd.model.tokenizer import Tokenizer
from pdd.types import Pipeline
from services.gateway.api.metrics import Metrics
from services.gateway.api.workers import TextWorkers
from services.gateway.generation import Generator


@dataclass(frozen=True)
class Surface:
    """The model as clients know it, who generates, and the limits. `max_model_len` is in tokens, prompt + output;
    `default_max_tokens` is for chats that name no limit."""

    generator: Generator
    tokenizer: Tokenizer
    workers: TextWorkers
    metrics: Metrics
    model_name: str
    max_model_len: int
    default_max_tokens: int
    default_pipeline: Pipeline
    max_body_bytes: int
