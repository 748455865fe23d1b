"""One TCP connection of the KV stream, the same at both ends: whole frames in and out, signs of life, round-trip time.

It knows no transfer. Bytes that wait in this process are bounded: reading pauses by itself, and `drain` waits until
what was written is with the kernel.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque

import msgspec

from pdd.errors import TransferError
from pdd.transfer import wire

READ_BYTES = 256 * 1024
PONG_BUFFER_BYTES = 64 * 1024


class StreamTimeouts(msgspec.Struct, frozen=True):
    """Deadlines of the stream, in seconds."""

    connect_s: float = 5.0
    """For TCP's and our own greeting."""
    silence_s: float = 8.0
    """A connection without a byte for so long is dead; found at most a quarter later. Each end pings four times."""
    reconnect_s: float = 30.0
    """A peer out of reach for so long (plus at most one `connect_s`) fails its exports."""
    first_retry_s: float = 0.05
    """Pause before the first new try to connect; doubled each time, up to `longest_retry_s`."""
    longest_retry_s: float = 1.0


class Connection:
    """See the module. One task may read; any may write."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._silence_s = silence_s
        self._payload = bytearray()
        self._round_trips_s: deque[float] = deque(maxlen=16)
        self.heard_s = time.monotonic()
        """Monotonic time of the last byte from the peer (the loop's own clock may be as coarse as a millisecond)."""
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        writer.transport.set_write_buffer_limits(high=0)

    @property
    def peername(self) -> str:
        """The peer's address, for logs."""
        return str(self._writer.get_extra_info("peername"))

    @property
    def round_trip_s(self) -> float | None:
        """The shortest of the last round trips (the others waited behind KV), or None before the first."""
        return min(self._round_trips_s, default=None)

    async def read(self) -> tuple[wire.Frame, memoryview]:
        """The next frame and its payload, which stays valid until the next call. Pings are answered on the way.

        Raises `TransferError` on anything that is no frame, `EOFError` and `OSError` when the connection is gone.
        """
        while True:
            header_bytes, payload_bytes = wire.decode_prefix(await self._reader.readexactly(wire.PREFIX_BYTES))
            frame = wire.decode_header(await self._reader.readexactly(header_bytes), payload_bytes)
            self.heard_s = time.monotonic()
            match frame:
                case wire.Ping(clock_s):
                    # Never waits: reading goes on while a slice is written. Behind a full buffer it would tell nothing.
                    if self._writer.transport.get_write_buffer_size() < PONG_BUFFER_BYTES:
                        self.write(wire.Pong(clock_s))
                case wire.Pong(clock_s):
                    self.note_round_trip(time.monotonic() - clock_s)
                case _:
                    return frame, await self._read_payload(payload_bytes)

    def write(self, frame: wire.Frame, payload: memoryview | None = None) -> None:
        """Queue a frame. Follow with `drain` where frames may come fast."""
        self._writer.write(wire.encode(frame, 0 if payload is None else payload.nbytes))
        if payload is not None:
            self._writer.write(payload)

    async def drain(self) -> None:
        """Wait until everything written is with the kernel. Raises `OSError` when the connection is gone."""
        await self._writer.drain()

    async def keep_alive(self) -> None:
        """Ping for ever. Raises `TransferError` once the peer has been silent for too long."""
        while True:
            self.write(wire.Ping(time.monotonic()))
            await asyncio.sleep(self._silence_s / 4)
            if time.monotonic() - self.heard_s > self._silence_s:
                raise TransferError(f"peer silent for {self._silence_s} s")

    def note_round_trip(self, round_trip_s: float) -> None:
        """Add a measurement made elsewhere, as by a greeting."""
        self._round_trips_s.append(round_trip_s)

    def abort(self) -> None:
        """Close at once; what was not sent is dropped."""
        self._writer.transport.abort()

    async def _read_payload(self, size: int) -> memoryview:
        # The buffer is kept for the next payload: one allocation a connection, as large as the largest slice.
        if len(self._payload) < size:
            self._payload = bytearray(size)
        payload = memoryview(self._payload)[:size]
        filled = 0
        while filled < size:
            part = await self._reader.read(min(size - filled, READ_BYTES))
            if not part:
                raise EOFError("connection closed within a frame")
            payload[filled : filled + len(part)] = part
            filled += len(part)
            # A large slice on a slow line is a sign of life too.
            self.heard_s = time.monotonic()
        return payload
