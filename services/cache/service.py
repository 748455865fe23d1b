"""Cache: answers prefix look-ups from the index, and keeps the index true to what instances hold.

Beats say who is there; each living instance has a follower of its own. Trouble with Redis is never the caller's
trouble: a look-up that cannot be answered in time is answered with a cold view. Several cache services may share one
index: all apply the same changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError

from pdd.errors import ConfigError, PddError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus, Endpoint
from pdd.mesh.messages import Beat, Hit, KvEvents, Lookup, LookupReply
from pdd.mesh.registry import BEAT_INTERVAL_S, Registry
from pdd.mesh.streams import EventLog
from pdd.prefix.index import PrefixIndex, Space
from pdd.tasks import Tasks, cancellation_kept
from pdd.telemetry.tracing import Trace
from pdd.types import Peer, Role
from services.cache.follower import Follower
from services.cache.metrics import CacheMetrics

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

HOLDERS = (Role.PREFILL, Role.MAIN_DECODE)
"""Who keeps KV that can be hit."""

FORGET_AFTER_S = 60.0
"""How long the blocks of an instance that has fallen silent stay in the index, though never in an answer: it may only
be out of reach, and would have to tell all of them again."""

_REBUILD_INTERVAL_S = 30.0


@dataclass(frozen=True)
class Limits:
    """Longest wait for the index: of a look-up, of a change to it; and how long silent instances stay in it. All s."""

    lookup_s: float
    write_s: float
    forget_after_s: float = FORGET_AFTER_S


class CacheService:
    """See the module. Look-ups and writes have an index (and so connections) each, so that neither waits for the other.

    `now` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        bus: Bus,
        me: Peer,
        lookups: PrefixIndex,
        writes: PrefixIndex,
        registry: Registry,
        limits: Limits,
        *,
        now: Callable[[], float],
        metrics: CacheMetrics | None = None,
    ) -> None:
        self._bus = bus
        self._me = me
        self._lookups = lookups
        self._writes = writes
        self._registry = registry
        self._limits = limits
        self._now = now
        self._followers: dict[tuple[str, Role, str], tuple[Follower, asyncio.Task[None]]] = {}
        self._logs: dict[str, EventLog] = {}
        self._heard_from: dict[str, float] = {}
        self._metrics = metrics or CacheMetrics(None)
        self._tasks = Tasks()
        self.refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with `ConfigError` if the index is found to belong to others."""
        registry.on_gone = self._gone

    async def start(self) -> None:
        """Listen to KV events and beats, serve look-ups. Raises `ConfigError` if this Redis is not for us."""
        verified = await self._verify()
        self._follow(self._me.dc)
        for role in HOLDERS:
            await self._bus.subscribe(subjects.beats(role=role), Beat, self._hear_beat)
        await self._bus.serve(
            self._me, [Endpoint("lookup", subjects.cache_lookup(self._me.dc), Lookup, self.lookup)], {}
        )
        self._tasks.spawn(self._tend(verified=verified), "tend")

    async def close(self) -> None:
        """End the service's tasks."""
        await self._tasks.close()
        self.refused.cancel()

    async def lookup(self, message: Lookup) -> LookupReply:
        """Leading blocks per instance; nothing if the index is slow or down, or the instance no longer alive."""
        started = time.perf_counter()
        trace = Trace.here()
        space = Space(message.fingerprint, message.block_size)
        try:
            with trace.during("lookup", blocks=len(message.hashes)):
                async with asyncio.timeout(self._limits.lookup_s):
                    found = await self._lookups.lookup(space, message.hashes)
                live = {beat.peer for beat in self._registry.live() if _space(beat) == space}
                held = [one for one in found if one.peer in live]
                longest = max((one.stored for one in held), default=0)
                trace.end("lookup", hit_instances=len(held), hit_blocks=longest)
        except (TimeoutError, RedisError, OSError) as error:
            logger.warning("index_unavailable", error=str(error) or type(error).__name__)
            self._metrics.lookup("unavailable", 0, time.perf_counter() - started)
            return LookupReply([])
        if message.hashes:  # a gateway that only wants to know whether we are here asks for nothing
            self._metrics.lookup("hit" if longest else "miss", longest, time.perf_counter() - started)
        return LookupReply(
            [Hit(one.peer.dc, one.peer.role, one.peer.instance, one.stored, one.in_flight, one.pinned) for one in held]
        )

    def _hear_beat(self, beat: Beat) -> None:
        if beat.peer.role not in HOLDERS:
            return
        self._registry.hear(beat)
        self._follow(beat.peer.dc)
        place = _place(beat.peer)
        if place not in self._followers:
            follower = Follower(
                self._bus,
                self._writes,
                _space(beat),
                beat.peer,
                timeout_s=self._limits.write_s,
                now=self._now,
                on_silence=self._silent,
                metrics=self._metrics,
            )
            self._followers[place] = follower, self._tasks.spawn(follower.run(), f"follow {beat.peer.instance}")
        self._followers[place][0].told(beat.kv_seq)

    def _hear_events(self, message: KvEvents) -> None:
        self._heard_from[message.peer.dc] = self._now()
        follower, _ = self._followers.get(_place(message.peer), (None, None))
        # Of an epoch that no beat has named they are too early or too late; a snapshot will cover them.
        if follower is not None and follower.peer == message.peer:
            follower.offer(message)

    def _gone(self, peer: Peer) -> None:
        follower, task = self._followers.pop(_place(peer))
        task.cancel()
        if any(_place(beat.peer) == _place(peer) for beat in self._registry.live()):
            # Its successor has beaten. One that is only silent may still be heard by others: `sweep` decides.
            self._tasks.spawn(self._forget(follower.space, peer), f"forget {peer.instance}")

    def _follow(self, dc: str) -> None:
        if dc not in self._logs:
            log = self._logs[dc] = EventLog(self._bus, dc, self._me.dc)
            self._heard_from[dc] = self._now()
            self._tasks.spawn(log.follow(KvEvents, self._hear_events), f"kv events of {dc}")

    def _silent(self, peer: Peer) -> None:
        """Beats of another datacenter come and events do not: its events' copy here may be stuck."""
        if peer.dc != self._me.dc and self._now() - self._heard_from[peer.dc] > _REBUILD_INTERVAL_S:
            self._heard_from[peer.dc] = self._now()
            self._tasks.spawn(self._rebuild(self._logs[peer.dc]), f"rebuild stream of {peer.dc}")

    async def _rebuild(self, log: EventLog) -> None:
        try:
            await log.rebuild()
        except PddError as error:
            logger.warning("stream_not_rebuilt", error=str(error))

    async def _forget(self, space: Space, peer: Peer) -> None:
        try:
            async with asyncio.timeout(self._limits.write_s):
                await self._writes.forget(space, peer)
        except (TimeoutError, RedisError, OSError) as error:
            logger.warning("index_update_lost", error=str(error) or type(error).__name__)  # until `sweep`

    async def _verify(self) -> bool:
        try:
            async with asyncio.timeout(self._limits.write_s):
                await self._writes.verify()
        except (TimeoutError, RedisError, OSError) as error:
            logger.warning("index_unavailable", error=str(error) or type(error).__name__)
            return False
        return True

    async def _tend(self, *, verified: bool) -> None:
        while True:
            await asyncio.sleep(BEAT_INTERVAL_S)
            self._registry.expire()
            try:
                with cancellation_kept():
                    verified = verified or await self._verify()
                    async with asyncio.timeout(self._limits.write_s):
                        await self._writes.sweep(self._limits.forget_after_s)
            except ConfigError as error:
                self.refused.set_exception(error)
                return
            except (TimeoutError, RedisError, OSError) as error:
                logger.debug("index_not_swept", error=str(error) or type(error).__name__)


def _place(peer: Peer) -> tuple[str, Role, str]:
    return peer.dc, peer.role, peer.instance


def _space(beat: Beat) -> Space:
    return Space(beat.identity.fingerprint, beat.spec.block_size)
