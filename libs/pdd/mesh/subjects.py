"""Names of the NATS subjects, general to particular.

The datacenter is part of a subject, so that crossing the WAN is a decision and never the silent fail-over of a
queue group. Tokens are `[A-Za-z0-9_-]` (enforced where settings are read).
"""

from __future__ import annotations

from pdd.types import Peer, Role

ROOT = "pdd.v1"
"""Namespace and schema version: an incompatible change of `pdd.mesh.messages` moves it on."""


def endpoint(peer: Peer, verb: str) -> str:
    """Request/reply subject of one verb at one instance."""
    return f"{ROOT}.{peer.dc}.{peer.role}.{peer.instance}.{verb}"


def tokens(gateway: Peer) -> str:
    """Token events for one gateway."""
    return f"{ROOT}.{gateway.dc}.tokens.{gateway.instance}"


def progress(gateway: Peer) -> str:
    """Progress of attempts, for one gateway."""
    return f"{ROOT}.{gateway.dc}.progress.{gateway.instance}"


def beat(peer: Peer) -> str:
    """Beats of one instance."""
    return f"{ROOT}.{peer.dc}.beat.{peer.role}.{peer.instance}"


def beats(dc: str = "*", role: Role | str = "*") -> str:
    """Wildcard over beats."""
    return f"{ROOT}.{dc}.beat.{role}.*"


def kv_events(peer: Peer) -> str:
    """Changes of one instance's cached blocks."""
    return f"{ROOT}.{peer.dc}.kv_events.{peer.role}.{peer.instance}"


def kv_events_of(dc: str) -> str:
    """Wildcard over the KV events of all instances of one datacenter."""
    return f"{ROOT}.{dc}.kv_events.*.*"


def cache_lookup(dc: str) -> str:
    """Prefix look-ups, answered by any cache instance of the datacenter."""
    return f"{ROOT}.{dc}.cache.lookup"
