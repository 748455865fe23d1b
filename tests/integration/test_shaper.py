"""The WAN emulator with real sockets: the line it claims is the line it gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
import pytest

from pdd.errors import UnreachableError
from pdd.local.emulator import Emulator, Route
from pdd.local.line import LineSpec
from pdd.local.shaper import ShaperSpec, ask

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def listening(handle: Handler) -> AsyncGenerator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


class Sink:
    """Counts what each of its connections brings."""

    def __init__(self) -> None:
        self.received: list[int] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place = len(self.received)
        self.received.append(0)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 17):
                self.received[place] += len(data)
        writer.close()


@contextlib.asynccontextmanager
async def pouring(port: int) -> AsyncGenerator[None]:
    """Send to `port` as fast as it takes."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)

    async def pour() -> None:
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    task = asyncio.create_task(pour())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.transport.abort()


async def rates_mbps(sink: Sink, seconds: float, flows: int = 1) -> list[float]:
    """Payload rate of each flow over `seconds`, once all of them have begun."""
    while len(sink.received) < flows or not all(sink.received):  # noqa: ASYNC110 (a test may look again)
        await asyncio.sleep(0.01)
    began, before = time.monotonic(), list(sink.received)
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    return [(now - then) * 8e-6 / took for now, then in zip(sink.received, before, strict=True)]


@contextlib.asynccontextmanager
async def shaper_process(line: LineSpec, targets: dict[str, int]) -> AsyncGenerator[tuple[dict[str, int], int]]:
    """A shaper as `pdd up` runs it; gives the port of each route and the control port."""
    with contextlib.ExitStack() as held:
        free = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(len(targets) + 1)]
        control, *ports = [one.getsockname()[1] for one in free]
    routes = [Route(name, port, target, "a") for port, (name, target) in zip(ports, targets.items(), strict=True)]
    spec = msgspec.json.encode(ShaperSpec(line, routes, control)).decode()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdd.local.shaper", spec)
    try:
        async with asyncio.timeout(20):
            while True:
                try:
                    await asyncio.to_thread(ask, control)
                    break
                except UnreachableError:
                    assert process.returncode is None
                    await asyncio.sleep(0.05)
        yield {route.name: route.listen_port for route in routes}, control
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0


@pytest.mark.parametrize("mbps", [50, 200])
async def test_goodput_round_trip_and_counters(mbps: int) -> None:
    line = LineSpec(mbps=mbps, delay_ms=15, jitter_ms=1)
    sink = Sink()
    async with (
        listening(sink) as sink_port,
        listening(echo) as echo_port,
        shaper_process(line, {"sink": sink_port, "echo": echo_port}) as (ports, control),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["echo"])
        trips_ms = []
        for _ in range(8):
            began = time.monotonic()
            writer.write(b"p")
            await reader.readexactly(1)
            trips_ms.append((time.monotonic() - began) * 1e3)
        writer.close()
        assert statistics.median(trips_ms[1:]) == pytest.approx(30, abs=5)
        assert min(trips_ms[1:]) > 27

        before = await asyncio.to_thread(ask, control)
        async with pouring(ports["sink"]):
            [rate] = await rates_mbps(sink, 1.0)
        assert rate == pytest.approx(mbps, rel=0.05)

        after = await asyncio.to_thread(ask, control)
        carried = after.line.a_to_b.payload_bytes - before.line.a_to_b.payload_bytes
        assert carried >= mbps * 1e6 / 8 * 0.95
        assert after.line.b_to_a.payload_bytes == 8
        assert after.cpu_s > before.cpu_s
        assert after.self_test.fault(line) is None


async def test_flows_share_the_line_and_directions_do_not() -> None:
    sink, back = Sink(), Sink()
    async with listening(sink) as sink_port, listening(back) as back_port:
        routes = [Route("there", 0, sink_port, "a"), Route("back", 0, back_port, "b")]
        async with (
            Emulator(LineSpec(mbps=80, delay_ms=5), routes) as emulator,
            pouring(emulator.ports["there"]),
            pouring(emulator.ports["there"]),
            pouring(emulator.ports["back"]),
        ):
            (first, second), [other_way] = await asyncio.gather(rates_mbps(sink, 1.0, flows=2), rates_mbps(back, 1.0))
    assert first + second == pytest.approx(80, rel=0.05)
    assert first == pytest.approx(second, rel=0.1)
    assert other_way == pytest.approx(80, rel=0.05)


async def test_a_small_message_waits_for_the_queue_only() -> None:
    """Beside four full flows a ping waits its turn and the queue: bounded, however much the flows want to send."""
    line = LineSpec(mbps=100, delay_ms=10)
    sink = Sink()
    async with listening(sink) as sink_port, listening(echo) as echo_port:
        routes = [Route("bulk", 0, sink_port, "a"), Route("leaf", 0, echo_port, "a")]
        async with Emulator(line, routes) as emulator, contextlib.AsyncExitStack() as flows:
            reader, writer = await asyncio.open_connection("127.0.0.1", emulator.ports["leaf"])
            for _ in range(4):
                await flows.enter_async_context(pouring(emulator.ports["bulk"]))
            await rates_mbps(sink, 0.2, flows=4)
            trips_ms = []
            for _ in range(10):
                began = time.monotonic()
                writer.write(b"p")
                await reader.readexactly(1)
                trips_ms.append((time.monotonic() - began) * 1e3)
            writer.close()
    queue_ms = line.queue_bytes / line.bytes_per_s * 1e3
    turn_ms = 5 * (16 << 10) / line.bytes_per_s * 1e3
    assert statistics.median(trips_ms) < 20 + queue_ms + turn_ms + 5
    assert statistics.median(trips_ms) > 20 + queue_ms / 2  # the queue was really full


async def test_order_and_half_close() -> None:
    """Bytes come out as they went in under jitter, and an answer still comes after our end has closed."""
    sent = bytes(itertools.islice(itertools.cycle(range(251)), 600_000))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = await reader.read(-1)
        writer.write(b"got " + str(len(got)).encode() + b" " + (b"same" if got == sent else b"other"))
        writer.close()

    async with (
        listening(answer) as port,
        Emulator(LineSpec(mbps=200, delay_ms=5, jitter_ms=5), [Route("r", 0, port, "a")]) as emulator,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", emulator.ports["r"])
        writer.write(sent)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), 10) == b"got 600000 same"
        writer.close()
        await asyncio.sleep(0.05)
        assert emulator.stats().connections == 0


async def test_a_receiver_that_does_not_read_stops_its_sender_and_nobody_else() -> None:
    line = LineSpec(mbps=200, delay_ms=5)
    released = asyncio.Event()

    async def lazy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        await released.wait()
        writer.close()

    sink = Sink()
    async with listening(lazy) as lazy_port, listening(sink) as sink_port:
        routes = [Route("lazy", 0, lazy_port, "a"), Route("sink", 0, sink_port, "a")]
        async with Emulator(line, routes) as emulator:
            with socket.create_connection(("127.0.0.1", emulator.ports["lazy"])) as client:
                client.setblocking(False)
                total = 0
                quiet = 0
                while quiet < 5:  # until nothing has been taken for half a second
                    try:
                        total += client.send(bytes(1 << 16))
                        quiet = 0
                    except BlockingIOError:
                        quiet += 1
                        await asyncio.sleep(0.1)
                async with pouring(emulator.ports["sink"]):
                    [rate] = await rates_mbps(sink, 0.5)
                assert rate == pytest.approx(200, rel=0.05)
            released.set()
    # What the client could push is bounded by buffers (the two kernels' are the largest), not by its appetite.
    assert total < 16 << 20


async def test_resets_and_refusals_are_passed_on() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    with socket.create_server(("127.0.0.1", 0)) as unused:
        dead_port = unused.getsockname()[1]
    async with (
        listening(reset) as port,
        Emulator(
            LineSpec(mbps=100, delay_ms=2), [Route("reset", 0, port, "a"), Route("dead", 0, dead_port, "a")]
        ) as emulator,
    ):
        for name in ("reset", "dead"):
            reader, writer = await asyncio.open_connection("127.0.0.1", emulator.ports[name])
            writer.write(b"x")
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(reader.readexactly(1), 5)
            writer.close()
        assert emulator.stats().connections == 0


async def test_a_line_that_is_down_delivers_everything_afterwards() -> None:
    async with (
        listening(echo) as port,
        shaper_process(LineSpec(mbps=100, delay_ms=5), {"echo": port}) as (ports, control),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", ports["echo"])
        writer.write(b"a")
        assert await asyncio.wait_for(reader.readexactly(1), 5) == b"a"
        assert not (await asyncio.to_thread(ask, control, "down")).line.up
        writer.write(b"b")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(1), 0.3)
        assert (await asyncio.to_thread(ask, control, "up")).line.up
        assert await asyncio.wait_for(reader.readexactly(1), 5) == b"b"
        writer.close()


def test_a_wrong_spec_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdd.local.shaper", '{"line": {"mbps": 0, "delay_ms": 1}, "routes": []}'],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "rate above 0" in done.stderr
