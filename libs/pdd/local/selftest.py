"""Measures an emulated line through itself, before anything is believed that crossed it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from pdd.errors import DeadlineError
from pdd.local.emulator import Emulator, Route
from pdd.local.line import LineSpec

BULK_S = 0.4
PINGS = 5
DEADLINE_S = 30.0


class Measured(msgspec.Struct, frozen=True):
    """What a line gave: payload rate from A to B, and the round trip of one byte when idle (median)."""

    mbps: float
    round_trip_ms: float

    def fault(self, line: LineSpec) -> str | None:
        """Say in what the emulator, and not the line it emulates, was the bottleneck; None if in nothing."""
        if self.mbps < 0.95 * line.mbps:
            return f"the WAN emulator reaches {self.mbps:g} of {line.mbps:g} Mbit/s on this machine"
        if self.round_trip_ms > 2 * (line.delay_ms + line.jitter_ms) + 5:
            return f"the WAN emulator adds delay: round trip {self.round_trip_ms:g} ms, line {2 * line.delay_ms:g} ms"
        return None


async def measure(line: LineSpec) -> Measured:
    """Send pings and then a bulk stream through an emulator of `line`. Takes half a second and some round trips.

    Raises `DeadlineError`.
    """
    sink = _Sink()
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            _listening(sink) as sink_port,
            _listening(_echo) as echo_port,
            Emulator(line, [Route("sink", 0, sink_port, "a"), Route("echo", 0, echo_port, "a")]) as emulator,
        ):
            round_trip_ms = await _round_trip_ms(emulator.ports["echo"])
            mbps = await _goodput_mbps(emulator.ports["sink"], sink)
    except TimeoutError:
        raise DeadlineError(f"the WAN emulator did not finish its self-test within {DEADLINE_S:.0f} s") from None
    return Measured(round(mbps, 2), round(round_trip_ms, 2))


async def _goodput_mbps(port: int, sink: _Sink) -> float:
    _, writer = await asyncio.open_connection("127.0.0.1", port)

    async def pour() -> None:
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    pouring = asyncio.create_task(pour())
    try:
        await sink.started.wait()
        began, before = time.monotonic(), sink.received_bytes
        await asyncio.sleep(BULK_S)
        return (sink.received_bytes - before) * 8e-6 / (time.monotonic() - began)
    finally:
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)
        writer.transport.abort()


async def _round_trip_ms(port: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    trips_s: list[float] = []
    try:
        for _ in range(PINGS + 1):
            began = time.monotonic()
            writer.write(b"p")
            await reader.readexactly(1)
            trips_s.append(time.monotonic() - began)
    finally:
        writer.transport.abort()
    return statistics.median(trips_s[1:]) * 1e3  # the first one includes the handshake


class _Sink:
    """Swallows what comes and counts it."""

    def __init__(self) -> None:
        self.received_bytes = 0
        self.started = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # the measurement ends by a reset
            while data := await reader.read(1 << 16):
                self.received_bytes += len(data)
                self.started.set()
        writer.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 10):
            writer.write(data)
    writer.close()


@contextlib.asynccontextmanager
async def _listening(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncGenerator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
