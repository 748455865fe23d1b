"""Prometheus' metrics of one process: its registry, and an HTTP server for a process that is none itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Info, ProcessCollector, start_http_server

from pdd.errors import ConfigError
from pdd.types import Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120)
"""Buckets of what takes milliseconds to minutes."""

TOKENS = (0, 16, 64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
"""Buckets of a number of tokens."""

BYTES = (0, *(1 << exponent for exponent in range(16, 37, 2)))
"""Buckets of a size: nothing, and 64 KiB to 64 GiB."""

RATIO = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Buckets of a share."""

_OTHER = "other"


class BoundedLabel:
    """Keeps the values of one label few: the first `limit` stand for themselves, all later ones are `other`."""

    def __init__(self, limit: int = 32) -> None:
        self._limit = limit
        self._values: set[str] = set()

    def __call__(self, value: str) -> str:
        """The label value to use for `value`."""
        if len(self._values) < self._limit:
            self._values.add(value)
        return value if value in self._values else _OTHER


def process_registry(me: Peer) -> CollectorRegistry:
    """A registry that knows who the process is (`pdd_process_info`) and what it takes of the machine (`process_*`)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    about = Info("pdd_process", "Who this process is.", registry=registry)
    about.info({"dc": me.dc, "role": me.role.value, "name": me.instance})
    return registry


@asynccontextmanager
async def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> AsyncGenerator[int]:
    """Answer scrapes of `registry` on a thread of its own; yields the port, chosen freely if `port` is 0.

    Collectors are called on that thread. Raises `ConfigError` if the address cannot be had.
    """
    try:
        # In a thread: the server asks for the host's full name, and a resolver may take its time.
        server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
    except OSError as error:
        raise ConfigError(f"PDD_METRICS_PORT: cannot listen on {host}:{port}: {error.strerror or error}") from None
    logger.info("metrics_served", host=host, port=server.server_port)
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(_stop, server, thread)


def _stop(server: WSGIServer, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join()
