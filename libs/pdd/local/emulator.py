"""An emulated WAN line for real TCP connections.

Each route listens on a port and forwards to a target. All connections of all routes share one bottleneck queue per
direction (`pdd.local.line`). A full queue stops reading, so that TCP pushes back to the sender; connections are let
in chunk by chunk in turn. Small socket buffers keep the queue here and not in the kernel, where nobody would see it.

The shaper ends TCP on both sides: congestion control over real loss is not emulated, and the rate counts payload
only. It never looks into what it forwards.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from pdd.local.line import Bottleneck, LineSpec

SMALL_CHUNK_BYTES = 16 << 10
LARGE_CHUNK_BYTES = 32 << 10
LARGE_CHUNK_MBPS = 500.0
"""From this rate on the larger chunk: the line time of one is still well under a millisecond."""

SEGMENT_BYTES = 8 << 10
"""Loopback segments are 64 KiB by default: more than a small receive buffer takes without stalling."""

MAX_CONNECTIONS = 256
MAX_CHUNKS_PER_FLOW = 4096
DIAL_DEADLINE_S = 5.0
LATE_MS = 5.0
"""A delivery later than this counts as late: the shaper, not the line, was the bottleneck."""


class Route(msgspec.Struct, frozen=True):
    """A forwarded port. `dialer` is the datacenter that connects; what it sends goes from there to the other one."""

    name: str
    listen_port: int
    target_port: int
    dialer: Literal["a", "b"]


class DirectionStats(msgspec.Struct, frozen=True):
    """Counters of one direction since the start."""

    payload_bytes: int
    chunks: int
    late_chunks: int
    worst_late_ms: float


class LineStats(msgspec.Struct, frozen=True):
    """What the line has carried. Counters since the start, so that any two can be subtracted."""

    up: bool
    connections: int
    a_to_b: DirectionStats
    b_to_a: DirectionStats


class _LineClock:
    """Monotonic time that stands still while the line is down."""

    def __init__(self) -> None:
        self._lost_s = 0.0
        self._stopped_at: float | None = None
        self._running = asyncio.Event()
        self._running.set()

    @property
    def up(self) -> bool:
        return self._stopped_at is None

    def now(self) -> float:
        return (time.monotonic() if self._stopped_at is None else self._stopped_at) - self._lost_s

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._running.clear()

    def start(self) -> None:
        if self._stopped_at is not None:
            self._lost_s += time.monotonic() - self._stopped_at
            self._stopped_at = None
            self._running.set()

    async def until(self, at: float) -> None:
        """Return once the clock shows `at`. Timers tick in milliseconds, so this rounds up and looks again."""
        await self._running.wait()
        while (left_s := at - self.now()) > 0:
            await asyncio.sleep(math.ceil(left_s * 1e3) / 1e3)
            await self._running.wait()


class _Direction:
    """The bottleneck of a direction with its waiting line and its counters."""

    def __init__(self, spec: LineSpec, clock: _LineClock, seed: int) -> None:
        self._bottleneck = Bottleneck(spec, seed)
        self._clock = clock
        self._turn = asyncio.Lock()
        self._payload_bytes = 0
        self._chunks = 0
        self._late_chunks = 0
        self._worst_late_ms = 0.0

    async def admit(self, size: int, not_before: float) -> float:
        """Wait for room in the queue; return when the chunk arrives. Connections come in turn: the lock is fair."""
        async with self._turn:
            while (wait_s := self._bottleneck.wait(self._clock.now(), size)) > 0 or not self._clock.up:
                await self._clock.until(self._clock.now() + wait_s)
            return self._bottleneck.send(self._clock.now(), size, not_before)

    async def arrive(self, at: float, size: int) -> None:
        """Wait until a chunk has arrived, and count it."""
        await self._clock.until(at)
        late_ms = (self._clock.now() - at) * 1e3
        self._payload_bytes += size
        self._chunks += 1
        self._late_chunks += late_ms > LATE_MS
        self._worst_late_ms = max(self._worst_late_ms, late_ms)

    def stats(self) -> DirectionStats:
        return DirectionStats(self._payload_bytes, self._chunks, self._late_chunks, round(self._worst_late_ms, 3))


class _Flow:
    """One direction of one connection: read, admit to the bottleneck, deliver when due.

    At most `window` bytes are held, twice what the queue and the line can hold: a receiver that does not read stops
    its own flow and nobody else's.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, direction: _Direction, line: LineSpec) -> None:
        self._source = source
        self._sink = sink
        self._direction = direction
        self._chunk_bytes = LARGE_CHUNK_BYTES if line.mbps >= LARGE_CHUNK_MBPS else SMALL_CHUNK_BYTES
        self._window = 2 * (line.queue_bytes + line.flight_bytes)
        self._held = 0
        self._delivered = asyncio.Event()
        self._under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS_PER_FLOW)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read())
            tasks.create_task(self._deliver())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        arrives = 0.0
        data = b"more"
        while data:
            while self._held >= self._window:
                self._delivered.clear()
                await self._delivered.wait()
            data = await loop.sock_recv(self._source, self._chunk_bytes)
            self._held += len(data)
            arrives = await self._direction.admit(len(data), arrives)
            await self._under_way.put((arrives, data))

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            at, data = await self._under_way.get()
            await self._direction.arrive(at, len(data))
            if not data:  # half-close: the other direction may still have something to say
                self._sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._sink, data)
            self._held -= len(data)
            self._delivered.set()


class Emulator:
    """Accepts and forwards the connections of all routes. Use as an async context manager."""

    def __init__(self, line: LineSpec, routes: Sequence[Route], seed: int = 0) -> None:
        self._line = line
        self._routes = routes
        self._clock = _LineClock()
        self._a_to_b = _Direction(line, self._clock, seed)
        self._b_to_a = _Direction(line, self._clock, seed + 1)
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self.ports: dict[str, int] = {}
        """Where each route listens, by its name."""

    async def __aenter__(self) -> Emulator:
        try:
            for route in self._routes:
                listener = self._socket()
                self._listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", route.listen_port))
                listener.listen()
                self.ports[route.name] = listener.getsockname()[1]
                self._own(asyncio.create_task(self._accept(listener, route)))
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection and listener."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def down(self) -> None:
        """Stop the line: nothing moves, nothing is lost, connections hang."""
        self._clock.stop()

    def up(self) -> None:
        """Let the line go on where it stopped."""
        self._clock.start()

    def stats(self) -> LineStats:
        """The counters so far."""
        return LineStats(self._clock.up, self._connections, self._a_to_b.stats(), self._b_to_a.stats())

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _socket(self) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        # A few wake-ups' worth, so that the line never waits for the kernel. Accepted sockets inherit these.
        buffer_bytes = max(64 << 10, int(self._line.bytes_per_s * 0.004))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        return made

    async def _accept(self, listener: socket.socket, route: Route) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._places.acquire()
            try:
                near, _ = await loop.sock_accept(listener)
            except OSError:  # out of descriptors, or gone before it was accepted: not the end of the route
                self._places.release()
                await asyncio.sleep(0.1)
                continue
            self._connections += 1
            task = asyncio.create_task(self._carry(near, route))
            self._own(task)
            task.add_done_callback(lambda _, near=near: self._leave(near))

    def _leave(self, near: socket.socket) -> None:
        near.close()
        self._connections -= 1
        self._places.release()

    async def _carry(self, near: socket.socket, route: Route) -> None:
        """One connection, until both directions have ended or either side is gone."""
        delay_s = self._line.delay_ms / 1e3
        forward, backward = self._a_to_b, self._b_to_a
        if route.dialer == "b":
            forward, backward = backward, forward
        far = self._socket()
        try:
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._clock.until(self._clock.now() + 2 * delay_s)  # the handshake's round trip
            async with asyncio.timeout(DIAL_DEADLINE_S):
                await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", route.target_port))
            async with asyncio.TaskGroup() as flows:
                flows.create_task(_Flow(near, far, forward, self._line).run())
                flows.create_task(_Flow(far, near, backward, self._line).run())
        except* OSError:
            # One side was reset or is not there: the other learns it one delay later, in the same way.
            await self._clock.until(self._clock.now() + delay_s)
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            far.close()
