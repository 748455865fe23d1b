"""The receiving end of the NIXL fabric: peers write straight into the registered pool, and this end verifies.

It owns its agent, the polling task and the table of open transfers. See `nixl_agent` for the environment it needs.
Closing a transfer is no fence: the network may still write into the blocks until the sender's `cancel` has returned.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import structlog

from pdd.errors import TransferError
from pdd.kv import KvMemory, ModelIdentity, NixlEndpoint, Ticket
from pdd.transfer import nixl_wire, slices, wire
from pdd.transfer.incoming import ImportCallback, KvImport, check_room
from pdd.transfer.nixl_agent import NixlAgent
from pdd.transfer.pacing import Pacing
from pdd.transfer.slices import Piece
from pdd.types import AttemptKey, Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

IDLE_S = 0.05
"""How long an offer may go unseen while no transfer is open."""


class NixlReceiver:
    """A `KvReceiver` over NIXL."""

    fences_itself = False

    def __init__(self, memory: KvMemory, identity: ModelIdentity, me: Peer) -> None:
        self._memory = memory
        self._identity = identity
        self._me = me
        self._agent: NixlAgent | None = None
        self.lost = asyncio.Event()
        self._imports: dict[str, KvImport] = {}
        self._writers: dict[str, str] = {}  # Transfer ID -> the agent whose offer was accepted.
        self._pacing = Pacing()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the pool and begin to listen. Raises `TransferError` where NIXL or UCX cannot be used."""
        me = self._me
        self._agent = await NixlAgent.make(f"{me.dc}/{me.role}/{me.instance}/{me.epoch}/receiver", self._memory)
        self._task = asyncio.create_task(self._run(self._agent))

    async def stop(self) -> None:
        """Fail every open import, deregister the pool. Idempotent."""
        for transfer_id in list(self._imports):
            self.close(transfer_id)
        if self._task is not None and self._agent is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            await self._agent.close()

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
        if self._agent is None or self._task is None or self._task.done():
            raise TransferError("the NIXL receiver is not running")
        in_flight_end = first_token if in_flight_end is None else in_flight_end
        check_room(self._memory.spec, blocks, first_token, in_flight_end, end_token)
        endpoint = NixlEndpoint(self._agent.name, self._agent.metadata, self._memory.address, list(blocks))
        ticket = Ticket(uuid.uuid4().hex, self._me, first_token, in_flight_end, end_token, self._memory.spec, endpoint)
        opened = KvImport(ticket, key, blocks, on_progress, on_complete)
        self._imports[ticket.transfer_id] = opened
        self._pacing.wake()
        return opened

    def close(self, transfer_id: str) -> None:
        """See `KvReceiver.close`. Not a fence: see the module."""
        self._writers.pop(transfer_id, None)
        opened = self._imports.pop(transfer_id, None)
        if opened is not None:
            opened.fail(TransferError("the transfer was closed"))

    async def _run(self, agent: NixlAgent) -> None:
        try:
            await self._listen(agent)
        except TransferError as error:
            logger.error("kv_fabric_lost", reason=str(error))
            self.lost.set()
            for opened in self._imports.values():
                opened.fail(error)

    async def _listen(self, agent: NixlAgent) -> None:
        while True:
            notifications = (await agent.poll()).notifications
            for sender, data in notifications:
                try:
                    await self._take(agent, sender, nixl_wire.decode(data))
                except TransferError as error:  # A peer's fault or death ends nothing but its own message.
                    logger.info("kv_message_dropped", sender=sender, reason=str(error))
            expecting = any(not opened.complete and opened.error is None for opened in self._imports.values())
            await self._pacing.pause(moved=bool(notifications), idle_s=0 if expecting else IDLE_S)

    async def _take(self, agent: NixlAgent, sender: str, message: nixl_wire.Message) -> None:
        match message:
            case nixl_wire.Offer():
                await agent.connect(message.sender, message.metadata)
                await agent.notify(sender, nixl_wire.encode(self._answer(sender, message)))
            case nixl_wire.Written():
                await agent.notify(sender, nixl_wire.encode(self._verify(sender, message)))
                await asyncio.sleep(0)
            case _:
                raise TransferError(f"{type(message).__name__} is not for a receiver")

    def _answer(self, sender: str, offer: nixl_wire.Offer) -> nixl_wire.Message:
        ours = nixl_wire.Offer(wire.VERSION, self._identity, self._memory.spec, self._me, b"", "", offer.key)
        refusal = wire.first_difference(ours.meaning(), offer.meaning())
        if refusal is not None:
            logger.warning("kv_sender_refused", sender=offer.sender.instance, field=refusal.field)
            return nixl_wire.Refused(offer.transfer_id, refusal)
        opened = self._imports.get(offer.transfer_id)
        if opened is None or opened.key != offer.key or self._writers.setdefault(offer.transfer_id, sender) != sender:
            return nixl_wire.Failed(offer.transfer_id, wire.NackReason.UNKNOWN)
        return nixl_wire.Accepted(offer.transfer_id, self._me)

    def _verify(self, sender: str, written: nixl_wire.Written) -> nixl_wire.Message:
        """Count the written pieces whose checksums hold over our own memory."""
        opened = self._imports.get(written.transfer_id)
        if opened is None or opened.error is not None or self._writers.get(written.transfer_id) != sender:
            return nixl_wire.Failed(written.transfer_id, wire.NackReason.UNKNOWN)
        for entry in written.pieces:
            piece = Piece(entry.first_token, entry.end_token, 0, self._memory.spec.num_layers)
            if not opened.accepts(piece):
                return self._fail(opened, wire.NackReason.RANGE)
            found = slices.piece_checksum(self._memory, opened.blocks, opened.ticket.first_token, piece)
            if found != entry.checksum:
                return self._fail(opened, wire.NackReason.CHECKSUM)
            opened.applied(piece)
        return nixl_wire.Applied(written.transfer_id, written.seq)

    def _fail(self, opened: KvImport, reason: wire.NackReason) -> nixl_wire.Failed:
        opened.fail(TransferError(f"KV was written but not taken: {reason}"))
        return nixl_wire.Failed(opened.ticket.transfer_id, reason)
