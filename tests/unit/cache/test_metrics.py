"""What the cache service shows of look-ups and KV events."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from pdd.local.scrape import Samples
from pdd.types import KvEventKind, Role
from services.cache.metrics import CacheMetrics


def test_lookups_and_events_by_outcome() -> None:
    registry = CollectorRegistry()
    metrics = CacheMetrics(registry)
    metrics.lookup("hit", 12, 0.001)
    metrics.lookup("miss", 0, 0.001)
    metrics.lookup("unavailable", 0, 0.05)
    metrics.events([KvEventKind.STORED, KvEventKind.PINNED], "applied")
    metrics.events([KvEventKind.STORED], "dropped")
    metrics.snapshot(Role.PREFILL)
    samples = Samples(generate_latest(registry).decode())
    assert samples.by("pdd_cache_lookups_total", "outcome") == {"hit": 1, "miss": 1, "unavailable": 1}
    assert samples.total("pdd_cache_hit_blocks_sum") == 12
    assert samples.total("pdd_cache_hit_blocks_count") == 2, "an index that did not answer is no miss"
    assert samples.total("pdd_cache_lookup_seconds_count") == 3
    assert samples.by("pdd_cache_kv_events_total", "kind", outcome="applied") == {"stored": 1, "pinned": 1}
    assert samples.by("pdd_cache_kv_events_total", "outcome", kind="stored") == {"applied": 1, "dropped": 1}
    assert samples.by("pdd_cache_snapshots_total", "role") == {"prefill": 1}
