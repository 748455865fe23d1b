"""The prefix index and its service over real Valkey: true when it answers, cold when it cannot, never in the way."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from pdd.mesh import subjects
from pdd.mesh.bus import Bus, connect
from pdd.mesh.messages import Hit, KvEvent, Lookup, LookupReply
from pdd.mesh.registry import Registry
from pdd.prefix.hashing import block_hashes
from pdd.prefix.index import PrefixIndex
from pdd.types import KvEventKind, Peer, Role
from services.cache.service import CacheService
from services.cache.wiring import open_redis
from services.gateway.prefix_view import PrefixView
from tests.integration.conftest import ControlPlane, OwnServer
from tests.unit.mesh.beats import SPEC, beat, identity
from tests.unit.transfer.proxy import TcpProxy

TIMEOUT_S = 0.05
SLACK_S = 0.2
"""How much longer than its timeout a bounded wait may take on a busy machine."""


def holder(name: str, role: Role = Role.PREFILL, epoch: str = "1") -> Peer:
    return Peer("b" if role is Role.MAIN_DECODE else "a", role, name, epoch)


def chain(root: str, blocks: int) -> list[bytes]:
    """Stands for a prompt's block hashes."""
    return [f"{root}-{index}".encode() for index in range(blocks)]


def event(
    peer: Peer, fingerprint: str, hashes: list[bytes], kind: KvEventKind = KvEventKind.STORED, seq: int = 0
) -> KvEvent:
    return KvEvent(peer, seq, kind, fingerprint, hashes)


def hit(peer: Peer, blocks: int) -> Hit:
    return Hit(peer.dc, peer.role, peer.instance, blocks)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    asked=st.integers(0, 70),
    held=st.lists(st.integers(0, 90), min_size=1, max_size=6),
    role=st.sampled_from([Role.PREFILL, Role.MAIN_DECODE]),
)
@settings(max_examples=60, deadline=None)
async def test_a_lookup_equals_a_naive_count(
    control_plane: ControlPlane, asked: int, held: list[int], role: Role
) -> None:
    """Instances hold prefixes of one long chain, and blocks of other chains beside it."""
    fingerprint = secrets.token_hex(4)
    hashes = chain(fingerprint, 90)
    async with Redis(port=control_plane.valkey) as redis:
        index = PrefixIndex(redis)
        holdings: dict[Peer, set[bytes]] = {}
        for number, blocks in enumerate(held):
            peer = holder(f"i{number}", role)
            holdings[peer] = {*hashes[:blocks], *chain("elsewhere", number)}
            if holdings[peer]:
                await index.apply(event(peer, fingerprint, random.sample(sorted(holdings[peer]), len(holdings[peer]))))
        naive = {}
        for peer, blocks in holdings.items():
            naive[peer] = next((i for i, one in enumerate(hashes[:asked]) if one not in blocks), asked)
        found = await index.lookup(fingerprint, hashes[:asked])
        assert sorted(found, key=lambda one: one.instance) == [hit(p, n) for p, n in naive.items() if n]
        assert await index.lookup(f"other than {fingerprint}", hashes[:asked]) == []


async def test_events_may_come_twice_and_in_doubt_nothing_is_left(control_plane: ControlPlane, unique: str) -> None:
    one, two = holder("one"), holder("two", Role.MAIN_DECODE)
    hashes = chain(unique, 6)
    async with Redis(port=control_plane.valkey) as redis:
        index = PrefixIndex(redis)

        async def apply_twice(*happened: KvEvent) -> list[Hit]:
            for each in happened:
                await index.apply(each)
                await index.apply(each)
            return sorted(await index.lookup(unique, hashes), key=lambda found: found.instance)

        stored = [event(one, unique, hashes[:4]), event(two, unique, hashes)]
        assert await apply_twice(*stored) == [hit(one, 4), hit(two, 6)]
        leaf = event(two, unique, hashes[5:], KvEventKind.REMOVED)
        assert await apply_twice(leaf) == [hit(one, 4), hit(two, 5)]
        cleared = event(one, unique, [], KvEventKind.CLEARED)
        assert await apply_twice(cleared) == [hit(two, 5)]
        assert await apply_twice(event(one, unique, hashes[:1])) == [hit(one, 1), hit(two, 5)]
        await index.forget(unique, one)
        await index.forget(unique, two)
        assert await index.lookup(unique, hashes) == []
        assert await redis.keys(f"*{unique}*") == []


@asynccontextmanager
async def running_service(
    nats_url: str, valkey_port: int, unique: str, clock: Clock
) -> AsyncGenerator[tuple[Bus, CacheService]]:
    """A cache service in a datacenter of its own, and a bus to talk to it."""
    redis = open_redis(f"redis://127.0.0.1:{valkey_port}", TIMEOUT_S)
    me = Peer(f"dc-{unique}", Role.CACHE, "0", "1")
    async with redis, connect(nats_url, "cache") as bus, connect(nats_url, "caller") as caller:
        service = CacheService(bus, me, PrefixIndex(redis), Registry(clock), timeout_s=TIMEOUT_S)
        await service.start()
        try:
            yield caller, service
        finally:
            await service.close()


async def until(caller: Bus, unique: str, lookup: Lookup, expected: list[Hit]) -> None:
    """Ask until the answer is `expected`: events take a moment."""
    async with asyncio.timeout(5):
        while True:
            reply = await caller.request(subjects.cache_lookup(f"dc-{unique}"), lookup, LookupReply)
            if sorted(reply.hits, key=lambda one: one.instance) == expected:
                return
            await asyncio.sleep(0.02)


async def test_the_service_follows_events_beats_and_deaths(control_plane: ControlPlane, unique: str) -> None:
    clock = Clock()
    fingerprint = identity(unique).fingerprint
    lookup = Lookup(fingerprint, chain(unique, 5))
    p, m = holder(f"p-{unique}"), holder(f"m-{unique}", Role.MAIN_DECODE)
    async with running_service(control_plane.nats_a, control_plane.valkey, unique, clock) as (caller, _):
        for peer, blocks in ((p, 3), (m, 5)):
            await caller.publish(subjects.kv_events(peer), event(peer, fingerprint, chain(unique, blocks)))
        await until(caller, unique, lookup, [])  # nobody alive is known to hold anything yet
        for peer in (p, m):
            await caller.publish(subjects.beat(peer), beat(peer, weights=unique))
        await until(caller, unique, lookup, [hit(m, 5), hit(p, 3)])

        clock.now += 3.5
        await caller.publish(subjects.beat(p), beat(p, weights=unique))
        await until(caller, unique, lookup, [hit(p, 3)])  # m fell silent

        reborn = holder(p.instance, epoch="2")
        await caller.publish(subjects.beat(reborn), beat(reborn, weights=unique))
        await until(caller, unique, lookup, [])  # its memory died with the old process
        async with Redis(port=control_plane.valkey) as redis:
            assert await redis.keys(f"*{fingerprint}*") == []


async def test_an_index_that_is_slow_or_down_gives_a_cold_view_in_time(
    control_plane: ControlPlane, own_valkey: OwnServer, unique: str
) -> None:
    fingerprint = identity(unique).fingerprint
    p = holder(f"p-{unique}")
    prompt = list(range(20))

    async def timed(view: PrefixView) -> dict[tuple[str, Role, str], int]:
        began = time.monotonic()
        hits = await view.hits(prompt, [beat(p, weights=unique)])
        assert time.monotonic() - began < 2 * TIMEOUT_S + SLACK_S
        return hits

    async with (
        TcpProxy(own_valkey.port) as proxy,
        running_service(control_plane.nats_a, proxy.port, unique, Clock()) as (caller, service),
    ):
        view = PrefixView(caller, f"dc-{unique}", timeout_s=2 * TIMEOUT_S)
        stored = event(p, fingerprint, block_hashes(prompt, SPEC.block_size)[:3])
        await caller.publish(subjects.kv_events(p), stored)
        await caller.publish(subjects.beat(p), beat(p, weights=unique))
        warm = {("a", Role.PREFILL, p.instance): 12}
        async with asyncio.timeout(5):
            while await timed(view) != warm:  # noqa: ASYNC110 (an index has no event to wait for)
                await asyncio.sleep(0.02)
        proxy.pause()
        for _ in range(5):
            assert await timed(view) == {}
            assert view.reachable  # it is the index that is slow; the service answers
        proxy.resume()
        async with asyncio.timeout(5):
            while await timed(view) != warm:  # noqa: ASYNC110 (an index has no event to wait for)
                await asyncio.sleep(0.02)
        await asyncio.to_thread(own_valkey.stop)
        for _ in range(5):
            assert await timed(view) == {}
        await caller.publish(subjects.kv_events(p), stored)  # lost, and no harm done
        await asyncio.to_thread(own_valkey.start)
        async with asyncio.timeout(5):
            while await timed(view) != warm:
                await caller.publish(subjects.kv_events(p), stored)
                await asyncio.sleep(0.05)
        await service.close()
    assert await timed(PrefixView(caller, f"dc-{unique}", timeout_s=TIMEOUT_S)) == {}  # no service at all


async def test_cancelled_lookups_never_get_each_others_replies(control_plane: ControlPlane, unique: str) -> None:
    """A reply that is left on a pooled connection would answer the next question: another prompt's hits."""
    generator = random.Random(3)
    keys = [f"{unique}-{number}" for number in range(40)]
    peers = [holder(f"of-{key}") for key in keys]
    answered = cancelled = 0
    async with TcpProxy(control_plane.valkey) as proxy:
        async with Redis(port=control_plane.valkey) as redis:
            for number, (key, peer) in enumerate(zip(keys, peers, strict=True)):
                await PrefixIndex(redis).apply(event(peer, key, chain(key, 1 + number % 7)))
        async with Redis(port=proxy.port, max_connections=16) as redis:
            index = PrefixIndex(redis)
            await index.lookup(keys[0], chain(keys[0], 7))
            proxy.bytes_per_s = 200_000  # a request of some 300 bytes takes 1.5 ms

            async def client(share: range) -> None:
                nonlocal answered, cancelled
                for _ in share:
                    number = generator.randrange(len(keys))
                    asked = asyncio.create_task(index.lookup(keys[number], chain(keys[number], 7)))
                    _, pending = await asyncio.wait({asked}, timeout=generator.uniform(0, 0.012))
                    if pending:
                        asked.cancel()
                    try:
                        assert await asked == [hit(peers[number], 1 + number % 7)]
                        answered += 1
                    except asyncio.CancelledError:
                        cancelled += 1

            await asyncio.gather(*(client(range(part, 2000, 8)) for part in range(8)))
            proxy.bytes_per_s = None
            # No connection was lost to a cancel: as many as the pool has can be used at once.
            everybody = [index.lookup(key, chain(key, 7)) for key in keys[:16]]
            assert [len(hits) for hits in await asyncio.gather(*everybody)] == [1] * 16
    assert answered + cancelled == 2000
    assert min(answered, cancelled) > 200, "the delays did not mix answers and cancels"


async def test_a_hundred_lookups_at_once_wait_no_longer_than_one(
    control_plane: ControlPlane, own_valkey: OwnServer, unique: str
) -> None:
    async with (
        TcpProxy(own_valkey.port) as proxy,
        running_service(control_plane.nats_a, proxy.port, unique, Clock()) as (caller, _),
    ):
        proxy.pause()
        began = time.monotonic()
        asked = [
            caller.request(subjects.cache_lookup(f"dc-{unique}"), Lookup("f", [b"h"]), LookupReply) for _ in range(100)
        ]
        assert await asyncio.gather(*asked) == [LookupReply([])] * 100
        assert time.monotonic() - began < 20 * TIMEOUT_S, "waits add up"


@pytest.mark.parametrize("role", [Role.RELAY, Role.GATEWAY])
async def test_only_those_whose_kv_can_be_hit_are_listened_to(
    control_plane: ControlPlane, unique: str, role: Role
) -> None:
    """RelayDecode keeps nothing; what it says of blocks is never offered as a hit."""
    fingerprint = identity(unique).fingerprint
    stranger, p = holder(f"x-{unique}", role), holder(f"p-{unique}")
    async with running_service(control_plane.nats_a, control_plane.valkey, unique, Clock()) as (caller, _):
        for peer in (stranger, p):
            await caller.publish(subjects.beat(peer), beat(peer, weights=unique))
            await caller.publish(subjects.kv_events(peer), event(peer, fingerprint, chain(unique, 2)))
        await until(caller, unique, Lookup(fingerprint, chain(unique, 2)), [hit(p, 2)])
