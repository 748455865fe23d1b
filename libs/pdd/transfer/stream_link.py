"""The sending end of the KV stream towards one peer: several TCP connections ("lanes") that share one queue of exports.

A link belongs to one start (epoch) of the receiver. It ends, and fails its exports, when the receiver refuses, turns
out to be another start, or stays out of reach; it also ends when it has no export and no connection left.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import structlog

from pdd.errors import IncompatibleError, PddError, TransferError
from pdd.kv import KvMemory, StreamEndpoint
from pdd.transfer import slices, wire
from pdd.transfer.goodput import GoodputMeter
from pdd.transfer.outgoing import KvExport
from pdd.transfer.slices import Piece
from pdd.transfer.stream_connection import READ_BYTES, Connection, StreamTimeouts
from pdd.types import Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_CORRUPTED = 3
"""An export whose slices fail their checksum more often than this fails."""

MIN_SEND_BUFFER_BYTES = 64 * 1024


class LinkLimits(msgspec.Struct, frozen=True):
    """How much a link takes of the line."""

    connections: int
    window_bytes: int
    """Payload bytes sent and not yet acknowledged, over all lanes."""
    max_slice_bytes: int


class _InFlight(NamedTuple):
    export: KvExport
    piece: Piece
    size_bytes: int
    lane: int


class Link:
    """See the module. `run` does the work; everything else is called from the same event loop."""

    def __init__(
        self,
        endpoint: StreamEndpoint,
        holder: Peer,
        hello: wire.Hello,
        memory: KvMemory,
        limits: LinkLimits,
        timeouts: StreamTimeouts,
        on_end: Callable[[Link], None],
    ) -> None:
        self.endpoint = endpoint
        self.holder = holder
        self._hello = hello
        self._memory = memory
        self._limits = limits
        self._timeouts = timeouts
        self._on_end = on_end
        self._exports: dict[str, KvExport] = {}  # By transfer ID, oldest first.
        self._in_flight: dict[int, _InFlight] = {}
        self._in_flight_bytes = 0
        self._seq = itertools.count()
        self._connections: dict[int, Connection] = {}
        self._out_of_reach_since_s = time.monotonic()
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._meter = GoodputMeter()

    @property
    def backlog_bytes(self) -> int:
        """Bytes of live exports that the receiver has not applied, computed or not."""
        return sum(export.backlog_bytes for export in self._exports.values())

    @property
    def goodput_bytes_per_s(self) -> float | None:
        """See `GoodputMeter`."""
        return self._meter.bytes_per_s

    @property
    def round_trip_s(self) -> float | None:
        """The shortest recent round trip over all lanes, or None before the first."""
        trips = (connection.round_trip_s for connection in self._connections.values())
        return min((trip for trip in trips if trip is not None), default=None)

    def add(self, export: KvExport) -> None:
        """Queue `export` behind the others."""
        if not self._exports and not self._connections:
            self._out_of_reach_since_s = time.monotonic()
        self._exports[export.ticket.transfer_id] = export

    def export_changed(self, export: KvExport) -> None:
        """`export` has work for a lane, or has ended."""
        if export.ended:
            self._exports.pop(export.ticket.transfer_id, None)
        self._changed.set()

    def end(self, error: PddError) -> None:
        """End the link; live exports fail with `error`. At once and for good."""
        if self._over.is_set():
            return
        self._over.set()
        self._on_end(self)
        for export in list(self._exports.values()):
            export.fail(error)

    async def run(self) -> None:
        """Keep the lanes going until the link ends."""
        try:
            async with asyncio.TaskGroup() as tasks:
                lanes = [tasks.create_task(self._run_lane(lane)) for lane in range(self._limits.connections)]
                await self._over.wait()
                for lane in lanes:
                    lane.cancel()
        finally:
            self.end(TransferError("the link broke"))

    async def _run_lane(self, lane: int) -> None:
        pause_s = self._timeouts.first_retry_s
        # Not `while True`: before Python 3.13 a TaskGroup that fails while it is cancelled swallows the cancellation.
        while not self._over.is_set():
            try:
                async with asyncio.timeout(self._timeouts.connect_s):
                    connection = await self._connect()
                pause_s = self._timeouts.first_retry_s
                await self._use(lane, connection)
            except* (OSError, EOFError, TransferError) as group:
                logger.info("kv_lane_lost", peer=self.holder.instance, lane=lane, reason=str(group.exceptions[0]))
            if not self._connections:
                self._end_if_pointless()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._timeouts.longest_retry_s)

    def _end_if_pointless(self) -> None:
        limit_s = self._timeouts.reconnect_s
        if not self._exports:
            self.end(TransferError("the link was idle"))
        elif time.monotonic() - self._out_of_reach_since_s > limit_s:
            where = f"{self.endpoint.host}:{self.endpoint.port}"
            self.end(TransferError(f"{self.holder.instance} at {where} was out of reach for {limit_s} s"))

    async def _connect(self) -> Connection:
        reader, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port, limit=READ_BYTES)
        # The kernel must hold what is under way for its resends, but no more: what waits in it delays all that shares
        # the line. A lane's share of the window is exactly what may be under way.
        share = self._limits.window_bytes // self._limits.connections
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, max(share, MIN_SEND_BUFFER_BYTES))
        connection = Connection(reader, writer, self._timeouts.silence_s)
        greeted_s = time.monotonic()
        try:
            connection.write(self._hello)
            await connection.drain()
            answer, _ = await connection.read()
            connection.note_round_trip(time.monotonic() - greeted_s)
        except BaseException:
            connection.abort()
            raise
        match answer:
            case wire.Welcome(receiver) if receiver.epoch == self.holder.epoch:
                return connection
            case wire.Welcome():
                error = TransferError(f"{self.holder.instance} has restarted: the ticket is of an earlier epoch")
            case wire.Refuse(field, receiver_has, sender_has):
                error = IncompatibleError(field, sender_has, receiver_has)
            case _:
                error = TransferError(f"{type(answer).__name__} in answer to Hello")
        connection.abort()
        self.end(error)
        raise TransferError(str(error))

    async def _use(self, lane: int, connection: Connection) -> None:
        self._connections[lane] = connection
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(connection.keep_alive())
                tasks.create_task(self._receive(connection))
                tasks.create_task(self._send(lane, connection))
        finally:
            connection.abort()
            del self._connections[lane]
            self._out_of_reach_since_s = connection.heard_s
            for seq, sent in list(self._in_flight.items()):
                if sent.lane == lane:
                    self._settle(seq)
                    sent.export.give_back(sent.piece)

    async def _send(self, lane: int, connection: Connection) -> None:
        while True:
            while (work := self._take()) is None:
                self._changed.clear()
                await self._changed.wait()
            export, piece = work
            payload = slices.gather(self._memory, export.blocks, 0, piece)
            seq = next(self._seq)
            header = self._header(seq, export, piece, slices.checksum(payload))
            self._in_flight[seq] = _InFlight(export, piece, payload.nbytes, lane)
            self._in_flight_bytes += payload.nbytes
            export.sent(piece)
            connection.write(header, payload)
            await connection.drain()
            await asyncio.sleep(0)  # A fast line never makes `drain` wait; the event loop has others to serve.

    def _take(self) -> tuple[KvExport, Piece] | None:
        """The oldest export's next piece, if the window has room for it."""
        if self._in_flight and self._in_flight_bytes + self._limits.max_slice_bytes > self._limits.window_bytes:
            return None
        for export in self._exports.values():
            piece = export.take()
            if piece is not None:
                return export, piece
        return None

    def _header(self, seq: int, export: KvExport, piece: Piece, checksum: int) -> wire.Slice:
        spec = self._memory.spec
        return wire.Slice(
            seq=seq,
            transfer_id=export.ticket.transfer_id,
            key=export.key,
            first_token=piece.first_token,
            num_tokens=piece.end_token - piece.first_token,
            first_layer=piece.first_layer,
            num_layers=piece.end_layer - piece.first_layer,
            first_head=0,
            num_heads=spec.num_kv_heads,
            dtype=spec.dtype,
            checksum=checksum,
        )

    async def _receive(self, connection: Connection) -> None:
        while True:
            frame, _ = await connection.read()
            match frame:
                case wire.Ack(seq):
                    if (sent := self._in_flight.get(seq)) is not None:
                        self._meter.acked(time.monotonic(), sent.size_bytes)
                        self._settle(seq)
                        sent.export.acked(sent.piece)
                case wire.Nack(seq, reason):
                    if (sent := self._settle(seq)) is not None:
                        self._refused(sent, reason)
                case _:
                    raise TransferError(f"{type(frame).__name__} where an answer to a Slice belongs")

    def _settle(self, seq: int) -> _InFlight | None:
        sent = self._in_flight.pop(seq, None)
        if sent is not None:
            self._in_flight_bytes -= sent.size_bytes
            if not self._in_flight:
                self._meter.idle()
            self._changed.set()
        return sent

    def _refused(self, sent: _InFlight, reason: wire.NackReason) -> None:
        if reason is wire.NackReason.CHECKSUM and sent.export.corrupted < MAX_CORRUPTED:
            sent.export.corrupted += 1
            sent.export.give_back(sent.piece)
        else:
            sent.export.fail(TransferError(f"{self.holder.instance} refused a slice: {reason}"))
