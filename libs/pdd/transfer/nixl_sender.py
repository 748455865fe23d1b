"""The sending end of the NIXL fabric: writes whole blocks from the registered pool straight into the receiver's.

It owns its agent and the polling task. See `nixl_agent` for the environment it needs. Nothing is staged, so the blocks
of an export are being read until its writes are over: `KvExport.cancel` waits for them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import structlog

from pdd.errors import IncompatibleError, PddError, TransferError
from pdd.kv import KvMemory, ModelIdentity, NixlEndpoint, Ticket
from pdd.transfer import nixl_wire, slices, wire
from pdd.transfer.nixl_agent import Handle, NixlAgent
from pdd.transfer.outgoing import ExportCallback, KvExport
from pdd.transfer.pacing import Pacing
from pdd.transfer.slices import Piece
from pdd.types import AttemptKey, Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

BATCH_BYTES = 4 << 20
"""Of one write; at least one block."""

UNANSWERED_BATCHES = 4
"""Per export: keeps the line busy while the receiver verifies, and no export from starving the others."""


class _Dialogue:
    """One export's talk with its receiver."""

    def __init__(self, export: KvExport, endpoint: NixlEndpoint) -> None:
        self.export = export
        self.endpoint = endpoint
        self.offered = False
        self.accepted = False
        self.unanswered: dict[int, list[Piece]] = {}
        self.heard_s = 0.0

    @property
    def expecting(self) -> bool:
        """Whether the receiver owes an answer."""
        return (self.offered and not self.accepted) or bool(self.unanswered)


class NixlSender:
    """A `KvSender` over NIXL. A receiver that owes an answer for `silence_s` fails the export."""

    def __init__(self, memory: KvMemory, identity: ModelIdentity, me: Peer, *, silence_s: float = 10.0) -> None:
        self._memory = memory
        self._identity = identity
        self._me = me
        self._silence_s = silence_s
        self.lost = asyncio.Event()
        self._agent: NixlAgent | None = None
        self._dialogues: dict[str, _Dialogue] = {}  # By transfer ID, oldest first.
        self._writes: dict[Handle, KvExport] = {}
        self._seq = itertools.count()
        self._pacing = Pacing()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the pool. Raises `TransferError` where NIXL or UCX cannot be used."""
        me = self._me
        self._agent = await NixlAgent.make(f"{me.dc}/{me.role}/{me.instance}/{me.epoch}/sender", self._memory)
        self._task = asyncio.create_task(self._run(self._agent))

    async def stop(self) -> None:
        """Fail every live export, wait for its writes (at most `silence_s`), deregister the pool. Idempotent."""
        exports = [dialogue.export for dialogue in self._dialogues.values()]
        for export in exports:
            export.fail(TransferError("the sender was stopped"))
        if self._task is None or self._agent is None:
            return
        try:
            async with asyncio.timeout(self._silence_s):
                for export in exports:
                    await export.cancel()
        except TimeoutError:
            logger.warning("nixl_writes_left", writes=len(self._writes))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        await self._agent.close()

    def open(
        self, ticket: Ticket, key: AttemptKey, blocks: Sequence[int], *, on_acked: ExportCallback | None = None
    ) -> KvExport:
        """See `KvSender.open`. The pools' specs must be equal."""
        if not isinstance(ticket.endpoint, NixlEndpoint):
            raise TransferError("the ticket is not for NIXL")
        if self._task is None or self._task.done():
            raise TransferError("the NIXL sender is not running")
        spec = self._memory.spec
        for field in spec.__struct_fields__:
            ours, theirs = getattr(spec, field), getattr(ticket.spec, field)
            if ours != theirs:
                raise IncompatibleError(field, ours, theirs)
        if len(ticket.endpoint.block_ids) < spec.blocks_for(ticket.end_token - ticket.first_token):
            raise TransferError("the ticket names too few blocks")
        export = KvExport(ticket, key, blocks, spec, spec.block_bytes, self._export_changed, on_acked)
        if not export.ended:
            self._dialogues[ticket.transfer_id] = _Dialogue(export, ticket.endpoint)
            self._pacing.wake()
        return export

    def _export_changed(self, export: KvExport) -> None:
        if export.ended:
            self._dialogues.pop(export.ticket.transfer_id, None)
        self._pacing.wake()

    async def _run(self, agent: NixlAgent) -> None:
        try:
            await self._drive(agent)
        except TransferError as error:
            logger.error("kv_fabric_lost", reason=str(error))
            self.lost.set()
            for dialogue in list(self._dialogues.values()):
                dialogue.export.fail(error)

    async def _drive(self, agent: NixlAgent) -> None:
        while True:
            moved = await self._poll(agent)
            for dialogue in list(self._dialogues.values()):
                try:
                    moved |= await self._advance(agent, dialogue)
                except TransferError as error:
                    dialogue.export.fail(error)
            expecting = bool(self._writes) or any(dialogue.expecting for dialogue in self._dialogues.values())
            await self._pacing.pause(moved=moved, idle_s=0 if expecting else None)

    async def _poll(self, agent: NixlAgent) -> bool:
        polled = await agent.poll(self._writes)
        for handle in (*polled.done, *polled.failed):
            self._writes[handle].write_ends()
        for handle in polled.failed:
            self._writes[handle].fail(TransferError("the receiver is gone: NIXL could not write"))
        for handle in (*polled.done, *polled.failed):
            del self._writes[handle]
        for receiver, data in polled.notifications:
            try:
                self._take(nixl_wire.decode(data))
            except TransferError as error:
                logger.info("kv_message_dropped", receiver=receiver, reason=str(error))
        return any(polled)

    def _take(self, message: nixl_wire.Message) -> None:
        if isinstance(message, nixl_wire.Offer | nixl_wire.Written):
            raise TransferError(f"{type(message).__name__} is not for a sender")
        dialogue = self._dialogues.get(message.transfer_id)
        if dialogue is None:
            return  # The export has ended; its last answers still arrive.
        dialogue.heard_s = time.monotonic()
        export = dialogue.export
        match message:
            case nixl_wire.Accepted(_, receiver) if receiver.epoch == export.ticket.holder.epoch:
                dialogue.accepted = True
            case nixl_wire.Accepted(_, receiver):
                export.fail(TransferError(f"{receiver.instance} has restarted: the ticket is of an earlier epoch"))
            case nixl_wire.Refused(_, refusal):
                export.fail(IncompatibleError(refusal.field, refusal.sender_has, refusal.receiver_has))
            case nixl_wire.Failed(_, reason):
                export.fail(TransferError(f"{export.ticket.holder.instance} refused KV: {reason}"))
            case nixl_wire.Applied(_, seq):
                for piece in dialogue.unanswered.pop(seq, []):
                    export.acked(piece)

    async def _advance(self, agent: NixlAgent, dialogue: _Dialogue) -> bool:
        """Send what may be sent now; say whether anything was. Raises `TransferError` if the receiver is gone."""
        if dialogue.export.ended:
            return False  # Cancelled while another dialogue was being served: its blocks are no longer ours to read.
        now_s = time.monotonic()
        if not dialogue.offered:
            dialogue.offered, dialogue.heard_s = True, now_s
            await self._offer(agent, dialogue)
            return True
        if dialogue.expecting and now_s - dialogue.heard_s > self._silence_s:
            raise TransferError(f"{dialogue.export.ticket.holder.instance} gave no answer for {self._silence_s} s")
        if not dialogue.accepted or len(dialogue.unanswered) == UNANSWERED_BATCHES:
            return False
        pieces = self._batch(dialogue.export)
        if not pieces:
            return False
        if not dialogue.unanswered:
            dialogue.heard_s = now_s
        await self._write(agent, dialogue, pieces)
        return True

    async def _offer(self, agent: NixlAgent, dialogue: _Dialogue) -> None:
        ticket, key = dialogue.export.ticket, dialogue.export.key
        receiver = await agent.connect(ticket.holder, dialogue.endpoint.metadata)
        offer = nixl_wire.Offer(
            wire.VERSION, self._identity, self._memory.spec, self._me, agent.metadata, ticket.transfer_id, key
        )
        await agent.notify(receiver, nixl_wire.encode(offer))

    def _batch(self, export: KvExport) -> list[Piece]:
        pieces: list[Piece] = []
        for _ in range(max(1, BATCH_BYTES // self._memory.spec.block_bytes)):
            piece = export.take()
            if piece is None:
                break
            pieces.append(piece)
        return pieces

    async def _write(self, agent: NixlAgent, dialogue: _Dialogue, pieces: list[Piece]) -> None:
        export, endpoint, block_size = dialogue.export, dialogue.endpoint, self._memory.spec.block_size
        seq = next(self._seq)
        first_token = export.ticket.first_token
        blocks = [
            (
                export.blocks[piece.first_token // block_size],
                endpoint.block_ids[(piece.first_token - first_token) // block_size],
            )
            for piece in pieces
        ]
        written = [
            nixl_wire.WrittenPiece(
                piece.first_token,
                piece.end_token,
                slices.piece_checksum(self._memory, export.blocks, 0, piece),
            )
            for piece in pieces
        ]
        message = nixl_wire.encode(nixl_wire.Written(export.ticket.transfer_id, seq, written))
        dialogue.unanswered[seq] = pieces
        export.write_begins()
        try:
            handle = await agent.write(endpoint.agent, endpoint.address, blocks, message)
        except PddError:
            export.write_ends()
            raise
        self._writes[handle] = export
        for piece in pieces:
            export.sent(piece)
