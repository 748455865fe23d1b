"""What the cache service counts, in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from pdd.types import KvEventKind, Role

LookupOutcome = Literal["hit", "miss", "unavailable"]
"""Whether any instance holds a leading block; `unavailable`: the index was too slow or down."""

EventOutcome = Literal["applied", "dropped"]
"""`dropped`: too many were waiting; a snapshot makes up for them."""

_LOOKUP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
_BLOCKS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16_384)


class CacheMetrics:
    """See the module. `registry` None: nothing is shown."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self._lookups = Counter(
            "pdd_cache_lookups", "Look-ups of prompts, by outcome.", ("outcome",), registry=registry
        )
        self._lookup_seconds = Histogram(
            "pdd_cache_lookup_seconds", "Length of a look-up in the index.", registry=registry, buckets=_LOOKUP_S
        )
        self._hit_blocks = Histogram(
            "pdd_cache_hit_blocks",
            "Leading blocks held by the live instance that holds most of them.",
            registry=registry,
            buckets=_BLOCKS,
        )
        self._events = Counter(
            "pdd_cache_kv_events", "KV events, by kind and outcome.", ("kind", "outcome"), registry=registry
        )
        self._snapshots = Counter(
            "pdd_cache_snapshots",
            "Instances whose part of the index was built anew, by role.",
            ("role",),
            registry=registry,
        )

    def lookup(self, outcome: LookupOutcome, blocks: int, seconds: float) -> None:
        """A prompt was looked up: at best, `blocks` leading blocks are held by one instance."""
        self._lookups.labels(outcome).inc()
        self._lookup_seconds.observe(seconds)
        if outcome != "unavailable":
            self._hit_blocks.observe(blocks)

    def events(self, kinds: Iterable[KvEventKind], outcome: EventOutcome) -> None:
        """KV events of an instance were dealt with."""
        for kind in kinds:
            self._events.labels(kind.value, outcome).inc()

    def snapshot(self, role: Role) -> None:
        """The index was built anew for one instance of that role."""
        self._snapshots.labels(role.value).inc()
