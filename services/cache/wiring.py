"""Builds the cache service's objects and connects them."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis

from pdd.config import CacheSettings
from pdd.mesh.bus import connect
from pdd.mesh.registry import Registry
from pdd.prefix.index import PrefixIndex
from pdd.types import Peer
from services.cache.service import CacheService


async def serve(settings: CacheSettings, me: Peer, stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    timeout_s = settings.redis_timeout_ms / 1e3
    redis = Redis.from_url(settings.redis_url, socket_timeout=timeout_s, socket_connect_timeout=1.0)
    async with redis, connect(settings.nats_url, f"cache-{me.dc}-{me.instance}") as bus:
        service = CacheService(bus, me, PrefixIndex(redis), Registry(time.monotonic), timeout_s=timeout_s)
        await service.start()
        try:
            await stop.wait()
        finally:
            await service.close()
