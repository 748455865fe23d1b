"""A transfer as its receiver sees it. State only: the transport that opened it writes the bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from pdd.errors import TransferError
from pdd.kv import KvSpec, Ticket
from pdd.transfer.coverage import Coverage
from pdd.transfer.slices import Piece, layer_token_bytes
from pdd.types import AttemptKey

ImportCallback = Callable[["KvImport"], None]


class KvImport:
    """KV that a peer sends for one ticket. Made by a receiver's `open`, ended by its `close`.

    `blocks` are the receiver's, in token order; the first one begins with token `ticket.first_token`.
    Callbacks run on the event loop, after the call that caused them.
    """

    def __init__(
        self,
        ticket: Ticket,
        key: AttemptKey,
        blocks: Sequence[int],
        on_progress: ImportCallback | None,
        on_complete: ImportCallback | None,
    ) -> None:
        self.ticket = ticket
        self.key = key
        self.blocks = tuple(blocks)
        self.received_bytes = 0
        self.error: TransferError | None = None
        self._coverage = Coverage(ticket.first_token, ticket.end_token, ticket.spec.num_layers)
        self._on_progress = on_progress
        self._on_complete = on_complete
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._first_byte_s: float | None = None
        self._last_byte_s = 0.0
        if self.complete:
            self._complete()

    @property
    def received_tokens(self) -> int:
        """How many leading tokens of the ticket's range are here in every layer, verified."""
        return self._coverage.whole_tokens

    @property
    def complete(self) -> bool:
        """Whether every token of every layer arrived and was verified."""
        return self._coverage.complete

    @property
    def own_complete(self) -> bool:
        """Whether all has arrived that does not come under another ticket."""
        ticket = self.ticket
        return self.received_bytes >= (ticket.end_token - ticket.in_flight_end) * ticket.spec.token_bytes

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first applied bytes until now, or until the last ones once complete. 0 before the first."""
        if self._first_byte_s is None:
            return 0.0
        return (self._last_byte_s if self.complete else time.monotonic()) - self._first_byte_s

    def arrived_elsewhere(self, end_token: int) -> None:
        """Tokens below `end_token` came under another ticket, into the same blocks."""
        end = min(end_token, self.ticket.in_flight_end)
        first = self.ticket.first_token + self.received_tokens
        if end <= first or self._ended.is_set():
            return
        self._coverage.add(Piece(first, end, 0, self.ticket.spec.num_layers))
        self._advanced()

    async def wait_complete(self) -> None:
        """Wait until `complete`; the caller sets a deadline. Raises `TransferError` if it fails or is closed before."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    # What follows is for the transport.

    def accepts(self, piece: Piece) -> bool:
        """Whether `piece` belongs to this transfer."""
        return self._coverage.contains(piece)

    def applied(self, piece: Piece) -> None:
        """Count `piece`, whose verified bytes are in the blocks. It may have been counted before."""
        self._last_byte_s = time.monotonic()
        if self._first_byte_s is None:
            self._first_byte_s = self._last_byte_s
        if self.complete:
            return
        self.received_bytes += self._coverage.add(piece) * layer_token_bytes(self.ticket.spec)
        self._advanced()

    def fail(self, error: TransferError) -> None:
        """End the transfer with `error`, unless it is complete."""
        if not self._ended.is_set():
            self.error = error
            self._ended.set()

    def _advanced(self) -> None:
        if self._on_progress is not None:
            self._loop.call_soon(self._on_progress, self)
        if self.complete:
            self._complete()

    def _complete(self) -> None:
        self._ended.set()
        if self._on_complete is not None:
            self._loop.call_soon(self._on_complete, self)


def check_room(spec: KvSpec, blocks: Sequence[int], first_token: int, in_flight_end: int, end_token: int) -> None:
    """Raise `ValueError` unless `blocks` hold tokens `[first_token, end_token)`, block aligned at the front."""
    if first_token % spec.block_size or not 0 <= first_token <= in_flight_end <= end_token:
        raise ValueError(f"tokens [{first_token}, {end_token}) do not begin at a block of {spec.block_size}")
    if len(blocks) < spec.blocks_for(end_token - first_token):
        raise ValueError(f"{len(blocks)} blocks of {spec.block_size} do not hold {end_token - first_token} tokens")
