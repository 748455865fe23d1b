"""Beats of stages that do not run."""

from __future__ import annotations

from typing import Any

import msgspec

from pdd.kv import KvSpec, ModelIdentity
from pdd.mesh.messages import Beat, Load
from pdd.types import Peer, Role

SPEC = KvSpec(num_layers=2, num_kv_heads=2, head_dim=16, block_size=4, dtype="float32")

IDLE = Load(
    running=0,
    waiting=0,
    reserved=0,
    seats=4,
    free_blocks=8,
    evictable_blocks=0,
    total_blocks=8,
    steps=0,
    prompt_tokens=0,
    output_tokens=0,
    recomputed_prompt_tokens=0,
    prompt_tokens_seen=0,
    hit_tokens=0,
    batch_sequences=0.0,
    prefill_tokens_per_s=0.0,
    itl_s=0.0,
    wan_backlog_bytes=0,
    wan_goodput_bytes_per_s=None,
    wan_rtt_s=None,
    wan_bytes=0,
    fabric_bytes=0,
    stale_messages=0,
    pace_overruns=0,
)


def identity(weights: str = "w") -> ModelIdentity:
    """A model that differs from others by its weights."""
    return ModelIdentity(weights, "llama", 2, 2, 16, "default")


def peer(role: Role, instance: str = "0", *, dc: str = "a", epoch: str = "") -> Peer:
    """A peer; its epoch is as unique as its place unless said otherwise."""
    return Peer(dc, role, instance, epoch or f"{dc}-{role}-{instance}")


def beat(of: Peer, *, weights: str = "w", **load: Any) -> Beat:
    """A beat of an idle stage, but for `load`."""
    return Beat(
        peer=of,
        pid=1,
        identity=identity(weights),
        spec=SPEC,
        max_model_len=64,
        step_tokens=16,
        fabric="stream",
        metrics_port=0,
        load=msgspec.structs.replace(IDLE, **load),
    )
