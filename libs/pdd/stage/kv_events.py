"""What an instance tells of its cached blocks: changes as they happen, and all it holds when somebody asks.

Changes are published in order, each with its journal number. One that was lost (the journal overflowed while NATS was
away) leaves a gap in the numbers, which makes the index ask for a snapshot.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import structlog

from pdd.errors import PddError, RemoteError, TooLargeError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus, Endpoint
from pdd.mesh.messages import KvEvent, KvEvents, Snapshot, SnapshotPage
from pdd.mesh.streams import EventLog
from pdd.prefix.hashing import HASH_BYTES
from pdd.prefix.journal import Holdings, KvChange, KvJournal
from pdd.types import Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_LINGER_S = 0.005
"""Changes that come this close together travel in one message."""

_MESSAGE_BYTES = 256 << 10
"""Most that one message carries, so that it does not hold up others on the line for long."""

_APPEND_TIMEOUT_S = 2.0
_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 2.0
_HASH_WIRE_BYTES = HASH_BYTES + 2
_ENVELOPE_BYTES = 512
_EVENT_BYTES = 64
_PAGE_FILL = 0.75
"""Pages are filled by a hash of the block hashes: evenly, but not exactly so."""

_MOST_PAGES = 1 << 16


class KvEventPublisher:
    """See the module. `holdings` is consistent whenever it is called, on any thread; `me` is a P or MD."""

    def __init__(self, bus: Bus, me: Peer, journal: KvJournal, holdings: Callable[[], Holdings]) -> None:
        self._bus = bus
        self._me = me
        self._journal = journal
        self._holdings = holdings
        self._log = EventLog(bus, me.dc, me.dc)
        self._subject = subjects.kv_events(me)
        self._wake = asyncio.Event()
        self._pages: list[SnapshotPage] = []
        self._cutting = asyncio.Lock()

    def endpoints(self) -> list[Endpoint]:
        """What to serve on the bus beside the stage's own verbs."""
        return [Endpoint("snapshot", subjects.endpoint(self._me, "snapshot"), Snapshot, self.snapshot)]

    async def run(self) -> NoReturn:
        """Publish until cancelled. Takes the journal's `on_record` for itself."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            # Seen set, it will be cleared, and the journal emptied after that.
            if not self._wake.is_set():
                try:
                    loop.call_soon_threadsafe(self._wake.set)
                except RuntimeError:
                    return  # The loop has ended before the writer: nobody publishes any more.

        self._journal.on_record = wake
        self._wake.set()  # for what was recorded before
        try:
            await self._ensure()
            while True:
                await self._wake.wait()
                await asyncio.sleep(_LINGER_S)
                self._wake.clear()
                for events in self._messages(self._journal.take()):
                    await self._publish(events)
        finally:
            self._journal.on_record = lambda: None

    async def snapshot(self, message: Snapshot) -> SnapshotPage:
        """One page of all that this instance holds.

        Which page a block is on depends on its hash and the number of pages alone, so pages may be taken at different
        moments. Those of one moment are kept until the last has been asked for.
        """
        if not (0 <= message.page < max(message.pages, 1) and message.pages <= _MOST_PAGES):
            raise RemoteError("malformed", f"no page {message.page} of {message.pages}")
        if not message.pages or len(self._pages) != message.pages:
            async with self._cutting:  # A cut that began earlier must not replace a later one.
                self._pages = await asyncio.to_thread(self._cut, message.pages)
        page = self._pages[message.page]
        if message.page == len(self._pages) - 1:
            self._pages = []
        return page

    def _cut(self, pages: int) -> list[SnapshotPage]:
        held = self._holdings()
        if not pages:
            room = (self._message_bytes - _ENVELOPE_BYTES) * _PAGE_FILL / _HASH_WIRE_BYTES
            pages = int((len(held.stored) + len(held.pinned) + len(held.in_flight)) / room) + 1
        columns = [_spread(hashes, pages) for hashes in (held.stored, held.pinned, held.in_flight)]
        return [
            SnapshotPage(self._me, held.seq, page, pages, stored, pinned, in_flight)
            for page, (stored, pinned, in_flight) in enumerate(zip(*columns, strict=True))
        ]

    @property
    def _message_bytes(self) -> int:
        return min(_MESSAGE_BYTES, self._bus.max_payload)

    def _messages(self, changes: list[KvChange]) -> Iterator[list[KvEvent]]:
        """Consecutive changes, as many together as fit into a message. A single one always does: the journal cuts."""
        room, waiting = self._message_bytes - _ENVELOPE_BYTES, deque(changes)
        while waiting:
            events: list[KvEvent] = []
            used = 0
            while waiting:
                size = _EVENT_BYTES + len(waiting[0].hashes) * _HASH_WIRE_BYTES
                if events and used + size > room:
                    break
                used += size
                change = waiting.popleft()
                events.append(KvEvent(change.seq, change.kind, list(change.hashes)))
            yield events

    async def _publish(self, events: list[KvEvent]) -> None:
        """Say it until it is stored: twice does no harm, and meanwhile the journal is bounded."""
        message = KvEvents(self._me, events)
        pause = _PAUSE_S
        while True:
            try:
                await self._log.append(self._subject, message, timeout_s=_APPEND_TIMEOUT_S)
                return
            except TooLargeError as error:
                logger.error("kv_events_lost", first_seq=events[0].seq, last_seq=events[-1].seq, error=str(error))
                return
            except PddError as error:
                if pause == _PAUSE_S:
                    logger.warning("kv_events_delayed", first_seq=events[0].seq, error=str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            await self._ensure()

    async def _ensure(self) -> None:
        try:
            await self._log.ensure()
        except PddError as error:
            logger.info("kv_event_stream_unavailable", error=str(error))


def _spread(hashes: Iterable[bytes], pages: int) -> list[list[bytes]]:
    columns: list[list[bytes]] = [[] for _ in range(pages)]
    for one in hashes:
        columns[zlib.crc32(one) % pages].append(one)
    return columns
