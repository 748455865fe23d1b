"""What lies between the API surface and the mesh: one request in, a stream of token IDs out.

The API surface (`services.gateway.api`) knows OpenAI's shapes and text; the coordinator knows stages. They meet
here, so that either can be read, tested and replaced without the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec
from opentelemetry.context import Context

from pdd.types import FinishReason, Path, Pipeline, Sampling, StopRule


class GenerationRequest(msgspec.Struct, frozen=True):
    """One sequence to generate.

    `handoff_at` is an experiment's wish: RelayDecode hands over when exactly so many output tokens exist (and
    waits for MainDecode there); it forces the relayed path. `waited_s` has passed since the request arrived. Only
    requests of one `salt` share cached KV.
    """

    request_id: str
    prompt: list[int]
    sampling: Sampling
    stop: StopRule
    pipeline: Pipeline = Pipeline.PDD
    context: Context = msgspec.field(default_factory=Context)
    """Spans of the work are children of the span in it."""
    handoff_at: int | None = None
    waited_s: float = 0.0
    salt: str = ""


class Emission(msgspec.Struct, frozen=True):
    """Tokens that follow what was emitted before, in order. `finish` is set on the last emission only.

    A stop token, if one ended the answer, is the last of `tokens`.
    """

    tokens: list[int]
    finish: FinishReason | None = None


class Report(msgspec.Struct):
    """How a request went, for response headers and the usage extension. Times are ms on the gateway's clock, from
    the request's arrival unless the name says otherwise. `None` means that it did not happen (yet)."""

    request_id: str
    pipeline: Pipeline
    path: Path | None = None
    reason: str = ""
    attempts: int = 1
    prefill: str | None = None
    relay: str | None = None
    main_decode: str | None = None
    predicted_wait_ms: float | None = None
    prefill_started_ms: float | None = None
    prefill_done_ms: float | None = None
    ttft_ms: float | None = None
    t2_ms: float | None = None
    t16_ms: float | None = None
    kv_relay_ready_ms: float | None = None
    kv_ready_ms: float | None = None
    handoff_ms: float | None = None
    handoff_position: int | None = None
    """How many output tokens existed when MainDecode took over."""
    handoff_gap_ms: float | None = None
    stall_ms: float | None = None
    """Largest gap between neighbours among the first 32 tokens."""
    largest_gap_ms: float | None = None
    largest_gap_at: int | None = None
    """The output token (from 1) that ended the largest gap."""
    prefill_hit_tokens: int = 0
    """Leading prompt tokens that Prefill had cached when it first began; what it finds later may be this request's."""
    main_hit_tokens: int = 0
    """Leading prompt tokens that MainDecode had cached, in the newest attempt."""
    prefill_tokens: int = 0
    relay_tokens: int = 0
    main_decode_tokens: int = 0
    kv_fabric_bytes: int = 0
    kv_wan_bytes: int = 0
    recomputed_prompt_tokens: int = 0
    total_ms: float | None = None

    @property
    def exposed_wait_ms(self) -> float | None:
        """The exposed wait as it was: from the end of prefill until MainDecode had all KV, 0 if that came first.

        The client feels it on the direct path; on the relayed one RelayDecode covers it. None if either did not
        happen, or if a further attempt was needed, so that the two may belong to different ones.
        """
        if self.attempts != 1 or self.prefill_done_ms is None or self.kv_ready_ms is None:
            return None
        return max(0.0, self.kv_ready_ms - self.prefill_done_ms)


class Generation(Protocol):
    """A running request. Iterating yields emissions until one carries `finish`.

    Raises a `PddError` when the request cannot go on. Before the first emission that is still an HTTP status.
    """

    @property
    def report(self) -> Report: ...

    def __aiter__(self) -> AsyncIterator[Emission]: ...


class Generator(Protocol):
    """Starts generations. Leaving the context cancels whatever is still running, everywhere."""

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]: ...
