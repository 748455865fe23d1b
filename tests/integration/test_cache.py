"""The cache service over real NATS and Valkey: its index equals what instances hold, and comes to do so again after
whatever broke; a look-up that cannot be answered is a cold view, never an error and never late."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
from redis.asyncio import Redis

from pdd.config import CacheSettings
from pdd.errors import ConfigError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus, connect
from pdd.mesh.messages import Hit, KvEvent, KvEvents, Lookup, LookupReply
from pdd.mesh.streams import EventLog
from pdd.prefix.hashing import block_hashes
from pdd.prefix.index import Space
from pdd.types import KvEventKind, Peer, Role
from services.cache import follower
from services.cache import service as cache_service
from services.cache.wiring import serve
from services.gateway.prefix_view import PrefixHits, PrefixView
from tests.integration.conftest import ControlPlane, OwnServer
from tests.integration.holders import LOOKUP_S, Holder, caching, holder, indexed, living, settled
from tests.integration.test_prefix_index import chain
from tests.unit.mesh.beats import identity
from tests.unit.transfer.proxy import TcpProxy

SLACK_S = 0.3
"""How much longer than its timeout a bounded wait may take on a busy machine."""


def hit(peer: Peer, blocks: int, in_flight: int = 0, pinned: int = 0) -> Hit:
    return Hit(peer.dc, peer.role, peer.instance, blocks, in_flight, pinned)


def question(unique: str, hashes: list[bytes], block_size: int = 4) -> Lookup:
    return Lookup(identity(unique).fingerprint, block_size, hashes)


async def ask(bus: Bus, lookup: Lookup) -> list[Hit]:
    reply = await bus.request(subjects.cache_lookup("a"), lookup, LookupReply)
    return sorted(reply.hits, key=lambda one: one.instance)


async def until(bus: Bus, lookup: Lookup, expected: list[Hit], within_s: float = 10.0) -> None:
    """Ask until the answer is `expected`: beats and changes take a moment."""
    began = time.monotonic()
    while (found := await ask(bus, lookup)) != expected:
        assert time.monotonic() - began < within_s, found
        await asyncio.sleep(0.05)


async def churn(*holders: Holder, for_s: float, pause_s: float = 0.01) -> None:
    """Let them change at random for a while."""
    draw, universe, end = random.Random(5), chain(300), time.monotonic() + for_s
    while time.monotonic() < end:
        for one in holders:
            one.cached.change_at_random(draw, universe)
        await asyncio.sleep(pause_s)


async def test_a_lookup_tells_what_living_instances_hold(control_plane: ControlPlane, unique: str) -> None:
    """Guards against hits at instances that are dead, have restarted, or hold blocks of another size."""
    hashes = chain(8)
    p, m = holder(f"p-{unique}"), holder(f"m-{unique}", Role.MAIN_DECODE)
    async with (
        connect(control_plane.nats_a, "caller") as caller,
        caching(control_plane.nats_a, control_plane.valkey, forget_after_s=3.0),
        living(control_plane.nats_b, m, weights=unique) as main,
        Redis(port=control_plane.valkey) as redis,
    ):
        async with living(control_plane.nats_a, p, weights=unique) as prefill:
            prefill.cached.change(KvEventKind.STORED, hashes[:3])
            main.cached.change(KvEventKind.STORED, hashes[:5])
            main.cached.change(KvEventKind.PINNED, hashes[:2])
            main.cached.change(KvEventKind.IN_FLIGHT, hashes[5:7])
            await until(caller, question(unique, hashes), [hit(m, 5, 2, 2), hit(p, 3)])
            await until(caller, question(unique, hashes[:4]), [hit(m, 4, 0, 2), hit(p, 3)])
            assert await ask(caller, question(unique, hashes, block_size=8)) == []
            assert await ask(caller, question(f"not {unique}", hashes)) == []
            main.cached.change(KvEventKind.STORED, hashes[5:6])
            await until(caller, question(unique, hashes), [hit(m, 6, 1, 2), hit(p, 3)])
            main.cached.change(KvEventKind.REMOVED, hashes[4:7])
            await until(caller, question(unique, hashes), [hit(m, 4, 0, 2), hit(p, 3)])
        # Its beats have ended.
        await until(caller, question(unique, hashes), [hit(m, 4, 0, 2)])
        await asyncio.sleep(3.0)  # ... for longer than it is kept in the index.
        assert await redis.keys(f"*{main.space.key}*{p.instance}*") == []
        reborn = holder(p.instance, epoch="2")
        async with living(control_plane.nats_a, reborn, weights=unique) as prefill:
            prefill.cached.change(KvEventKind.STORED, hashes[:1])
            await until(caller, question(unique, hashes), [hit(m, 4, 0, 2), hit(p, 1)])
            # It restarts, so soon that no beat was missed, and with another block size.
            again = holder(p.instance, epoch="3")
            await prefill.close()
            async with living(control_plane.nats_a, again, weights=unique, block_size=8) as prefill:
                await until(caller, question(unique, hashes), [hit(m, 4, 0, 2)])
                prefill.cached.change(KvEventKind.STORED, hashes[:2])
                await until(caller, question(unique, hashes, block_size=8), [hit(p, 2)])
                await settled(redis, prefill, main)
                assert await redis.keys(f"*{main.space.key}*{p.instance}*") == []


@pytest.mark.parametrize("role", [Role.RELAY, Role.GATEWAY])
async def test_only_those_whose_kv_can_be_hit_are_listened_to(
    control_plane: ControlPlane, unique: str, role: Role
) -> None:
    """RelayDecode keeps nothing; what it says of blocks is never offered as a hit."""
    hashes = chain(2)
    p = holder(f"p-{unique}")
    async with (
        connect(control_plane.nats_a, "caller") as caller,
        caching(control_plane.nats_a, control_plane.valkey),
        living(control_plane.nats_a, holder(f"x-{unique}", role), weights=unique) as stranger,
        living(control_plane.nats_a, p, weights=unique) as prefill,
    ):
        for one in (stranger, prefill):
            one.cached.change(KvEventKind.STORED, hashes)
        await until(caller, question(unique, hashes), [hit(p, 2)])


async def test_changes_from_another_thread_arrive_by_themselves(control_plane: ControlPlane, unique: str) -> None:
    """Guards against changes that wait for the next beat, are taken out of order, or are told by snapshots alone.

    The writer is a thread, as an engine's is, and changes more at a time than one message takes.
    """
    async with (
        caching(control_plane.nats_a, control_plane.valkey),
        living(control_plane.nats_a, holder(f"p-{unique}"), weights=unique) as one,
        Redis(port=control_plane.valkey) as redis,
    ):
        await settled(redis, one)
        before = one.snapshots
        hashes = chain(30_000)

        def write() -> None:
            one.cached.change(KvEventKind.STORED, hashes)
            for number in range(1000):
                one.cached.change(KvEventKind.PINNED, hashes[number : number + 5])
                one.cached.change(KvEventKind.UNPINNED, hashes[number : number + 3])
                if number % 100 == 0:
                    one.cached.change(KvEventKind.REMOVED, hashes[20_000 + 20 * number :][:2000])

        thread = threading.Thread(target=write)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert await settled(redis, one) < 5.0
        assert one.snapshots == before
        for blocks in range(5):  # In quiet times a change is there at once.
            began = time.monotonic()
            one.cached.change(KvEventKind.PINNED, hashes[2000 + blocks : 2001 + blocks])
            await settled(redis, one)
            assert time.monotonic() - began < 0.5


async def test_a_big_cache_is_told_in_pages(control_plane: ControlPlane, unique: str) -> None:
    """Guards against a snapshot that does not fit into a message, and against changes lost while it is taken."""
    async with (
        living(control_plane.nats_b, holder(f"m-{unique}", Role.MAIN_DECODE), weights=unique) as one,
        Redis(port=control_plane.valkey) as redis,
    ):
        one.cached.change(KvEventKind.STORED, chain(100_000))
        one.cached.change(KvEventKind.PINNED, chain(30_000))
        one.cached.journal.take()  # As if it had happened long ago.
        async with caching(control_plane.nats_a, control_plane.valkey):
            await churn(one, for_s=2.0)
            await settled(redis, one)
            assert one.snapshots >= 1


async def test_a_gap_is_filled_by_a_snapshot(control_plane: ControlPlane, unique: str) -> None:
    """Guards against an index that goes on after a lost change as if nothing had happened."""
    me, hashes = holder(f"p-{unique}"), chain(10)
    async with (
        caching(control_plane.nats_a, control_plane.valkey),
        living(control_plane.nats_a, me, weights=unique) as one,
        Redis(port=control_plane.valkey) as redis,
    ):
        one.cached.change(KvEventKind.STORED, hashes)
        await settled(redis, one)
        before = one.snapshots
        one.cached.change(KvEventKind.REMOVED, hashes[9:])
        one.cached.journal.take()  # It is lost before the publisher has had its turn.
        one.cached.change(KvEventKind.STORED, chain(3, "later"))
        await settled(redis, one, within_s=2.5)  # Sooner than beats would have told.
        assert one.snapshots == before + 1


async def test_beats_tell_of_changes_that_do_not_come(control_plane: ControlPlane, unique: str) -> None:
    """Guards against an index that is out of date without knowing, as the way of the changes is silently blocked."""
    async with (
        caching(control_plane.nats_a, control_plane.valkey),
        living(control_plane.nats_a, holder(f"p-{unique}"), weights=unique, publish=False) as one,
        Redis(port=control_plane.valkey) as redis,
    ):
        await settled(redis, one)
        one.cached.change(KvEventKind.STORED, chain(10))
        took = await settled(redis, one)
        assert follower.BEHIND_S < took < follower.BEHIND_S + 4.0


async def test_an_overflowing_follower_takes_a_snapshot(
    control_plane: ControlPlane, own_valkey: OwnServer, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against memory that grows with changes which cannot be applied, while Redis hangs."""
    monkeypatch.setattr(follower, "_MOST_WAITING_HASHES", 200)
    async with (
        TcpProxy(own_valkey.port) as proxy,
        caching(control_plane.nats_a, proxy.port) as service,
        living(control_plane.nats_a, holder(f"p-{unique}"), weights=unique) as one,
        Redis(port=own_valkey.port) as redis,
    ):
        one.cached.change(KvEventKind.STORED, chain(10))
        await settled(redis, one)
        proxy.pause()
        before = one.snapshots
        for _ in range(10):
            await churn(one, for_s=0.3)
            for follows, _ in service._followers.values():
                assert sum(len(event.hashes) for told in follows._waiting for event in told.events) <= 200
        proxy.resume()
        await settled(redis, one)
        assert one.snapshots > before


async def test_a_restarted_cache_service_catches_up(control_plane: ControlPlane, unique: str) -> None:
    """Guards against changes that nobody has seen because there was no cache service."""
    async with (
        living(control_plane.nats_a, holder(f"p-{unique}"), weights=unique) as one,
        living(control_plane.nats_b, holder(f"m-{unique}", Role.MAIN_DECODE), weights=unique) as two,
        Redis(port=control_plane.valkey) as redis,
    ):
        for _ in range(3):
            async with caching(control_plane.nats_a, control_plane.valkey):
                await churn(one, two, for_s=0.5)
                await settled(redis, one, two)
            await churn(one, two, for_s=0.5)


async def test_two_cache_services_share_an_index(control_plane: ControlPlane, unique: str) -> None:
    """Guards against services that undo each other's work, or begin anew because of it.

    One of them is stopped for a while and lags behind: what it applies then is known already.
    """
    async with (
        living(control_plane.nats_a, holder(f"p-{unique}"), weights=unique) as one,
        caching(control_plane.nats_a, control_plane.valkey, instance="0"),
        TcpProxy(control_plane.valkey) as proxy,
        caching(control_plane.nats_a, proxy.port, instance="1"),
        Redis(port=control_plane.valkey) as redis,
    ):
        await churn(one, for_s=1.0)
        await settled(redis, one)
        before = one.snapshots
        for _ in range(3):
            proxy.pause()
            await churn(one, for_s=0.5)
            proxy.resume()
            await churn(one, for_s=0.5)
        await settled(redis, one)
        assert one.snapshots == before


async def test_a_slow_or_dead_redis_is_a_cold_view_and_forgotten_afterwards(
    control_plane: ControlPlane, own_valkey: OwnServer, unique: str
) -> None:
    """Guards against a request that waits for Redis or fails with it, and against an index that stays wrong later.

    Valkey keeps nothing on disk: after its restart the index is empty and is told anew.
    """
    p, prompt = holder(f"p-{unique}"), list(range(20))
    warm = PrefixHits({("a", Role.PREFILL, p.instance): 12}, {})

    async with (
        TcpProxy(own_valkey.port) as proxy,
        connect(control_plane.nats_a, "caller") as caller,
        caching(control_plane.nats_a, proxy.port) as service,
        living(control_plane.nats_a, p, weights=unique) as one,
        Redis(port=own_valkey.port) as redis,
    ):
        view = PrefixView(caller, "a", timeout_s=2 * LOOKUP_S)

        async def timed() -> PrefixHits:
            began = time.monotonic()
            hits = await view.hits(prompt, [one.beat()])
            assert time.monotonic() - began < 2 * LOOKUP_S + SLACK_S
            return hits

        async def until_warm() -> None:
            async with asyncio.timeout(10):
                while await timed() != warm:  # noqa: ASYNC110 (an index has no event to wait for)
                    await asyncio.sleep(0.05)

        one.cached.change(KvEventKind.STORED, block_hashes(prompt, 4)[:3])
        await until_warm()
        proxy.pause()
        for _ in range(5):
            assert await timed() == PrefixHits()
            assert view.reachable  # It is the index that is slow; the service answers.
        await churn(one, for_s=0.5)
        proxy.resume()
        await settled(redis, one)
        await asyncio.to_thread(own_valkey.stop)
        for _ in range(5):
            assert await timed() == PrefixHits()
        await churn(one, for_s=0.5)
        one.cached.change(KvEventKind.STORED, block_hashes(prompt, 4)[:3])
        await asyncio.to_thread(own_valkey.start)
        await settled(redis, one)
        await until_warm()
        await redis.flushall()
        await settled(redis, one)  # Without any change to notice it by.
        proxy.cut()
        await until_warm()
        await service.close()
    assert await PrefixView(caller, "a", timeout_s=LOOKUP_S).hits(prompt, [one.beat()]) == PrefixHits()


async def test_a_demoted_redis_is_left_for_its_successor(
    control_plane: ControlPlane, own_valkey: OwnServer, unique: str
) -> None:
    """Guards against pooled connections that stay with a server which refuses writes and knows only old things."""
    async with (
        TcpProxy(own_valkey.port) as proxy,
        connect(control_plane.nats_a, "caller") as caller,
        caching(control_plane.nats_a, proxy.port),
        living(control_plane.nats_a, holder(f"p-{unique}"), weights=unique) as one,
        Redis(port=own_valkey.port) as old,
        Redis(port=control_plane.valkey) as new,
    ):
        one.cached.change(KvEventKind.STORED, chain(5))
        await settled(old, one)
        proxy.target_port = control_plane.valkey  # The name stands for another server now; connections stay.
        await old.replicaof("127.0.0.1", 9)
        one.cached.change(KvEventKind.REMOVED, chain(5)[4:])
        assert await settled(new, one) < 5.0
        await until(caller, question(unique, chain(5)), [hit(one.me, 4)], within_s=5.0)


async def test_a_hundred_lookups_at_once_wait_no_longer_than_one(
    control_plane: ControlPlane, own_valkey: OwnServer, unique: str
) -> None:
    """Guards against requests that queue for connections to a Redis that hangs."""
    async with (
        TcpProxy(own_valkey.port) as proxy,
        connect(control_plane.nats_a, "caller") as caller,
        caching(control_plane.nats_a, proxy.port),
    ):
        proxy.pause()
        began = time.monotonic()
        asked = [ask(caller, question(unique, chain(1))) for _ in range(100)]
        assert await asyncio.gather(*asked) == [[]] * 100
        assert time.monotonic() - began < 20 * LOOKUP_S, "waits add up"


async def test_a_service_refuses_an_index_with_other_names(
    control_plane: ControlPlane, own_valkey: OwnServer, unique: str
) -> None:
    """Guards against two ways of naming blocks in one index; also if Redis can be asked only after the start."""
    settings = CacheSettings(redis_url=f"redis://127.0.0.1:{own_valkey.port}", nats_url=control_plane.nats_a)
    me = settings.peer(Role.CACHE)
    async with Redis(port=own_valkey.port) as redis:
        await redis.set("pdd:v1:golden", "something else")
        with pytest.raises(ConfigError, match="pdd:v1:golden"):
            async with asyncio.timeout(5):
                await serve(settings, me, asyncio.Event())
        async with TcpProxy(own_valkey.port) as proxy:
            proxy.pause()
            behind = settings.model_copy(update={"redis_url": f"redis://127.0.0.1:{proxy.port}"})
            serving = asyncio.create_task(serve(behind, me, asyncio.Event()))
            await asyncio.sleep(3.0)
            assert not serving.done()
            proxy.resume()
            with pytest.raises(ConfigError, match="pdd:v1:golden"):
                async with asyncio.timeout(10):
                    await serving


async def test_the_process_serves_until_it_is_stopped(control_plane: ControlPlane, unique: str) -> None:
    """Guards against parts that work and a process that does not put them together."""
    settings = CacheSettings(redis_url=f"redis://127.0.0.1:{control_plane.valkey}", nats_url=control_plane.nats_a)
    p, stop = holder(f"p-{unique}"), asyncio.Event()
    serving = asyncio.create_task(serve(settings, settings.peer(Role.CACHE), stop))
    async with (
        connect(control_plane.nats_a, "caller") as caller,
        living(control_plane.nats_a, p, weights=unique) as one,
        Redis(port=control_plane.valkey) as redis,
    ):
        one.cached.change(KvEventKind.STORED, chain(3))
        await settled(redis, one)
        await until(caller, question(unique, chain(5)), [hit(p, 3)])
        stop.set()
        async with asyncio.timeout(5):
            await serving


async def test_the_view_asks_once_for_each_block_size(control_plane: ControlPlane, unique: str) -> None:
    """Guards against hits counted in another instance's blocks, tenants that share a cache, and waiting for a hit that
    is still on its way as if it were there."""
    prompt = list(range(40))
    p, q, m = holder(f"p-{unique}"), holder(f"q-{unique}"), holder(f"m-{unique}", Role.MAIN_DECODE)
    async with (
        connect(control_plane.nats_a, "caller") as caller,
        caching(control_plane.nats_a, control_plane.valkey),
        living(control_plane.nats_a, p, weights=unique) as four,
        living(control_plane.nats_a, q, weights=unique, block_size=8) as eight,
        living(control_plane.nats_b, m, weights=unique) as main,
        Redis(port=control_plane.valkey) as redis,
    ):
        four.cached.change(KvEventKind.STORED, block_hashes(prompt, 4)[:7])
        eight.cached.change(KvEventKind.STORED, block_hashes(prompt, 8)[:2])
        eight.cached.change(KvEventKind.IN_FLIGHT, block_hashes(prompt, 8)[2:3])
        main.cached.change(KvEventKind.IN_FLIGHT, block_hashes(prompt, 4)[:5])
        main.cached.change(KvEventKind.STORED, block_hashes(prompt, 4, salt="tenant")[:1])
        await settled(redis, four, eight, main)
        view = PrefixView(caller, "a", timeout_s=2.0)
        beats = [one.beat() for one in (four, eight, main)]
        places = {one.me: (one.me.dc, one.me.role, one.me.instance) for one in (four, eight, main)}
        assert await view.hits(prompt, beats) == PrefixHits(
            {places[p]: 28, places[q]: 16}, {places[q]: 8, places[m]: 20}
        )
        assert await view.hits(prompt, beats[:1]) == PrefixHits({places[p]: 28}, {places[m]: 20})
        assert await view.hits(prompt, beats, salt="tenant") == PrefixHits({places[m]: 4}, {})
        assert await view.hits(prompt, []) == PrefixHits()


async def test_a_copy_that_is_stuck_is_built_anew(
    control_plane: ControlPlane, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a copy of another datacenter's events that never moves again: its original was deleted and counts
    from 1 again, while the copy waits for numbers that it has not seen, without any error."""
    monkeypatch.setattr(cache_service, "_REBUILD_INTERVAL_S", 1.0)
    async with (
        caching(control_plane.nats_a, control_plane.valkey),
        living(control_plane.nats_b, holder(f"m-{unique}", Role.MAIN_DECODE), weights=unique) as one,
        Redis(port=control_plane.valkey) as redis,
    ):
        await churn(one, for_s=1.0)
        await settled(redis, one)
        await EventLog(one.bus, "b", "b").rebuild()
        async with asyncio.timeout(60):
            while True:  # Until changes come by themselves.
                before = one.snapshots
                await churn(one, for_s=0.3)
                await settled(redis, one, within_s=20)
                if one.snapshots == before:
                    break


async def test_a_malformed_change_harms_nobody(control_plane: ControlPlane, unique: str) -> None:
    """Guards against one bad message that ends the reading of all."""
    me = holder(f"p-{unique}")
    async with (
        caching(control_plane.nats_a, control_plane.valkey),
        living(control_plane.nats_a, me, weights=unique) as one,
        Redis(port=control_plane.valkey) as redis,
    ):
        await settled(redis, one)
        log = EventLog(one.bus, "a", "a")
        await log.append(subjects.kv_events(me), {"peer": 5}, timeout_s=2.0)
        late = holder(me.instance, epoch="0")
        await log.append(
            subjects.kv_events(me), KvEvents(late, [KvEvent(1, KvEventKind.STORED, chain(3))]), timeout_s=2.0
        )
        one.cached.change(KvEventKind.STORED, chain(2))
        assert await settled(redis, one) < 2.0
        assert await indexed(redis, Space(one.space.fingerprint, one.space.block_size), late) is None


async def test_services_end_at_once_at_any_moment(control_plane: ControlPlane, unique: str) -> None:
    """Guards against tasks that outlive their service because a library has swallowed their cancellation."""
    draw, universe = random.Random(9), chain(300)
    async with living(control_plane.nats_a, holder(f"p-{unique}"), weights=unique) as one:
        one.cached.change(KvEventKind.STORED, chain(5000, "more"))
        for _ in range(15):
            async with caching(control_plane.nats_a, control_plane.valkey) as service:
                end = time.monotonic() + draw.uniform(0.1, 0.5)
                while time.monotonic() < end:
                    for _ in range(20):
                        one.cached.change_at_random(draw, universe)
                    await asyncio.sleep(0.002)
                async with asyncio.timeout(3.0):
                    await service.close()
