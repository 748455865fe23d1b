"""Cache: answers prefix look-ups from the index, and keeps the index true to what instances say of themselves.

Trouble with Redis is never the caller's trouble: a look-up that cannot be answered in time is answered with a cold
view.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from redis.exceptions import RedisError

from pdd.mesh import subjects
from pdd.mesh.bus import Bus, Endpoint
from pdd.mesh.messages import Beat, KvEvent, Lookup, LookupReply
from pdd.mesh.registry import BEAT_INTERVAL_S, Registry
from pdd.prefix.index import PrefixIndex
from pdd.tasks import Tasks
from pdd.telemetry.tracing import Trace
from pdd.types import Peer, Role
from services.cache.metrics import CacheMetrics

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_EVENTS_AT_ONCE = 4096


class CacheService:
    """See the module. `timeout_s` bounds each operation on the index."""

    def __init__(
        self,
        bus: Bus,
        me: Peer,
        index: PrefixIndex,
        registry: Registry,
        *,
        timeout_s: float,
        metrics: CacheMetrics | None = None,
    ) -> None:
        self._bus = bus
        self._me = me
        self._index = index
        self._registry = registry
        self._timeout_s = timeout_s
        self._metrics = metrics or CacheMetrics(None)
        self._events: asyncio.Queue[KvEvent] = asyncio.Queue(_EVENTS_AT_ONCE)
        self._fingerprints: dict[Peer, str] = {}
        self._tasks = Tasks()
        registry.on_gone = self._gone

    async def start(self) -> None:
        """Listen to KV events and beats, serve look-ups."""
        for role in (Role.PREFILL, Role.MAIN_DECODE):
            await self._bus.subscribe(subjects.beats(role=role), Beat, self._hear_beat)
        await self._bus.subscribe(subjects.all_kv_events(), KvEvent, self._enqueue)
        await self._bus.serve(
            self._me, [Endpoint("lookup", subjects.cache_lookup(self._me.dc), Lookup, self.lookup)], {}
        )
        self._tasks.spawn(self._apply_events(), "apply_events")
        self._tasks.spawn(self._expire(), "expire")

    async def close(self) -> None:
        """End the service's tasks."""
        await self._tasks.close()

    async def lookup(self, message: Lookup) -> LookupReply:
        """Leading blocks held per instance; nothing if the index is slow or down, or the instance no longer alive."""
        started = time.perf_counter()
        trace = Trace.here()
        try:
            with trace.during("lookup", blocks=len(message.hashes)):
                async with asyncio.timeout(self._timeout_s):
                    hits = await self._index.lookup(message.fingerprint, message.hashes)
                live = {(beat.peer.dc, beat.peer.role, beat.peer.instance) for beat in self._registry.live()}
                held = [hit for hit in hits if (hit.dc, hit.role, hit.instance) in live]
                longest = max((hit.blocks for hit in held), default=0)
                trace.end("lookup", hit_instances=len(held), hit_blocks=longest)
        except (TimeoutError, RedisError, OSError) as error:
            logger.warning("index_unavailable", error=str(error) or type(error).__name__)
            self._metrics.lookup("unavailable", 0, time.perf_counter() - started)
            return LookupReply([])
        live = {(beat.peer.dc, beat.peer.role, beat.peer.instance) for beat in self._registry.live()}
        held = [hit for hit in hits if (hit.dc, hit.role, hit.instance) in live]
        if message.hashes:  # a gateway that only wants to know whether we are here asks for nothing
            best = max((hit.blocks for hit in held), default=0)
            self._metrics.lookup("hit" if best else "miss", best, time.perf_counter() - started)
        return LookupReply(held)

    def _hear_beat(self, beat: Beat) -> None:
        self._fingerprints[beat.peer] = beat.identity.fingerprint
        self._registry.hear(beat)

    def _gone(self, peer: Peer) -> None:
        fingerprint = self._fingerprints.pop(peer, None)
        if fingerprint is not None:
            self._tasks.spawn(self._forget(fingerprint, peer), f"forget {peer.instance}")

    async def _forget(self, fingerprint: str, peer: Peer) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._index.forget(fingerprint, peer)
        except (TimeoutError, RedisError, OSError) as error:
            logger.warning("index_update_lost", error=str(error) or type(error).__name__)

    def _enqueue(self, event: KvEvent) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            logger.error("kv_event_dropped", instance=event.peer.instance, seq=event.seq)
            self._metrics.event(event.kind, "dropped")

    async def _apply_events(self) -> None:
        while True:
            event = await self._events.get()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._index.apply(event)
                self._metrics.event(event.kind, "applied")
            except (TimeoutError, RedisError, OSError) as error:
                logger.warning("index_update_lost", error=str(error) or type(error).__name__)
                self._metrics.event(event.kind, "lost")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            self._registry.expire()
