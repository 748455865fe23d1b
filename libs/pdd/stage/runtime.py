"""Builds what every stage is made of, in the order in which its parts depend on each other, and takes it down again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from pdd.config import StageSettings
from pdd.engine.engine import StepResult
from pdd.engine.loading import LoadedEngine, load_engine
from pdd.engine.thread import EngineThread, Pace
from pdd.errors import ConfigError, PddError
from pdd.mesh.bus import Bus, Endpoint, connect
from pdd.mesh.registry import Registry
from pdd.stage.host import StageHost
from pdd.stage.kv_events import KvEventPublisher
from pdd.stage.metrics import StageMetrics
from pdd.telemetry.metrics import process_registry, serve_metrics
from pdd.transfer.fabric import make_fabric_receiver
from pdd.transfer.interface import KvReceiver
from pdd.transfer.stream_receiver import StreamReceiver
from pdd.types import Peer, Role


def load(settings: StageSettings, *, prefix_cache: bool) -> LoadedEngine:
    """Load the engine that `settings` describe, with a prefix cache if stage and settings want one."""
    if settings.model == type(settings).model_fields["model"].default:
        raise ConfigError("PDD_MODEL: a GGUF file or a Hugging Face directory is needed")
    return load_engine(
        settings.model,
        dtype=settings.dtype,
        block_size=settings.block_size,
        pool_tokens=settings.pool_tokens,
        step_tokens=settings.step_tokens,
        seats=settings.max_running,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        prefix_cache=prefix_cache and settings.prefix_cache,
        kernels=settings.kernels,
    )


@asynccontextmanager
async def open_host(
    settings: StageSettings, me: Peer, loaded: LoadedEngine, fabric: str, *, stop: asyncio.Event | None = None
) -> AsyncGenerator[StageHost]:
    """A host with its NATS connection, metrics and engine thread, not yet started. A lost connection sets `stop`."""
    registry = process_registry(me)
    async with (
        serve_metrics(registry, settings.metrics_host, settings.metrics_port) as metrics_port,
        connect(settings.nats_url, f"{me.role}-{me.dc}-{me.instance}", lost=stop) as bus,
    ):
        pace = Pace(settings.pace_step_ms / 1e3, settings.pace_token_us / 1e6)
        engine = EngineThread(loaded.engine, threads=settings.threads, pace=pace)
        host = StageHost(
            me=me,
            bus=bus,
            loaded=loaded,
            engine=engine,
            registry=Registry(time.monotonic),
            fabric=fabric,
            metrics=StageMetrics(registry),
            metrics_port=metrics_port,
            lease_s=settings.lease_s,
            now=time.monotonic,
        )
        try:
            yield host
        finally:
            await host.close()
            await engine.stop()


@asynccontextmanager
async def open_receivers(
    settings: StageSettings, me: Peer, loaded: LoadedEngine
) -> AsyncGenerator[tuple[KvReceiver, KvReceiver]]:
    """Receivers of KV from the same datacenter and from another one: (fabric, wan)."""
    pool, identity = loaded.kv_pool, loaded.identity
    wan = StreamReceiver(
        pool, identity, me, host=settings.kv_host, port=settings.kv_port, advertise=settings.advertised
    )
    try:
        await wan.start()
    except OSError as error:
        raise ConfigError(f"PDD_KV_PORT: cannot listen on {settings.kv_host}:{settings.kv_port}: {error}") from None
    try:
        fabric = await make_fabric_receiver(settings.fabric, pool, identity, me, host=settings.kv_host, port=0)
        try:
            yield fabric, wan
        finally:
            await fabric.stop()
    finally:
        await wan.stop()


async def run_until(
    host: StageHost,
    endpoints: list[Endpoint],
    on_step: Callable[[StepResult], None],
    *,
    stop: asyncio.Event,
    fabric_lost: asyncio.Event,
) -> None:
    """Start everything, announce the stage, and run until `stop` is set.

    Raises `PddError` if the engine fails or the fabric is lost: better no stage than one that only looks alive.
    """
    host.engine.start(on_step)
    await _serve(host.bus, host, endpoints)
    stopped, lost = asyncio.create_task(stop.wait()), asyncio.create_task(fabric_lost.wait())
    try:
        await asyncio.wait({stopped, lost, host.engine.failed}, return_when=asyncio.FIRST_COMPLETED)
        if host.engine.failed.done():
            raise PddError(f"the engine failed: {host.engine.failed.exception()}")
        if lost.done():
            raise PddError("the KV fabric broke down")
    finally:
        stopped.cancel()
        lost.cancel()


async def _serve(bus: Bus, host: StageHost, endpoints: list[Endpoint]) -> None:
    """Serve first, beat then: whoever hears of the stage can already reach it."""
    cache = host.loaded.engine.cache
    if host.me.role is not Role.RELAY:
        publisher = KvEventPublisher(bus, host.me, cache.journal, cache.holdings)
        host.kv_seq = lambda: cache.journal.seq
        host.tasks.spawn(publisher.run(), "publish_kv_events")
        endpoints = [*endpoints, *publisher.endpoints()]
    await bus.serve(host.me, endpoints, {"fingerprint": host.loaded.identity.fingerprint})
    await host.start()
