"""What chat and completions differ in. All else about them is one flow (`exchange`)."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

from pdd.model.tokenizer import Tokenizer
from pdd.types import FinishReason
from services.gateway.api.schemas import GenerationFields

BodyT = TypeVar("BodyT", bound=GenerationFields)


class Limit(NamedTuple):
    """How many output tokens are wanted, and the field that says so."""

    field: str
    tokens: int


class Shape(Protocol[BodyT]):
    """An endpoint's request body and the choices of its answers.

    `operation` is what OpenTelemetry calls the endpoint's work. `choice` texts are complete objects of OpenAI's
    `choices` list; `default_max_tokens` None means the whole window.
    """

    endpoint: str
    operation: str
    body: type[BodyT]
    prompt_field: str
    default_max_tokens: int | None
    id_prefix: str
    whole_object: str
    chunk_object: str

    def tokenize(self, body: BodyT, tokenizer: Tokenizer) -> list[int]:
        """The prompt's IDs (CPU work). Raises `ApiError` if there can be none."""
        ...

    def limit(self, body: BodyT) -> Limit | None:
        """The client's own limit. Raises `ApiError` if it contradicts itself."""
        ...

    def opening_choice(self) -> dict[str, Any] | None:
        """What a stream begins with, before any text."""
        ...

    def delta_choice(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """One piece of a stream; the last one has no text and says why the answer ended."""
        ...

    def whole_choice(self, text: str, finish: FinishReason) -> dict[str, Any]:
        """The answer in one piece."""
        ...
