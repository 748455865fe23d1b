"""Builds this stage's objects and connects them."""

from __future__ import annotations

import asyncio

from pdd.config import StageSettings
from pdd.stage import runtime
from pdd.types import Peer
from services.relay.service import RelayService


async def serve(settings: StageSettings, me: Peer, stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    loaded = runtime.load(settings, prefix_cache=False)
    async with (
        runtime.open_receivers(settings, me, loaded) as (fabric, wan),
        runtime.open_host(settings, me, loaded, "stream" if fabric.fences_itself else "nixl", stop=stop) as host,
    ):
        service = RelayService(host, fabric=fabric, wan=wan)
        await runtime.run_until(host, service.endpoints(), service.stage.on_step, stop=stop, fabric_lost=fabric.lost)
