"""A transfer as its sender sees it. State only: the transport that opened it reads the blocks and moves the bytes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pdd.errors import PddError, TransferError
from pdd.kv import KvSpec, Ticket
from pdd.transfer.slices import Piece, split
from pdd.types import AttemptKey

ExportCallback = Callable[["KvExport"], None]


class KvExport:
    """KV sent for one ticket. Made by a sender's `open`; ends delivered, failed or cancelled.

    Tokens that the ticket calls in flight wait for the holder's word (`resolve_in_flight`); those after them do not.

    `blocks` are the sender's, in token order from token 0. They must stay as they are until `wait_delivered` or
    `cancel` has returned.
    """

    def __init__(
        self,
        ticket: Ticket,
        key: AttemptKey,
        blocks: Sequence[int],
        spec: KvSpec,
        max_piece_bytes: int,
        on_change: ExportCallback,
        on_acked: ExportCallback | None,
    ) -> None:
        """`on_change` tells the transport of new work or the end."""
        self.ticket = ticket
        self.key = key
        self.blocks = tuple(blocks)
        self.payload_bytes_total = (ticket.end_token - ticket.in_flight_end) * spec.token_bytes
        """Bytes to send, as far as is known: what is in flight joins them if the holder asks for it."""
        self.sent_bytes = 0
        self.acked_bytes = 0
        self.corrupted = 0
        """Pieces that arrived with a wrong checksum."""
        self.error: PddError | None = None
        self._first_sent_s: float | None = None
        self._spec = spec
        self._max_piece_bytes = max_piece_bytes
        self._in_flight = ticket.in_flight_end > ticket.first_token
        self._pieces: Iterator[Piece] = iter(())
        self._next: Piece | None = None
        self._again: deque[Piece] = deque()
        self._computed_tokens = 0
        self._on_change = on_change
        self._on_acked = on_acked
        self._ended = asyncio.Event()
        self._writes = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._queue(ticket.in_flight_end, ticket.end_token)
        if self.done:
            self._ended.set()

    @property
    def done(self) -> bool:
        """Whether the receiver has all of it."""
        return not self._in_flight and self.acked_bytes == self.payload_bytes_total

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first bytes left; 0 before that."""
        return 0.0 if self._first_sent_s is None else time.monotonic() - self._first_sent_s

    @property
    def unsettled_bytes(self) -> int:
        """Bytes that the receiver is not known to have, what is in flight to it under another ticket among them."""
        in_flight = self.ticket.in_flight_end - self.ticket.first_token if self._in_flight else 0
        return self.payload_bytes_total - self.acked_bytes + in_flight * self._spec.token_bytes

    @property
    def ended(self) -> bool:
        """Whether it is done, failed or cancelled: nothing more will be read for it."""
        return self._ended.is_set()

    def advance(self, computed_tokens: int) -> None:
        """Say that KV of all tokens below `computed_tokens` is in the blocks and will not change.

        Called once per chunk, after the chunk's KV can be read from host memory: nothing else makes a block readable.
        A lower value than before is ignored.
        """
        if computed_tokens > self._computed_tokens:
            self._computed_tokens = computed_tokens
            self._on_change(self)

    def resolve_in_flight(self, missing_from: int) -> None:
        """The holder has all tokens below `missing_from` and wants the rest of those in flight sent; perhaps none.

        Said again it changes nothing.
        """
        if not self._in_flight or self.ended:
            return
        self._in_flight = False
        first, end = max(missing_from, self.ticket.first_token), self.ticket.in_flight_end
        self.payload_bytes_total += max(end - first, 0) * self._spec.token_bytes
        self._queue(first, end)
        if self.done:
            self._ended.set()
        self._on_change(self)

    async def wait_delivered(self) -> None:
        """Wait until the receiver has applied all of it; the caller sets a deadline.

        Raises `TransferError`, or `IncompatibleError` if the receiver refused this sender.
        """
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    async def cancel(self) -> None:
        """End it. When this returns the transport neither reads its blocks nor writes into the receiver's any more.

        By the stream that is at once. By NIXL it takes until the writes under way are over, towards a dead peer until
        UCX gives it up; the caller sets a deadline, and does not reuse the blocks if it passes.
        """
        self.fail(TransferError("the transfer was cancelled"))
        await self._quiet.wait()

    # What follows is for the transport.

    @property
    def backlog_bytes(self) -> int:
        """Bytes not yet applied by the receiver, computed or not."""
        return 0 if self.ended else self.payload_bytes_total - self.acked_bytes

    def take(self) -> Piece | None:
        """The next piece whose KV exists, or None."""
        if self._again:
            return self._again.popleft()
        piece = self._next
        if piece is None or piece.end_token > self._computed_tokens:
            return None
        self._next = next(self._pieces, None)
        return piece

    def give_back(self, piece: Piece) -> None:
        """Have `piece` taken again: it did not arrive."""
        self._again.append(piece)
        self._on_change(self)

    def sent(self, piece: Piece) -> None:
        """Count `piece` as handed to the line, each time it is."""
        self._first_sent_s = self._first_sent_s or time.monotonic()
        self.sent_bytes += piece.nbytes(self._spec)

    def acked(self, piece: Piece) -> None:
        """Count `piece` as applied by the receiver; once for each piece."""
        if self.ended:
            return
        self.acked_bytes += piece.nbytes(self._spec)
        if self._on_acked is not None:
            asyncio.get_running_loop().call_soon(self._on_acked, self)
        if self.done:
            self._ended.set()
            self._on_change(self)

    def fail(self, error: PddError) -> None:
        """End it with `error`, unless it has ended."""
        if not self.ended:
            self.error = error
            self._ended.set()
            self._on_change(self)

    def _queue(self, first_token: int, end_token: int) -> None:
        rest = self._pieces if self._next is None else itertools.chain((self._next,), self._pieces)
        self._pieces = itertools.chain(split(self._spec, first_token, end_token, self._max_piece_bytes), rest)
        self._next = next(self._pieces, None)

    def write_begins(self) -> None:
        """A write that reads the blocks directly is about to start; `cancel` waits for its end."""
        self._writes += 1
        self._quiet.clear()

    def write_ends(self) -> None:
        """A write announced by `write_begins` is over."""
        self._writes -= 1
        if self._writes == 0:
            self._quiet.set()
