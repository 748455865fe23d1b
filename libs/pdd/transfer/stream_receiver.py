"""The receiving end of the KV stream: a TCP server that applies verified slices to one pool.

It owns its sockets, their tasks and the table of open transfers; the blocks belong to whoever opened the transfer.
A slice is applied without a pause on the event loop, so `close` fences at once: after it no byte reaches the blocks.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import structlog

from pdd.errors import TransferError
from pdd.kv import KvMemory, ModelIdentity, StreamEndpoint, Ticket
from pdd.transfer import slices, wire
from pdd.transfer.incoming import ImportCallback, KvImport, check_room
from pdd.transfer.slices import Piece
from pdd.transfer.stream_connection import READ_BYTES, Connection, StreamTimeouts
from pdd.types import AttemptKey, Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_COMPLETED_REMEMBERED = 1024


class StreamReceiver:
    """A `KvReceiver` over TCP. `advertise` is the address that tickets name, where it differs from the bound one."""

    fences_itself = True

    def __init__(
        self,
        memory: KvMemory,
        identity: ModelIdentity,
        me: Peer,
        *,
        host: str,
        port: int,
        advertise: tuple[str, int] | None = None,
        timeouts: StreamTimeouts | None = None,
    ) -> None:
        """`port` 0 takes a free one."""
        self._memory = memory
        self._identity = identity
        self._me = me
        self._bind = (host, port)
        self._advertise = advertise
        self._timeouts = timeouts or StreamTimeouts()
        self.lost = asyncio.Event()  # Never set: a broken connection is made anew.
        self._imports: dict[str, KvImport] = {}
        self._completed: dict[str, None] = {}
        """Closed transfers that had arrived whole, oldest first."""
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._endpoint: StreamEndpoint | None = None

    @property
    def endpoint(self) -> StreamEndpoint:
        """Where senders connect to. Raises `TransferError` before `start`."""
        if self._endpoint is None:
            raise TransferError("the receiver is not started")
        return self._endpoint

    async def start(self) -> None:
        """Listen. Raises `OSError` if the address cannot be bound."""
        self._server = await asyncio.start_server(self._accept, *self._bind, limit=READ_BYTES)
        host, port = self._advertise or (self._bind[0], self._server.sockets[0].getsockname()[1])
        self._endpoint = StreamEndpoint(host, port)

    async def stop(self) -> None:
        """Close every socket and fail every open import. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for transfer_id in list(self._imports):
            self.close(transfer_id)

    def open(
        self,
        key: AttemptKey,
        blocks: Sequence[int],
        first_token: int,
        end_token: int,
        *,
        in_flight_end: int | None = None,
        on_progress: ImportCallback | None = None,
        on_complete: ImportCallback | None = None,
    ) -> KvImport:
        """See `KvReceiver.open`."""
        in_flight_end = first_token if in_flight_end is None else in_flight_end
        check_room(self._memory.spec, blocks, first_token, in_flight_end, end_token)
        ticket = Ticket(
            uuid.uuid4().hex, self._me, first_token, in_flight_end, end_token, self._memory.spec, self.endpoint
        )
        opened = KvImport(ticket, key, blocks, on_progress, on_complete)
        self._imports[ticket.transfer_id] = opened
        return opened

    def close(self, transfer_id: str) -> None:
        """See `KvReceiver.close`. A fence: nothing is written into the transfer's blocks from here on."""
        opened = self._imports.pop(transfer_id, None)
        if opened is not None and opened.complete:
            self._completed[transfer_id] = None
            if len(self._completed) > _COMPLETED_REMEMBERED:
                del self._completed[next(iter(self._completed))]
        elif opened is not None:
            opened.fail(TransferError("the transfer was closed"))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(Connection(reader, writer, self._timeouts.silence_s)))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                welcome = await self._greet(connection)
            if welcome:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(connection.keep_alive())
                    tasks.create_task(self._receive(connection))
        except* (OSError, EOFError, TransferError) as group:
            logger.info("kv_connection_ended", peer=connection.peername, reason=str(group.exceptions[0]))
        finally:
            connection.abort()

    async def _greet(self, connection: Connection) -> bool:
        hello, _ = await connection.read()
        if not isinstance(hello, wire.Hello):
            raise TransferError(f"{type(hello).__name__} before Hello")
        ours = wire.Hello(wire.VERSION, self._identity, self._memory.spec.dtype, self._me)
        refusal = wire.first_difference(ours.meaning(), hello.meaning())
        if refusal is not None:
            logger.warning("kv_sender_refused", sender=hello.sender.instance, field=refusal.field)
            connection.write(refusal)
            await connection.drain()
            await connection.read()  # The sender hangs up once it has read the refusal; hanging up first could lose it.
            return False
        connection.write(wire.Welcome(self._me))
        await connection.drain()
        return True

    async def _receive(self, connection: Connection) -> None:
        while True:
            frame, payload = await connection.read()
            if not isinstance(frame, wire.Slice):
                raise TransferError(f"{type(frame).__name__} where a Slice belongs")
            reason = self._apply(frame, payload)
            connection.write(wire.Ack(frame.seq) if reason is None else wire.Nack(frame.seq, reason))
            await connection.drain()

    def _apply(self, header: wire.Slice, payload: memoryview) -> wire.NackReason | None:
        """Write one slice into the pool, or say why not. Synchronous: see the module."""
        opened = self._imports.get(header.transfer_id)
        if header.transfer_id in self._completed:
            return None  # Sent again because the acknowledgement was lost: it was applied, and is not touched again.
        if opened is None:
            return wire.NackReason.UNKNOWN
        spec = self._memory.spec
        piece = Piece(
            header.first_token,
            header.first_token + header.num_tokens,
            header.first_layer,
            header.first_layer + header.num_layers,
        )
        all_heads = (header.first_head, header.num_heads) == (0, spec.num_kv_heads)
        fits = header.key == opened.key and header.dtype == spec.dtype and all_heads and opened.accepts(piece)
        if not fits or piece.nbytes(spec) != payload.nbytes:
            return wire.NackReason.RANGE
        if slices.checksum(payload) != header.checksum:
            return wire.NackReason.CHECKSUM
        slices.scatter(self._memory, opened.blocks, opened.ticket.first_token, piece, payload)
        opened.applied(piece)
        return None
