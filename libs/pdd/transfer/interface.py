"""What a transport looks like to a stage. Two transports implement it: the TCP stream and the NIXL fabric."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from pdd.kv import Ticket
from pdd.transfer.incoming import ImportCallback, KvImport
from pdd.transfer.outgoing import ExportCallback, KvExport
from pdd.types import AttemptKey


class KvReceiver(Protocol):
    """Accepts KV into one pool."""

    lost: asyncio.Event
    """Set when the transport has broken down for good: nothing will ever arrive again, so the process should end."""

    fences_itself: bool
    """Whether nothing is written into a transfer's blocks once `close` has returned. If not, the sender must have
    confirmed its `KvExport.cancel` (or be dead and fenced) before the blocks are used again."""

    async def start(self) -> None:
        """Begin to accept. Raises `OSError` or `TransferError`."""
        ...

    async def stop(self) -> None:
        """Fail every open import and let go of everything. Idempotent."""
        ...

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
        """Issue a ticket for tokens `[first_token, end_token)`; `blocks[0]` begins with `first_token` (block aligned).

        Tokens below `in_flight_end` (None: `first_token`) come under another ticket; see `Ticket`.
        Raises `ValueError` if the blocks do not hold them.
        """
        ...

    def close(self, transfer_id: str) -> None:
        """Refuse whatever still arrives for the ticket. A complete import stays complete. Unknown IDs are ignored."""
        ...


class KvSender(Protocol):
    """Sends KV out of one pool."""

    lost: asyncio.Event
    """As `KvReceiver.lost`: nothing will ever be sent again."""

    def open(
        self, ticket: Ticket, key: AttemptKey, blocks: Sequence[int], *, on_acked: ExportCallback | None = None
    ) -> KvExport:
        """Begin to send what `ticket` asks for out of `blocks` (in token order from token 0).

        Nothing is read before `KvExport.advance`. Raises `IncompatibleError` if the two pools cannot exchange KV.
        """
        ...

    async def stop(self) -> None:
        """Fail every live export and let go of everything. Idempotent."""
        ...
