"""The control plane's messages: what crosses between services over NATS, and nothing else.

All are msgpack-encoded `msgspec.Struct`s under the version in `subjects.ROOT`. Numbers travel, not clocks: times are
durations in seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from pdd.errors import RemoteError
from pdd.kv import KvSpec, ModelIdentity, Ticket
from pdd.types import AttemptKey, FinishReason, KvEventKind, Path, Peer, Role, Sampling, StopRule, TokenEvent


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """Base of all messages."""


class Submit(Message, frozen=True):
    """gateway -> P: compute this prompt. P starts at once; destinations follow in `Attach`.

    `outputs` were emitted by earlier attempts; P extends over them too and samples the token after them. `salt` keeps
    what is cached of one tenant from others.
    """

    key: AttemptKey
    gateway: Peer
    prompt: list[int]
    outputs: list[int]
    sampling: Sampling
    stop: StopRule
    salt: str = ""


class Submitted(Message, frozen=True):
    """P's answer: accepted, with the hit length as of now; `prefill_started` tells the one that counts."""

    peer: Peer
    hit_tokens: int


class Reserve(Message, frozen=True):
    """gateway -> MD or RLD: keep room for this request and answer with a ticket.

    `source` is the P that will send KV. `max_outputs` is how many output tokens in all this stage may have to hold.
    For MD: `relay` is the RLD to tell `kv_ready`, if one is considered. For RLD: `main` is where it will hand over, and
    `handoff_at` (experiments) fixes how many output tokens must exist by then.
    """

    key: AttemptKey
    gateway: Peer
    source: Peer
    prompt: list[int]
    outputs: list[int]
    sampling: Sampling
    stop: StopRule
    max_outputs: int
    relay: Peer | None = None
    main: Peer | None = None
    handoff_at: int | None = None
    salt: str = ""


class Reserved(Message, frozen=True):
    """A ticket, and how long it lives without a sign of life."""

    ticket: Ticket
    lease_s: float


class Attach(Message, frozen=True):
    """gateway -> P: where the KV goes. `main` always; `relay` only on the relayed path.

    `may_release_relay` lets P drop an unneeded `relay` when it decides again with the first token.
    """

    key: AttemptKey
    path: Path
    main: Ticket
    relay: Ticket | None
    may_release_relay: bool


class KvReady(Message, frozen=True):
    """MD -> RLD: all KV is here, with a seat and blocks for the rest: hand over when you like."""

    key: AttemptKey
    main: Peer


class Withdraw(Message, frozen=True):
    """RLD -> MD: forget hand-over `seq`, whose acknowledgement did not arrive."""

    key: AttemptKey
    sender: Peer
    seq: int


class Withdrawn(Message, frozen=True):
    """MD's answer: True, it does not own the request and never will under this seq; False, it took over already."""

    withdrawn: bool


class Cancel(Message, frozen=True):
    """gateway -> every stage of an attempt that is over, whatever the reason. P answers once it writes to nobody.

    `keep_kv`: the answer ended well before MD had its KV. P lets that transfer run on and MD caches what arrives, so
    that MD's cache does not fall behind P's; both forget the attempt otherwise.
    """

    key: AttemptKey
    reason: str
    keep_kv: bool = False


class InFlight(Message, frozen=True):
    """MD -> P: what its ticket called in flight has arrived up to `missing_from`; send the rest of that, if any."""

    key: AttemptKey
    transfer_id: str
    missing_from: int


class Drain(Message, frozen=True):
    """RLD or MD -> P: never write under this transfer again. Answered once nothing of it is in flight any more."""

    key: AttemptKey
    transfer_id: str


class Finished(Message, frozen=True):
    """Whoever ended the answer -> gateway, which tells the others.

    `end_position` is one past the last token, in prompt + output.
    """

    key: AttemptKey
    by: Peer
    generation: int
    end_position: int
    reason: FinishReason


class Failed(Message, frozen=True):
    """A stage -> gateway: this attempt cannot go on here; `code` as in `pdd.errors`."""

    key: AttemptKey
    by: Peer
    code: str
    message: str


class Replay(Message, frozen=True):
    """gateway -> owner of the stream: send the output IDs from `first_position` on again."""

    key: AttemptKey
    first_position: int


class Replayed(Message, frozen=True):
    """IDs from `first_position` on, the hash of the output before them, and how the answer ended, if it has."""

    generation: int
    first_position: int
    prefix_hash: int
    ids: list[int]
    finish: FinishReason | None


class Ok(Message, frozen=True):
    """Done; nothing to say."""


class Phase(StrEnum):
    """What a stage reports about an attempt."""

    QUEUED = "queued"
    PREFILL_STARTED = "prefill_started"
    PREFILL_CHUNK = "prefill_chunk"
    PREFILL_DONE = "prefill_done"
    RECEIVING = "receiving"
    KV_READY = "kv_ready"
    HANDED_OVER = "handed_over"
    DECODING = "decoding"


class Progress(Message, frozen=True):
    """stage -> gateway, at phase changes and each second: a sign of life, and what the timeline is made of.

    `received_bytes` are KV bytes this stage has received for the attempt. `tokens` are the tokens whose KV exists (P;
    with `prefill_started` those that were cached) or that were sampled here (RLD, MD). `recomputed_prompt_tokens` are
    prompt tokens that a decode stage had to compute (must be 0).
    """

    key: AttemptKey
    by: Peer
    phase: Phase
    received_bytes: int = 0
    tokens: int = 0
    recomputed_prompt_tokens: int = 0
    path: Path | None = None
    reason: str = ""


class TokenBatch(Message, frozen=True):
    """All token events of one (step, gateway)."""

    by: Peer
    events: list[TokenEvent]


class Load(Message, frozen=True):
    """How busy a stage is, and how fast.

    Blocks are `free_blocks`, `evictable_blocks` (cached, not in use) or in use. Of `prompt_tokens_seen`, `hit_tokens`
    had their KV here when they came. `batch_sequences` is the mean of the last steps; bytes are KV, sent and received.
    """

    running: int
    waiting: int
    reserved: int
    seats: int
    free_blocks: int
    evictable_blocks: int
    total_blocks: int
    steps: int
    prompt_tokens: int
    output_tokens: int
    recomputed_prompt_tokens: int
    prompt_tokens_seen: int
    hit_tokens: int
    batch_sequences: float
    prefill_tokens_per_s: float
    itl_s: float
    wan_backlog_bytes: int
    wan_goodput_bytes_per_s: float | None
    wan_rtt_s: float | None
    wan_bytes: int
    fabric_bytes: int
    stale_messages: int
    pace_overruns: int


class Beat(Message, frozen=True):
    """Every second from each stage. Each reader expires it by its own clock. Metrics are at `metrics_port`."""

    peer: Peer
    pid: int
    identity: ModelIdentity
    spec: KvSpec
    max_model_len: int
    step_tokens: int
    fabric: str
    metrics_port: int
    load: Load
    kv_seq: int = 0
    """Number of the newest change of this instance's cached blocks: whoever follows them sees that it fell behind."""


class GatewayBeat(Message, frozen=True):
    """Every second from each gateway: the attempts it still cares about. A stage drops what is missing from three."""

    gateway: Peer
    live: list[AttemptKey]


class Lookup(Message, frozen=True):
    """gateway -> cache: how many leading blocks of this chain does each instance hold? Hashes are 16 bytes each.

    Only instances whose blocks have `block_size` tokens can tell.
    """

    fingerprint: str
    block_size: int
    hashes: list[bytes]


class Hit(Message, frozen=True):
    """`blocks` leading blocks are held by this instance, of which the first `pinned` cannot be evicted right now.

    `in_flight` further blocks after them are on their way to it: something to wait for, never a hit.
    """

    dc: str
    role: Role
    instance: str
    blocks: int
    in_flight: int = 0
    pinned: int = 0


class LookupReply(Message, frozen=True):
    """Instances that hold or await at least one leading block. A hint: the reservation gives the exact hit."""

    hits: list[Hit]


class KvEvent(Message, frozen=True):
    """One change of one instance's cached blocks. `seq` counts from 1 within an epoch, without holes."""

    seq: int
    kind: KvEventKind
    hashes: list[bytes]


class KvEvents(Message, frozen=True):
    """P or MD -> cache: changes in the order in which they happened. Model and block size are those of its beat."""

    peer: Peer
    events: list[KvEvent]


class Snapshot(Message, frozen=True):
    """cache -> P or MD: which blocks do you hold? Tell page `page` of `pages`.

    `pages` 0 asks for the first, of as many as it takes.
    """

    page: int = 0
    pages: int = 0


class SnapshotPage(Message, frozen=True):
    """Blocks that the instance held after change `seq`, those whose hash falls into page `page` of `pages`.

    Pages may be taken at different moments: with all changes after the first page's `seq` applied on top, the result
    is what the instance holds, as the last change of a block decides. `pinned` blocks are among `stored`.
    """

    peer: Peer
    seq: int
    page: int
    pages: int
    stored: list[bytes]
    pinned: list[bytes]
    in_flight: list[bytes]


MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> bytes:
    """Message to bytes."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[MessageT]) -> MessageT:
    """Bytes to message. Raises `RemoteError("malformed")` naming the field that does not fit."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError("malformed", f"{getattr(kind, '__name__', kind)}: {error}") from None
