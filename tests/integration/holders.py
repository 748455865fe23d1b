"""Instances that hold blocks without KV in them: sets, a journal, beats, and the real publisher. And what they should
look like in the index."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from pdd.errors import PddError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus, connect
from pdd.mesh.messages import Beat
from pdd.mesh.registry import Registry
from pdd.prefix.index import PrefixIndex, Space
from pdd.prefix.journal import Holdings, KvJournal
from pdd.stage.kv_events import KvEventPublisher
from pdd.tasks import Tasks
from pdd.types import KvEventKind, Peer, Role
from services.cache.service import CacheService, Limits
from services.cache.wiring import open_redis
from tests.unit.mesh.beats import SPEC, beat, identity

LOOKUP_S = 0.05
WRITE_S = 2.0
BEAT_S = 0.2
"""Faster than a stage's, so that tests are."""


class Cached:
    """Sets of blocks and the journal of their changes, kept together as a radix cache does; from any thread."""

    def __init__(self, capacity: int = 4096) -> None:
        self.journal = KvJournal(capacity)
        self._lock = threading.Lock()
        self._stored: set[bytes] = set()
        self._pinned: set[bytes] = set()
        self._in_flight: set[bytes] = set()

    def change(self, kind: KvEventKind, hashes: Iterable[bytes]) -> None:
        """Make a change and record it."""
        some = list(hashes)
        with self._lock:
            match kind:
                case KvEventKind.STORED:
                    self._stored.update(some)
                    self._in_flight.difference_update(some)
                case KvEventKind.REMOVED:
                    for held in (self._stored, self._pinned, self._in_flight):
                        held.difference_update(some)
                case KvEventKind.PINNED:
                    self._pinned.update(some)
                case KvEventKind.UNPINNED:
                    self._pinned.difference_update(some)
                case KvEventKind.IN_FLIGHT:
                    self._in_flight.update(some)
            self.journal.record(kind, some)

    def holdings(self) -> Holdings:
        """All of it at one moment."""
        with self._lock:
            stored, pinned, in_flight = (frozenset(one) for one in (self._stored, self._pinned, self._in_flight))
            return Holdings(self.journal.seq, stored, pinned, in_flight)

    def change_at_random(self, draw: random.Random, universe: list[bytes], most: int = 8) -> None:
        """One change that a cache could make."""
        held = self.holdings()
        choices = {
            KvEventKind.STORED: [one for one in universe if one not in held.stored],
            KvEventKind.REMOVED: sorted((held.stored - held.pinned) | held.in_flight),
            KvEventKind.PINNED: sorted(held.stored - held.pinned),
            KvEventKind.UNPINNED: sorted(held.pinned),
            KvEventKind.IN_FLIGHT: [one for one in universe if one not in held.stored | held.in_flight],
        }
        kind = draw.choice([kind for kind, some in choices.items() if some])
        self.change(kind, draw.sample(choices[kind], min(len(choices[kind]), draw.randint(1, most))))


class Holder:
    """A living instance: `cached`, its publisher on `bus`, and beats."""

    def __init__(self, bus: Bus, me: Peer, *, weights: str, block_size: int = SPEC.block_size) -> None:
        self.bus = bus
        self.me = me
        self.cached = Cached()
        self.space = Space(identity(weights).fingerprint, block_size)
        self.publisher = KvEventPublisher(bus, me, self.cached.journal, self.cached.holdings)
        self.snapshots = 0
        self._weights = weights
        self._tasks = Tasks()

    def beat(self) -> Beat:
        """What it says of itself right now."""
        spec = msgspec.structs.replace(SPEC, block_size=self.space.block_size)
        told = beat(self.me, weights=self._weights)
        return msgspec.structs.replace(told, spec=spec, kv_seq=self.cached.journal.seq)

    async def start(self, *, publish: bool = True) -> None:
        """Serve snapshots, publish changes (or not: as if their way were blocked), beat."""
        (endpoint,) = self.publisher.endpoints()
        handler = endpoint.handler

        async def counted(message: object) -> object:
            self.snapshots += not getattr(message, "pages", 1)
            return await handler(message)

        endpoint.handler = counted
        await self.bus.serve(self.me, [endpoint], {})
        if publish:
            self._tasks.spawn(self.publisher.run(), "publish")
        self._tasks.spawn(self._beat(), "beat")

    async def close(self) -> None:
        """Fall silent."""
        await self._tasks.close()

    async def _beat(self) -> None:
        while True:
            with contextlib.suppress(PddError):
                await self.bus.publish(subjects.beat(self.me), self.beat())
            await asyncio.sleep(BEAT_S)


def holder(name: str, role: Role = Role.PREFILL, epoch: str = "1") -> Peer:
    """An instance; MainDecode is in datacenter b."""
    return Peer("b" if role is Role.MAIN_DECODE else "a", role, name, epoch)


@asynccontextmanager
async def living(
    nats_url: str, me: Peer, *, weights: str, block_size: int = SPEC.block_size, publish: bool = True
) -> AsyncGenerator[Holder]:
    """An instance with a bus of its own."""
    async with connect(nats_url, me.instance) as bus:
        one = Holder(bus, me, weights=weights, block_size=block_size)
        await one.start(publish=publish)
        try:
            yield one
        finally:
            await one.close()


@asynccontextmanager
async def caching(
    nats_url: str, valkey_port: int, *, instance: str = "0", forget_after_s: float = 60.0
) -> AsyncGenerator[CacheService]:
    """A cache service of datacenter a, as its process makes it."""
    url = f"redis://127.0.0.1:{valkey_port}"
    me = Peer("a", Role.CACHE, instance, "1")
    limits = Limits(LOOKUP_S, WRITE_S, forget_after_s)
    async with (
        open_redis(url, LOOKUP_S) as lookups,
        open_redis(url, WRITE_S) as writes,
        connect(nats_url, f"cache-{instance}") as bus,
    ):
        service = CacheService(
            bus,
            me,
            PrefixIndex(lookups),
            PrefixIndex(writes),
            Registry(time.monotonic),
            limits,
            now=time.monotonic,
        )
        await service.start()
        try:
            yield service
        finally:
            await service.close()


async def indexed(redis: Redis, space: Space, peer: Peer) -> Holdings | None:
    """What the index knows of this epoch of an instance."""
    at = f"{space.key}:{peer.dc}/{peer.role.value}/{peer.instance}"
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hmget(f"{at}:at", "epoch", "seq")
        pipe.smembers(f"{at}:stored")
        pipe.smembers(f"{at}:pinned")
        pipe.zrange(f"{at}:flying", 0, -1)
        (epoch, seq), stored, pinned, flying = await pipe.execute()
    if epoch is None or epoch.decode() != peer.epoch:
        return None
    return Holdings(int(seq), frozenset(stored), frozenset(pinned), frozenset(flying))


async def settled(redis: Redis, *holders: Holder, within_s: float = 10.0) -> float:
    """Wait until the index equals what the holders hold. Returns how long that took, in seconds."""
    began = time.monotonic()
    for one in holders:
        known: object = None
        while time.monotonic() - began < within_s:
            with contextlib.suppress(RedisError):
                known = await indexed(redis, one.space, one.me)
            if known == one.cached.holdings():
                break
            await asyncio.sleep(0.05)
        assert known == one.cached.holdings(), f"the index does not equal {one.me.instance} after {within_s:g} s"
    return time.monotonic() - began
