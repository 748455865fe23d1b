"""The WAN between the two datacenters of one machine, as a process of its own.

    python -m pdd.local.shaper '{"line": {"mbps": 100, "delay_ms": 15}, "routes": [...], "control_port": 7000}'

It measures its line first, then forwards (`pdd.local.emulator`) until SIGTERM. On the control port each JSON line
(`Control`) is answered by one JSON line (`ShaperStats`); `ask` does that for a caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec
import uvloop

from pdd.errors import ConfigError, PddError, UnreachableError
from pdd.local.emulator import Emulator, LineStats, Route
from pdd.local.line import LineSpec
from pdd.local.selftest import Measured, measure

ASK_DEADLINE_S = 5.0


class ShaperSpec(msgspec.Struct, frozen=True):
    """Everything the process is told."""

    line: LineSpec
    routes: list[Route]
    control_port: int
    seed: int = 0


class Control(msgspec.Struct, frozen=True):
    """A control line. `down` stops the line and `up` lets it go on; all are answered with the counters."""

    op: Literal["stats", "down", "up"]


class ShaperStats(msgspec.Struct, frozen=True):
    """Counters of the line and the process; `cpu_s` over `uptime_s` is the share of a core it takes."""

    uptime_s: float
    cpu_s: float
    line: LineStats
    self_test: Measured


def ask(control_port: int, op: Literal["stats", "down", "up"] = "stats") -> ShaperStats:
    """Send one control line to a running shaper. Blocking; raises `UnreachableError`."""
    try:
        with (
            socket.create_connection(("127.0.0.1", control_port), timeout=ASK_DEADLINE_S) as connection,
            connection.makefile("rwb") as stream,
        ):
            stream.write(msgspec.json.encode(Control(op)) + b"\n")
            stream.flush()
            return msgspec.json.decode(stream.readline(), type=ShaperStats)
    except (OSError, msgspec.DecodeError) as error:
        raise UnreachableError(f"the WAN shaper does not answer on port {control_port}: {error}") from None


async def run(spec: ShaperSpec) -> None:
    """Measure the line, then forward until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    measured = await measure(spec.line)
    async with Emulator(spec.line, spec.routes, spec.seed) as emulator, _control(spec.control_port, emulator, measured):
        await stop.wait()


@contextlib.asynccontextmanager
async def _control(port: int, emulator: Emulator, measured: Measured) -> AsyncGenerator[None]:
    started = time.monotonic()
    decoder = msgspec.json.Decoder(Control)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readline():
                op = decoder.decode(request).op
                if op == "down":
                    emulator.down()
                elif op == "up":
                    emulator.up()
                stats = ShaperStats(time.monotonic() - started, time.process_time(), emulator.stats(), measured)
                writer.write(msgspec.json.encode(stats) + b"\n")
                await writer.drain()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            print(f"control connection dropped: {error}", file=sys.stderr)
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port)
    try:
        yield
    finally:
        server.close()


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    try:
        if len(arguments) != 1:
            raise ConfigError("usage: python -m pdd.local.shaper SPEC (a JSON object, see ShaperSpec)")
        try:
            spec = msgspec.json.decode(arguments[0], type=ShaperSpec)
        except msgspec.DecodeError as error:
            raise ConfigError(f"shaper: {error}") from None
        uvloop.run(run(spec))
    except (PddError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
