"""From the stages' caches over KV events to look-ups: the index says what they hold, and routing reads it."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from pdd.kv import KvNamespace
from pdd.mesh.bus import connect
from pdd.mesh.registry import Registry
from pdd.prefix.hashing import block_hashes
from pdd.prefix.index import PrefixIndex, Space
from pdd.types import Peer, Role
from services.cache.service import CacheService, Limits
from tests.integration.conftest import ControlPlane
from tests.integration.stages import ALWAYS_RELAY_S, Oracle, Stage, Stages, open_stages


@asynccontextmanager
async def open_index(control_plane: ControlPlane) -> AsyncGenerator[PrefixIndex]:
    """A cache service for the stages' datacenter, and its index."""
    me = Peer("a", Role.CACHE, secrets.token_hex(4), secrets.token_hex(4))
    async with Redis(port=control_plane.valkey) as redis, connect(control_plane.nats_a, "cache") as bus:
        index = PrefixIndex(redis)
        limits = Limits(lookup_s=1.0, write_s=1.0)
        service = CacheService(bus, me, index, index, Registry(time.monotonic), limits, now=time.monotonic)
        await service.start()
        try:
            yield index
        finally:
            await service.close()


async def held(index: PrefixIndex, stage: Stage, tokens: list[int], salt: str) -> int:
    """Leading tokens of a prompt that the index says this stage has stored."""
    spec = stage.host.loaded.kv_pool.spec
    space = Space(stage.host.loaded.identity.fingerprint, spec.block_size)
    for one in await index.lookup(space, block_hashes(tokens, spec.block_size, salt=salt)):
        if one.peer == stage.me:
            return one.stored * spec.block_size
    return 0


async def equal(index: PrefixIndex, stages: Stages, asked: list[tuple[list[int], str]], within_s: float = 10.0) -> None:
    """Wait until the index says of every prompt what the caches of P and MD hold of it."""
    deadline = time.monotonic() + within_s
    while True:
        differ = [
            (stage.me.role, salt, said, cached)
            for stage in (stages.prefill, stages.main)
            for tokens, salt in asked
            if (said := await held(index, stage, tokens, salt))
            != (cached := stage.host.loaded.engine.cache.peek(KvNamespace(salt), tokens))
        ]
        if not differ:
            return
        assert time.monotonic() < deadline, differ
        await asyncio.sleep(0.05)


async def test_the_index_follows_caches_under_eviction(control_plane: ControlPlane, tiny_model: Path) -> None:
    """Pools that hold a few prompts only, tenants, shared beginnings, clients that leave: blocks come and go."""
    oracle, generator = Oracle(tiny_model), random.Random(5)
    async with (
        open_index(control_plane) as index,
        open_stages(control_plane, tiny_model, pool_tokens=512, budget_s=ALWAYS_RELAY_S) as stages,
    ):
        asked: list[tuple[list[int], str]] = []
        for _ in range(6):
            requests = []
            for _ in range(4):
                shared = generator.choice(asked)[0][:64] if asked and generator.random() < 0.6 else []
                request = oracle.request(generator.randrange(1, 9), prompt_tokens=generator.randrange(20, 90))
                salt = generator.choice(("", "tenant"))
                requests.append(msgspec.structs.replace(request, prompt=[*shared, *request.prompt], salt=salt))
                asked.append((requests[-1].prompt, salt))
            running = [asyncio.create_task(stages.complete(request)) for request in requests]
            await asyncio.sleep(generator.uniform(0.0, 0.1))
            running[0].cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await stages.settle()
            await equal(index, stages, asked)
        assert any([await held(index, stages.main, *one) for one in asked])


async def test_a_conversation_finds_its_kv_by_the_index(control_plane: ControlPlane, tiny_model: Path) -> None:
    """The gateway knows before it asks: the look-up gives the hit that the reservation confirms."""
    oracle = Oracle(tiny_model)
    async with open_index(control_plane) as index, open_stages(control_plane, tiny_model) as stages:
        request = oracle.request(20, prompt_tokens=100)
        ids, _ = await stages.complete(request)
        await stages.settle()
        tokens = [*request.prompt, *ids]
        await equal(index, stages, [(tokens, "")])
        holders = [*stages.gateway.registry.live(Role.PREFILL), *stages.gateway.registry.live(Role.MAIN_DECODE)]
        hits = await stages.gateway.prefixes.hits(tokens, holders)
        again = msgspec.structs.replace(oracle.request(3), prompt=tokens)
        _, live = await stages.complete(again)
        assert hits.stored[("b", Role.MAIN_DECODE, stages.main.me.instance)] == live.report.main_hit_tokens == 112
        assert hits.stored[("a", Role.PREFILL, stages.prefill.me.instance)] == live.report.prefill_hit_tokens == 96
