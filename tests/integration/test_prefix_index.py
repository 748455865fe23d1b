"""The index over real Valkey: it counts as a naive reader would, and holds what instances hold, whatever comes when."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from pdd.errors import ConfigError
from pdd.mesh.messages import KvEvent, SnapshotPage
from pdd.prefix.index import Held, PrefixIndex, Space
from pdd.prefix.journal import Holdings
from pdd.types import KvEventKind, Peer, Role
from tests.integration.conftest import ControlPlane, OwnServer
from tests.integration.holders import Cached, holder, indexed
from tests.unit.transfer.proxy import TcpProxy


def chain(blocks: int, seed: object = 0) -> list[bytes]:
    """Stands for a prompt's block hashes."""
    draw = random.Random(f"{seed}")
    return [draw.randbytes(16) for _ in range(blocks)]


def space(unique: str, block_size: int = 16) -> Space:
    return Space(unique, block_size)


async def replace(index: PrefixIndex, where: Space, peer: Peer, held: Holdings) -> None:
    """Put a snapshot of one page in place."""
    replacement = index.replacement(where, peer)
    await replacement.add(SnapshotPage(peer, held.seq, 0, 1, [*held.stored], [*held.pinned], [*held.in_flight]))
    await replacement.commit(held.seq)


def taken(cached: Cached) -> list[KvEvent]:
    """What a publisher would send now."""
    return [KvEvent(one.seq, one.kind, list(one.hashes)) for one in cached.journal.take()]


@given(
    asked=st.integers(0, 70),
    held=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=6),
    role=st.sampled_from([Role.PREFILL, Role.MAIN_DECODE]),
)
@settings(max_examples=60, deadline=None)
async def test_a_lookup_equals_a_naive_count(
    control_plane: ControlPlane, asked: int, held: list[tuple[int, int, int]], role: Role
) -> None:
    """Guards against off-by-one in the search. Instances hold, pin and await prefixes of one chain, and other blocks.

    `held` is how many leading blocks each stores, pins, and awaits after those that it stores.
    """
    where = space(secrets.token_hex(4))
    hashes = chain(130)
    expected = []
    async with Redis(port=control_plane.valkey) as redis:
        index = PrefixIndex(redis)
        for number, (blocks, pinned, coming) in enumerate(held):
            peer, cached = holder(f"i{number}", role), Cached()
            cached.change(
                KvEventKind.STORED, random.sample([*hashes[:blocks], *chain(number, "elsewhere")], blocks + number)
            )
            cached.change(KvEventKind.PINNED, hashes[: min(pinned, blocks)])
            cached.change(KvEventKind.IN_FLIGHT, hashes[blocks : blocks + coming])
            await replace(index, where, peer, Holdings(0, frozenset(), frozenset(), frozenset()))
            assert await index.apply(where, peer, taken(cached))
            now = cached.holdings()
            stored = naive(hashes[:asked], now.stored)
            in_flight = naive(hashes[stored:asked], now.in_flight)
            if stored + in_flight:
                expected.append(Held(peer, stored, in_flight, min(stored, naive(hashes[:asked], now.pinned))))
        found = await index.lookup(where, hashes[:asked])
        assert sorted(found, key=lambda one: one.peer.instance) == expected
        assert await index.lookup(Space(where.fingerprint, 8), hashes[:asked]) == []  # blocks of another size
        assert await index.lookup(space(f"other than {where.fingerprint}"), hashes[:asked]) == []


def naive(hashes: list[bytes], held: frozenset[bytes]) -> int:
    """Leading blocks, one by one."""
    return next((number for number, one in enumerate(hashes) if one not in held), len(hashes))


@given(seed=st.integers(0, 2**32), changes=st.integers(0, 60))
@settings(max_examples=40, deadline=None)
async def test_the_index_equals_the_holdings_after_any_history(
    control_plane: ControlPlane, seed: int, changes: int
) -> None:
    """Guards against changes that are lost, applied twice, or undone by a snapshot or by a second, slower writer.

    Two writers apply the same changes, each at its own pace and in messages of its own cut; snapshots begin at random
    moments and their pages are taken while changes go on.
    """
    draw = random.Random(seed)
    where, peer, cached = space(secrets.token_hex(4)), holder("one"), Cached()
    universe = chain(40)
    history: list[KvEvent] = []
    async with Redis(port=control_plane.valkey) as redis:
        writers = [PrefixIndex(redis), PrefixIndex(redis)]
        position = [0, 0]

        def live() -> None:
            for _ in range(draw.randint(0, 3)):
                cached.change_at_random(draw, universe)
            history.extend(taken(cached))

        async def snapshot(index: PrefixIndex) -> None:
            """Pages taken one after the other, with life going on between them."""
            replacement = index.replacement(where, peer)
            seq = cached.holdings().seq
            for page in range(3):
                held = cached.holdings()
                columns = [
                    [one for one in part if one[0] % 3 == page] for part in (held.stored, held.pinned, held.in_flight)
                ]
                await replacement.add(SnapshotPage(peer, held.seq, page, 3, *columns))
                live()
            await replacement.commit(seq)

        for _ in range(changes):
            live()
            writer = draw.randrange(2)
            end = draw.randint(position[writer], len(history))
            some = history[position[writer] : end]
            if draw.random() < 0.1 and some:
                some = some[1:]  # Lost on the way.
            while not await writers[writer].apply(where, peer, some):
                await snapshot(writers[writer])
            position[writer] = end
        for writer in draw.sample(range(2), 2):
            while not await writers[writer].apply(where, peer, history[position[writer] :]):
                await snapshot(writers[writer])
            history.extend(taken(cached))
        assert await writers[0].apply(where, peer, history) or not history
        if history:
            assert await indexed(redis, where, peer) == cached.holdings()


async def test_what_does_not_follow_changes_nothing(control_plane: ControlPlane, unique: str) -> None:
    """Guards against late words of a dead epoch, holes in the numbers and repetitions."""
    where, one = space(unique), holder("one")
    hashes = chain(6)

    def stored(seq: int, some: list[bytes]) -> list[KvEvent]:
        return [KvEvent(seq, KvEventKind.STORED, some)]

    async with Redis(port=control_plane.valkey) as redis:
        index = PrefixIndex(redis)
        assert not await index.apply(where, one, stored(1, hashes))  # nobody knows it
        await replace(index, where, one, Holdings(3, frozenset(hashes[:2]), frozenset(), frozenset()))
        before = await indexed(redis, where, one)
        assert not await index.apply(where, one, stored(5, hashes))  # the fourth is missing
        assert not await index.apply(where, holder("one", epoch="0"), stored(4, hashes))  # of a predecessor
        assert await index.apply(where, one, [KvEvent(2, KvEventKind.REMOVED, hashes)])  # known long ago
        assert await indexed(redis, where, one) == before
        assert await index.touch(where, holder("one", epoch="0")) is None
        await index.forget(where, holder("one", epoch="0"))
        await replace(index, where, one, Holdings(2, frozenset(), frozenset(), frozenset()))  # older than what is there
        assert await indexed(redis, where, one) == before
        assert await index.apply(where, one, stored(4, hashes[2:3]))
        assert [held.stored for held in await index.lookup(where, hashes)] == [3]
        assert await index.touch(where, one) == 4


async def test_a_new_epoch_replaces_all_of_its_predecessor(control_plane: ControlPlane, unique: str) -> None:
    """Guards against hits on memory that died with the old process."""
    where, hashes = space(unique), chain(6)
    async with Redis(port=control_plane.valkey) as redis:
        index = PrefixIndex(redis)
        everything = Holdings(9, frozenset(hashes), frozenset(hashes[:3]), frozenset(chain(2, "more")))
        await replace(index, where, holder("one"), everything)
        reborn = holder("one", epoch="2")
        await replace(index, where, reborn, Holdings(0, frozenset(), frozenset(), frozenset()))
        assert await index.lookup(where, hashes) == []
        assert await indexed(redis, where, reborn) == Holdings(0, frozenset(), frozenset(), frozenset())
        await index.forget(where, holder("one"))  # Comes late.
        assert await index.touch(where, reborn) == 0


async def test_nothing_is_left_of_who_is_forgotten(control_plane: ControlPlane, unique: str) -> None:
    """Guards against keys that nobody will ever remove."""
    hashes = chain(6)
    held = Holdings(1, frozenset(hashes), frozenset(hashes[:3]), frozenset(chain(2, "more")))
    async with Redis(port=control_plane.valkey) as redis:
        index = PrefixIndex(redis)
        for name, where in (("one", space(unique)), ("two", space(unique)), ("three", space(unique, 32))):
            await replace(index, where, holder(name), held)
        await index.forget(space(unique), holder("one"))
        assert [found.peer.instance for found in await index.lookup(space(unique), hashes)] == ["two"]
        await index.sweep(30)
        assert [found.peer.instance for found in await index.lookup(space(unique), hashes)] == ["two"]
        await index.sweep(0)
        assert await redis.keys(f"*{unique}*") == []
        assert not [key for key in await redis.smembers("pdd:v1:spaces") if unique.encode() in key]


async def test_what_is_in_flight_for_too_long_is_not_waited_for(control_plane: ControlPlane, unique: str) -> None:
    """Guards against waiting for ever for blocks whose transfer died without a word."""
    where, one, hashes = space(unique), holder("one"), chain(6)
    async with Redis(port=control_plane.valkey) as redis:
        index = PrefixIndex(redis, in_flight_s=1)
        await replace(index, where, one, Holdings(1, frozenset(hashes[:2]), frozenset(), frozenset(hashes[2:4])))
        assert await index.apply(where, one, [KvEvent(2, KvEventKind.IN_FLIGHT, hashes[4:])])
        assert await index.lookup(where, hashes) == [Held(one, 2, 4, 0)]
        await asyncio.sleep(2.1)
        assert await index.lookup(where, hashes) == [Held(one, 2, 0, 0)]
        await index.touch(where, one)
        assert await indexed(redis, where, one) == Holdings(2, frozenset(hashes[:2]), frozenset(), frozenset())


async def test_blocks_that_redis_has_evicted_are_noticed(own_valkey: OwnServer, unique: str) -> None:
    """Guards against an index that lost a set, to a memory limit, and takes what is left of it for the truth."""
    where, one, hashes = space(unique), holder("one"), chain(6)
    async with Redis(port=own_valkey.port) as redis:
        index = PrefixIndex(redis)
        await replace(index, where, one, Holdings(1, frozenset(hashes), frozenset(), frozenset()))
        await redis.delete(f"{where.key}:a/prefill/one:stored")
        assert await index.touch(where, one) is None
        assert not await index.apply(where, one, [KvEvent(2, KvEventKind.STORED, hashes[:1])])
        await replace(index, where, one, Holdings(1, frozenset(hashes), frozenset(), frozenset()))
        assert [held.stored for held in await index.lookup(where, hashes)] == [6]


async def test_an_index_with_other_names_is_refused(own_valkey: OwnServer) -> None:
    """Guards against two versions that name blocks differently and share an index, in which nobody ever hits."""
    async with Redis(port=own_valkey.port) as redis:
        await PrefixIndex(redis).verify()
        await PrefixIndex(redis).verify()
        await redis.set("pdd:v1:golden", "something else")
        with pytest.raises(ConfigError, match="names blocks in another way"):
            await PrefixIndex(redis).verify()


async def test_cancelled_calls_never_get_each_others_replies(control_plane: ControlPlane, unique: str) -> None:
    """Guards against a reply left on a pooled connection, which would answer the next question: another prompt's hits.

    Look-ups and pipelines of changes are cancelled at random moments. No connection may be lost to that either.
    """
    draw = random.Random(3)
    spaces = [space(f"{unique}-{number}") for number in range(40)]
    peers = [holder(f"of-{number}") for number in range(40)]
    hashes = chain(7)
    answered = cancelled = 0
    async with TcpProxy(control_plane.valkey) as proxy:
        async with Redis(port=control_plane.valkey) as redis:
            for number, (where, peer) in enumerate(zip(spaces, peers, strict=True)):
                held = Holdings(1, frozenset(hashes[: 1 + number % 7]), frozenset(), frozenset())
                await replace(PrefixIndex(redis), where, peer, held)
        async with Redis(port=proxy.port, max_connections=8) as redis:
            index = PrefixIndex(redis)
            await index.lookup(spaces[0], hashes)
            proxy.bytes_per_s = 200_000  # A request of some 300 bytes takes 1.5 ms.

            async def call(number: int, *, change: bool) -> list[Held]:
                if change:  # One that is known already.
                    again = [KvEvent(1, KvEventKind.REMOVED, hashes)] * 2
                    assert await index.apply(spaces[number], peers[number], again)
                    assert await index.touch(spaces[number], peers[number]) == 1
                return await index.lookup(spaces[number], hashes)

            async def client(share: range) -> None:
                nonlocal answered, cancelled
                for turn in share:
                    number = draw.randrange(len(spaces))
                    asked = asyncio.create_task(call(number, change=turn % 3 == 0))
                    _, pending = await asyncio.wait({asked}, timeout=draw.uniform(0, 0.02))
                    if pending:
                        asked.cancel()
                    try:
                        assert await asked == [Held(peers[number], 1 + number % 7, 0, 0)]
                        answered += 1
                    except asyncio.CancelledError:
                        cancelled += 1

            await asyncio.gather(*(client(range(part, 2000, 8)) for part in range(8)))
            proxy.bytes_per_s = None
            everybody = [index.lookup(where, hashes) for where in spaces[:8]]
            assert [len(found) for found in await asyncio.gather(*everybody)] == [1] * 8
            await index.sweep(0)
    assert answered + cancelled == 2000
    assert min(answered, cancelled) > 100, "the delays did not mix answers and cancels"
