"""Builds Prefill's objects and connects them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from pdd.config import StageSettings
from pdd.engine.loading import LoadedEngine
from pdd.stage import runtime
from pdd.transfer.fabric import Senders, make_fabric_sender
from pdd.transfer.stream_sender import StreamSender
from pdd.types import Peer
from services.prefill.line import LineMeter
from services.prefill.service import Admission, LinePrior, PrefillService


async def serve(settings: StageSettings, me: Peer, stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    loaded = runtime.load(settings, prefix_cache=True)
    prior = LinePrior(
        goodput_bytes_per_s=settings.line_mbps * 1e6 / 8,
        delay_s=settings.line_delay_ms / 1e3,
        budget_s=settings.exposed_wait_budget_ms / 1e3,
    )
    async with _open_senders(settings, me, loaded) as senders:
        fabric = "stream" if senders.nixl is None else "nixl"
        async with runtime.open_host(settings, me, loaded, fabric, stop=stop) as host:
            admission = Admission(settings.max_waiting, settings.held_for_wan_share)
            service = PrefillService(host, senders, LineMeter(senders.stream, me.dc), prior, admission)
            await runtime.run_until(host, service.endpoints(), service.on_step, stop=stop, fabric_lost=senders.lost)


@asynccontextmanager
async def _open_senders(settings: StageSettings, me: Peer, loaded: LoadedEngine) -> AsyncGenerator[Senders]:
    pool, identity = loaded.kv_pool, loaded.identity
    stream = StreamSender(
        pool, identity, me, connections=settings.kv_connections, window_bytes=settings.kv_window_bytes
    )
    senders = await make_fabric_sender(settings.fabric, pool, identity, me, stream=stream)
    try:
        yield senders
    finally:
        await senders.stop()
