"""Builds the cache service's objects and connects them."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from pdd.config import CacheSettings
from pdd.mesh.bus import connect
from pdd.mesh.registry import Registry
from pdd.prefix.index import PrefixIndex
from pdd.telemetry.metrics import process_registry, serve_metrics
from pdd.types import Peer
from services.cache.metrics import CacheMetrics
from services.cache.service import CacheService, Limits

_WRITE_S = 2.0
"""Longest wait for a change to the index, which nobody waits for."""


async def serve(settings: CacheSettings, me: Peer, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises `ConfigError` if the index in Redis was written by another kind of pdd."""
    limits = Limits(settings.redis_timeout_ms / 1e3, max(_WRITE_S, settings.redis_timeout_ms / 1e3))
    registry = process_registry(me)
    async with (
        serve_metrics(registry, settings.metrics_host, settings.metrics_port),
        open_redis(settings.redis_url, limits.lookup_s) as lookups,
        open_redis(settings.redis_url, limits.write_s) as writes,
        connect(settings.nats_url, f"cache-{me.dc}-{me.instance}", lost=stop) as bus,
    ):
        service = CacheService(
            bus,
            me,
            PrefixIndex(lookups),
            PrefixIndex(writes),
            Registry(time.monotonic),
            limits,
            now=time.monotonic,
            metrics=CacheMetrics(registry),
        )
        stopped = asyncio.create_task(stop.wait())
        try:
            await service.start()
            await asyncio.wait({stopped, service.refused}, return_when=asyncio.FIRST_COMPLETED)
            if service.refused.done():
                service.refused.result()
        finally:
            stopped.cancel()
            await service.close()


def open_redis(url: str, timeout_s: float) -> Redis:
    """A client that never tries again: a look-up that has failed is answered with a cold view, not late.

    redis-py's own retries (ten, with growing pauses) can outlive the caller's deadline: under load it happens that a
    cancellation is swallowed while a command is being written.
    """
    return Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0))
