"""What every process of the mesh does around its own work: settings, logs, spans, signals, exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import uvloop

from pdd.config import ProcessSettings, load
from pdd.errors import ConfigError, PddError
from pdd.telemetry import export, logs
from pdd.types import Peer, Role

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SettingsT = TypeVar("SettingsT", bound=ProcessSettings)


def run(kind: type[SettingsT], role: Role, serve: Callable[[SettingsT, Peer, asyncio.Event], Awaitable[None]]) -> None:
    """Run `serve` until SIGTERM or SIGINT sets the event it is given, then exit 0.

    A `PddError` ends the process with status 1 and one line on stderr.
    """
    try:
        settings = load(kind)
        me = settings.peer(role)
        logs.configure(settings.log_level, me)
        _pin(settings.cores)
        with export.exporting(me):
            uvloop.run(_until_signal(settings, me, serve))
    except PddError as error:
        print(f"{role}: {error}", file=sys.stderr)
        sys.exit(1)


async def _until_signal(
    settings: SettingsT, me: Peer, serve: Callable[[SettingsT, Peer, asyncio.Event], Awaitable[None]]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    logger.info("process_started", epoch=me.epoch, pid=os.getpid())
    await serve(settings, me, stop)
    logger.info("process_stopped")


def _pin(cores: str) -> None:
    if not cores:
        return
    try:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    except (ValueError, OSError) as error:
        raise ConfigError(f"PDD_CORES: cannot run on cores {cores!r}: {error}") from None
