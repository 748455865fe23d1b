"""Small value types that the packages share. No behaviour beyond what the fields imply, no I/O."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import xxhash


class Role(StrEnum):
    """What a process is in the mesh."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    RELAY = "relay"
    MAIN_DECODE = "main_decode"
    CACHE = "cache"


class Pipeline(StrEnum):
    """What an operator or client asks for. `PDD` lets the router choose the path."""

    PDD = "pdd"
    PD_WAN = "pd-wan"
    PD_LOCAL = "pd-local"


class Path(StrEnum):
    """The stages a request went through."""

    DIRECT = "P->MD"
    RELAYED = "P->RLD->MD"


class FinishReason(StrEnum):
    """Why an answer ended; OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class KvEventKind(StrEnum):
    """What happened to cached KV blocks of an instance.

    `PINNED` blocks are stored and in use, so that they cannot be evicted; `IN_FLIGHT` ones are on their way to the
    instance: something to wait for, never a hit.
    """

    STORED = "stored"
    REMOVED = "removed"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    IN_FLIGHT = "in_flight"


class Peer(msgspec.Struct, frozen=True):
    """A running process. `epoch` is new at each start, so that a message to a predecessor is refused."""

    dc: str
    role: Role
    instance: str
    epoch: str


class AttemptKey(msgspec.Struct, frozen=True, order=True):
    """Identity of one try at one request: `request_id` (32 hex digits, ours) and a growing `attempt`."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. `temperature` 0 is greedy; whatever has its default is off.

    `seed` is always set (the gateway draws one if the client gave none): tokens are drawn from a counter-based
    generator keyed by (seed, position), so that any stage draws the same token.

    First `logit_bias` is added to the logits of its tokens. Then `repetition_penalty` divides positive logits, and
    multiplies negative ones, of tokens of prompt or output (Keskar et al. 2019); `presence_penalty` is subtracted from
    those of output tokens, `frequency_penalty` once for each time that one occurs there (OpenAI's definition). After
    the temperature, `min_p` cuts tokens less likely than that share of the likeliest, then come `top_k` and `top_p`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """`(token, what is added to its logit)`."""
    logprobs: int | None = None
    """How many of the likeliest tokens to name with their log-probabilities, besides the drawn one; None: none."""

    @property
    def penalises(self) -> bool:
        """Whether what is drawn depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class StopRule(msgspec.Struct, frozen=True):
    """When an answer ends by its token IDs. `max_tokens` counts output tokens from the prompt's end."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    def check(self, output: Sequence[int]) -> FinishReason | None:
        """Say whether `output` (all output IDs so far, at least one) ends the answer."""
        if output[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(output) >= self.max_tokens else None


class TokenEvent(msgspec.Struct, frozen=True):
    """One sampled token. `position` is its index in prompt + output.

    `prefix_hash` is the running hash (`hash_output`) of the output IDs *before* this token; the gateway emits
    the token only if it equals the hash of what it has emitted.
    """

    key: AttemptKey
    generation: int
    position: int
    token: int
    prefix_hash: int


class Handoff(msgspec.Struct, frozen=True):
    """The one hand-over message: P->RLD, P->MD and RLD->MD all use it. Idempotent by `seq`.

    `ids` are the output IDs from `first_position` (index in prompt + output) on. `final` transfers ownership:
    once acknowledged, the receiver alone samples. `covered_tokens` is how many leading tokens the receiver must
    hold KV for before it may start; `prompt_hash` is `hash_prompt` of the prompt.
    """

    key: AttemptKey
    sender: Peer
    seq: int
    generation: int
    first_position: int
    ids: list[int]
    final: bool
    covered_tokens: int
    prompt_hash: bytes


class HandoffReply(msgspec.Struct, frozen=True):
    """Answer to `Handoff`. `reason` says why it was refused."""

    seq: int
    accepted: bool
    reason: str = ""


EMPTY_OUTPUT_HASH = 0
"""`prefix_hash` of the first output token."""


def hash_output(running: int, ids: Iterable[int]) -> int:
    """Extend the 64-bit running hash of the output IDs by `ids`: h' = xxh64(little-endian u32 id, seed=h)."""
    for token in ids:
        running = xxhash.xxh64_intdigest(struct.pack("<I", token), seed=running)
    return running


def hash_prompt(tokens: Sequence[int]) -> bytes:
    """16-byte BLAKE2b of the prompt's IDs as little-endian u32."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}I", *tokens), digest_size=16).digest()
