"""Which transport carries KV inside a datacenter, and one sender for tickets of either kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import structlog

from pdd.errors import TransferError
from pdd.kv import KvMemory, ModelIdentity, StreamEndpoint, Ticket
from pdd.transfer.interface import KvReceiver
from pdd.transfer.nixl_receiver import NixlReceiver
from pdd.transfer.nixl_sender import NixlSender
from pdd.transfer.outgoing import ExportCallback, KvExport
from pdd.transfer.stream_receiver import StreamReceiver
from pdd.transfer.stream_sender import StreamSender
from pdd.types import AttemptKey, Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

FabricChoice = Literal["auto", "nixl", "stream"]
"""`auto`: NIXL where it is installed and comes up, otherwise the stream."""


class Senders:
    """A `KvSender` that opens an export on the transport its ticket names. It owns both senders."""

    def __init__(self, stream: StreamSender, nixl: NixlSender | None) -> None:
        self.stream = stream
        self.nixl = nixl
        self.lost = stream.lost if nixl is None else nixl.lost

    def open(
        self, ticket: Ticket, key: AttemptKey, blocks: Sequence[int], *, on_acked: ExportCallback | None = None
    ) -> KvExport:
        """See `KvSender.open`. Raises `TransferError` if the ticket is for NIXL and there is none here."""
        if isinstance(ticket.endpoint, StreamEndpoint):
            return self.stream.open(ticket, key, blocks, on_acked=on_acked)
        if self.nixl is None:
            raise TransferError(f"{ticket.holder.instance} takes KV by NIXL, which this instance does not have")
        return self.nixl.open(ticket, key, blocks, on_acked=on_acked)

    async def stop(self) -> None:
        """Stop both."""
        await self.stream.stop()
        if self.nixl is not None:
            await self.nixl.stop()


async def make_fabric_receiver(
    choice: FabricChoice,
    memory: KvMemory,
    identity: ModelIdentity,
    me: Peer,
    *,
    host: str,
    port: int,
    advertise: tuple[str, int] | None = None,
) -> KvReceiver:
    """A started receiver. `host`, `port` and `advertise` are the stream's.

    Raises `TransferError` if `choice` is `nixl` and it does not come up, `OSError` if the stream cannot be bound.
    """
    reason = "asked for"
    if choice != "stream":
        nixl = NixlReceiver(memory, identity, me)
        try:
            await nixl.start()
        except TransferError as error:
            if choice == "nixl":
                raise
            reason = str(error)
        else:
            logger.info("fabric_chosen", role="receiver", fabric="nixl", reason=f"{choice}: it came up")
            return nixl
    stream = StreamReceiver(memory, identity, me, host=host, port=port, advertise=advertise)
    await stream.start()
    logger.info("fabric_chosen", role="receiver", fabric="stream", reason=reason)
    return stream


async def make_fabric_sender(
    choice: FabricChoice, memory: KvMemory, identity: ModelIdentity, me: Peer, *, stream: StreamSender
) -> Senders:
    """A sender for tickets of both kinds: `stream`, and a started `NixlSender` unless `choice` or the machine says no.

    Raises `TransferError` if `choice` is `nixl` and it does not come up.
    """
    if choice == "stream":
        logger.info("fabric_chosen", role="sender", fabric="stream", reason="asked for")
        return Senders(stream, None)
    nixl = NixlSender(memory, identity, me)
    try:
        await nixl.start()
    except TransferError as error:
        if choice == "nixl":
            raise
        logger.info("fabric_chosen", role="sender", fabric="stream", reason=str(error))
        return Senders(stream, None)
    logger.info("fabric_chosen", role="sender", fabric="nixl", reason=f"{choice}: it came up")
    return Senders(stream, nixl)
