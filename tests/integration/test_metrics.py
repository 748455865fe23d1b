"""Metrics as Prometheus gets them: over HTTP, of running processes' parts, at the address that they name."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from pdd.config import CacheSettings, StageSettings
from pdd.engine.sequence import SequenceSpec
from pdd.errors import CapacityError, ConfigError, UnreachableError
from pdd.local.scrape import Samples, scrape
from pdd.mesh import subjects
from pdd.mesh.bus import Endpoint, connect
from pdd.mesh.messages import Beat, Lookup, LookupReply, Submit, Submitted, TokenBatch
from pdd.mesh.registry import Registry
from pdd.prefix.hashing import block_hashes
from pdd.stage import runtime
from pdd.telemetry.metrics import serve_metrics
from pdd.types import AttemptKey, Peer, Pipeline, Role, Sampling, StopRule, TokenEvent
from services.cache import wiring as cache
from services.gateway.coordinator import Coordinator, Limits
from services.gateway.generation import GenerationRequest
from services.gateway.mesh_metrics import MeshCollector
from services.gateway.prefix_view import PrefixView
from services.gateway.router import Router, RoutingPolicy
from tests.integration.conftest import ControlPlane
from tests.unit.mesh.beats import beat

DEADLINE_S = 10.0


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 (nothing announces what is waited for)
            await asyncio.sleep(0.02)


async def scraped(port: int) -> Samples:
    samples = await asyncio.to_thread(scrape, f"http://127.0.0.1:{port}/metrics")
    assert samples is not None
    return samples


async def test_a_registry_is_served_until_the_end() -> None:
    registry = CollectorRegistry()
    Counter("pdd_answers", "Answers.", registry=registry).inc(3)
    async with serve_metrics(registry, "127.0.0.1", 0) as port, httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "pdd_answers_total 3.0" in answer.text
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^PDD_METRICS_PORT: cannot listen on 127.0.0.1:{port}: "):
            async with serve_metrics(CollectorRegistry(), "127.0.0.1", port):
                pass


async def test_a_stage_is_scraped_where_its_beat_says(
    control_plane: ControlPlane, tiny_model: Path, unique: str
) -> None:
    settings = StageSettings(
        instance=unique,
        nats_url=control_plane.nats_a,
        model=tiny_model,
        dtype="float32",
        block_size=4,
        pool_tokens=256,
        step_tokens=16,
        max_running=4,
    )
    me = settings.peer(Role.PREFILL)
    beats: list[Beat] = []
    async with (
        connect(control_plane.nats_a, "listener") as listener,
        runtime.open_host(settings, me, runtime.load(settings, prefix_cache=False), "stream") as host,
    ):
        await listener.subscribe(subjects.beat(me), Beat, beats.append)
        host.engine.start(host.measure)
        await host.start()
        spec = SequenceSpec(AttemptKey("a" * 32, 1), list(range(3, 43)), [], Sampling(), StopRule(max_tokens=3))
        await host.engine.call(lambda engine: engine.add(spec))
        host.metrics.hit(40, 8)
        host.metrics.transfer("wan", "sent", 5000, 0.5)
        await until(lambda: bool(beats) and beats[-1].load.output_tokens == 3 and beats[-1].load.batch_sequences > 0)

        load = beats[-1].load
        assert (load.prompt_tokens_seen, load.hit_tokens, load.wan_bytes, load.fabric_bytes) == (40, 8, 5000, 0)
        assert load.batch_sequences == 1
        samples = await scraped(beats[-1].metrics_port)
        assert samples.total("pdd_process_info", role="prefill", dc="a", name=unique) == 1
        assert samples.total("pdd_stage_step_sequences_count") == load.steps == samples.total("pdd_stage_steps_total")
        assert samples.by("pdd_stage_scheduled_tokens_total", "kind") == {"prefill": 40, "decode": 2}
        assert samples.total("pdd_stage_prompt_tokens_total") == 40
        assert samples.total("pdd_stage_output_tokens_total") == 3
        assert sum(samples.by("pdd_stage_kv_blocks", "state").values()) == load.total_blocks
        assert samples.by("pdd_stage_kv_blocks", "state")["used"] == 11, "blocks for 42 tokens, 4 in each"


async def test_the_cache_is_scraped_at_its_fixed_port(
    control_plane: ControlPlane, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # A datacenter of its own: look-ups go to any cache of the asker's.
    settings = CacheSettings(
        dc=unique,
        nats_url=control_plane.nats_a,
        redis_url=f"redis://127.0.0.1:{control_plane.valkey}/0",
        redis_timeout_ms=2000,
        metrics_port=port,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(cache.serve(settings, settings.peer(Role.CACHE), stop))
    try:
        async with connect(control_plane.nats_a, "asker") as bus:

            async def ask(hashes: list[bytes]) -> LookupReply:
                return await bus.request(subjects.cache_lookup(unique), Lookup(unique, 4, hashes), LookupReply)

            async with asyncio.timeout(DEADLINE_S):
                while True:
                    try:
                        assert (await ask([])).hits == []
                        break
                    except UnreachableError:
                        await asyncio.sleep(0.05)
            assert (await ask(block_hashes(list(range(64)), 4))).hits == []
        samples = await scraped(port)
        assert samples.by("pdd_cache_lookups_total", "outcome") == {"miss": 1}, "asking for nothing is no look-up"
        assert samples.total("pdd_cache_lookup_seconds_count") == 1
    finally:
        stop.set()
        await running


async def test_a_gateway_shows_who_waits_and_what_it_dropped(control_plane: ControlPlane, unique: str) -> None:
    """Prefill is alive and has no room: the request waits. A token of nobody's attempt is dropped."""
    full = Peer("a", Role.PREFILL, unique, "e")
    me = Peer("a", Role.GATEWAY, unique, "e")
    stranger = TokenEvent(AttemptKey("f" * 32, 1), 0, 5, 7, 0)

    async def no_room(_: Submit) -> Submitted:
        raise CapacityError("full")

    async with connect(control_plane.nats_a, "gateway") as bus, connect(control_plane.nats_a, "prefill") as prefill:
        registry = Registry(time.monotonic)
        coordinator = Coordinator(
            me=me,
            bus=bus,
            registry=registry,
            router=Router(registry, RoutingPolicy(1e8, 0.005, 0.3)),
            prefixes=PrefixView(bus, unique, 0.05),
            limits=Limits(10.0, 8, 10.0, 0.1, 1, 64),
            now=time.monotonic,
        )
        shown = CollectorRegistry()
        shown.register(MeshCollector(coordinator))

        def now() -> Samples:
            return Samples(generate_latest(shown).decode())

        await prefill.serve(full, [Endpoint("submit", subjects.endpoint(full, "submit"), Submit, no_room)], {})
        await coordinator.start()
        try:
            registry.hear(beat(full))
            assert now().total("pdd_gateway_requests_waiting") == 0
            request = GenerationRequest("b" * 32, [1, 2], Sampling(), StopRule(max_tokens=1), Pipeline.PDD)
            async with coordinator.generate(request):
                await until(lambda: now().total("pdd_gateway_requests_waiting") == 1)
            assert now().total("pdd_gateway_requests_waiting") == 0
            await prefill.publish(subjects.tokens(me), TokenBatch(full, [stranger]))
            await until(lambda: now().total("pdd_gateway_stale_messages_total") == 1)
            assert now().total("pdd_gateway_live_instances", role="prefill") == 1
            assert now().total("pdd_gateway_live_instances", role="main_decode") == 0
            assert now().total("pdd_gateway_cache_up") == 0
        finally:
            await coordinator.close()
