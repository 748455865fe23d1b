"""Builds the gateway's objects and connects them."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import msgspec
import uvicorn

from pdd.config import GatewaySettings
from pdd.errors import ConfigError
from pdd.mesh.bus import connect
from pdd.mesh.registry import Registry
from pdd.model.tokenizer import load_tokenizer
from pdd.telemetry.metrics import process_registry
from pdd.types import Peer, Role
from services.gateway.api.app import create_app
from services.gateway.coordinator import Coordinator, Limits
from services.gateway.mesh_metrics import MeshCollector
from services.gateway.payload import require_prompts_fit
from services.gateway.prefix_view import PrefixView
from services.gateway.router import Router, RoutingPolicy

_GRACE_S = 5
_BACKLOG = 2048


async def serve(settings: GatewaySettings, me: Peer, stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    if settings.model == type(settings).model_fields["model"].default:
        raise ConfigError("PDD_MODEL: a GGUF file or a Hugging Face directory is needed")
    listener = _listen(settings.host, settings.port)
    tokenizer = load_tokenizer(settings.model)
    max_model_len = settings.max_model_len or tokenizer.context_length
    registry = Registry(time.monotonic)
    policy = RoutingPolicy(
        goodput_bytes_per_s=settings.line_mbps * 1e6 / 8,
        delay_s=settings.line_delay_ms / 1e3,
        budget_s=settings.exposed_wait_budget_ms / 1e3,
    )
    limits = Limits(
        queue_timeout_s=settings.queue_timeout_s,
        max_waiting=settings.max_waiting,
        stall_timeout_s=settings.stall_timeout_s,
        replay_after_s=max(4 * settings.line_delay_ms / 1e3, 0.1),
        max_attempts=settings.max_attempts,
        relay_max_tokens=settings.relay_max_tokens,
    )
    async with connect(settings.nats_url, f"gateway-{me.dc}-{me.instance}", lost=stop) as bus:
        require_prompts_fit(bus.max_payload, max_model_len, tokenizer.vocab_size)
        prefixes = PrefixView(bus, me.dc, settings.cache_timeout_ms / 1e3)
        coordinator = Coordinator(
            me=me,
            bus=bus,
            registry=registry,
            router=Router(registry, policy),
            prefixes=prefixes,
            limits=limits,
            now=time.monotonic,
        )
        metrics = process_registry(me)
        metrics.register(MeshCollector(coordinator))
        app = create_app(
            coordinator,
            tokenizer,
            model_name=settings.model_name or settings.model.stem,
            created=int(settings.model.stat().st_mtime),
            max_model_len=max_model_len,
            default_max_tokens=settings.default_max_tokens,
            default_pipeline=settings.pipeline,
            max_body_bytes=settings.max_body_bytes,
            mesh=lambda: _describe(registry, prefixes),
            ready=lambda: all(registry.live(role) for role in (Role.PREFILL, Role.MAIN_DECODE)),
            registry=metrics,
        )
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="on",
                loop="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        await coordinator.start()
        try:
            await _serve_http(server, listener, stop)
        finally:
            await coordinator.close()


async def _serve_http(server: uvicorn.Server, listener: socket.socket, stop: asyncio.Event) -> None:
    """`server.serve` would take the process' signals for itself; its parts do not."""
    serving = asyncio.create_task(server._serve([listener]))  # pyright: ignore[reportPrivateUsage]
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopped.cancel()
    await serving


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"PDD_PORT: cannot listen on {host}:{port}: {error.strerror or error}") from None


def _describe(registry: Registry, prefixes: PrefixView) -> dict[str, Any]:
    """Live instances as JSON, for `GET /mesh` and `pdd status`."""
    instances = [
        {
            "dc": beat.peer.dc,
            "role": beat.peer.role,
            "instance": beat.peer.instance,
            "epoch": beat.peer.epoch,
            "pid": beat.pid,
            "fabric": beat.fabric,
            "dtype": beat.spec.dtype,
            "max_model_len": beat.max_model_len,
            "metrics_port": beat.metrics_port,
            "load": msgspec.to_builtins(beat.load),
        }
        for beat in registry.live()
    ]
    return {"instances": instances, "cache": "up" if prefixes.reachable else "down"}
