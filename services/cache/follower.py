"""Keeps the index equal to what one instance holds: applies its changes in order, and asks for a snapshot when it must.

A snapshot is needed when the index does not know this epoch (a new instance, a Redis that lost its memory), when a
change is missing, when more changes came than could be applied, or when the instance's beats tell of changes that do
not arrive. Then everything begins from what the instance says it holds; changes that came meanwhile are applied on top.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import structlog
from redis.exceptions import RedisError

from pdd.errors import PddError, StaleError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus
from pdd.mesh.messages import KvEvents, Snapshot, SnapshotPage
from pdd.prefix.index import PrefixIndex, Space
from pdd.tasks import cancellation_kept
from pdd.types import Peer
from services.cache.metrics import CacheMetrics

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

TOUCH_INTERVAL_S = 1.0
BEHIND_S = 3.0
"""Changes that beats tell of, but that do not come for so long, are fetched by a snapshot."""

_MOST_WAITING_HASHES = 200_000
_MOST_WAITING_MESSAGES = 1024
_PAGE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_CALM_S = 10.0
"""Two snapshots further apart than this have nothing to do with each other."""


class Follower:
    """See the module. One epoch of `peer`; `now` is a monotonic clock in seconds.

    `timeout_s` bounds one operation on the index. `on_silence` hears when changes did not come by themselves.
    """

    def __init__(
        self,
        bus: Bus,
        index: PrefixIndex,
        space: Space,
        peer: Peer,
        *,
        timeout_s: float,
        now: Callable[[], float],
        on_silence: Callable[[Peer], None],
        metrics: CacheMetrics,
    ) -> None:
        self.space = space
        self.peer = peer
        self._bus = bus
        self._index = index
        self._timeout_s = timeout_s
        self._now = now
        self._on_silence = on_silence
        self._metrics = metrics
        self._waiting: deque[KvEvents] = deque()
        self._waiting_hashes = 0
        self._work = asyncio.Event()
        self._stale = False
        self._told = 0
        self._applied = -1
        self._moved_at = now()
        self._touched_at = float("-inf")
        self._snapshot_at = float("-inf")
        self._snapshot_pause = _FIRST_PAUSE_S

    def offer(self, message: KvEvents) -> None:
        """Changes of this instance have come. Never blocks: if there are too many, a snapshot replaces them."""
        if not message.events or message.events[-1].seq <= self._applied:
            return  # Known for long: a stream that was built anew tells its history again.
        hashes = sum(len(event.hashes) for event in message.events)
        full = self._waiting_hashes + hashes > _MOST_WAITING_HASHES or len(self._waiting) >= _MOST_WAITING_MESSAGES
        if full and self._waiting:
            logger.warning("kv_events_overflowed", instance=self.peer.instance, messages=len(self._waiting))
            self._metrics.events((event.kind for one in self._waiting for event in one.events), "dropped")
            self._waiting.clear()
            self._waiting_hashes = 0
            self._stale = True
        self._waiting.append(message)
        self._waiting_hashes += hashes
        self._work.set()

    def told(self, seq: int) -> None:
        """The instance's beat names change `seq` as its newest."""
        self._told = max(self._told, seq)

    async def run(self) -> None:
        """Follow until cancelled. Trouble is waited out: what cannot be applied now is applied later."""
        pause = 0.0
        while True:
            try:
                with cancellation_kept():
                    await self._step()
                if pause:
                    logger.info("index_follows_again", instance=self.peer.instance)
                pause = 0.0
            except (TimeoutError, RedisError, OSError, PddError) as error:
                if not pause:
                    logger.warning(
                        "index_cannot_follow", instance=self.peer.instance, error=str(error) or type(error).__name__
                    )
                pause = min(max(2 * pause, _FIRST_PAUSE_S), 1.0)
            if pause:
                await asyncio.sleep(pause)
            elif not self._stale:
                await self._rest()

    async def _rest(self) -> None:
        due = self._touched_at + TOUCH_INTERVAL_S - self._now()
        try:
            async with asyncio.timeout(max(due, 0.0)):
                await self._work.wait()
        except TimeoutError:
            return

    async def _step(self) -> None:
        self._work.clear()
        if self._now() - self._touched_at >= TOUCH_INTERVAL_S:
            await self._touch()
        if self._stale:
            await self._replace()
        while self._waiting and not self._stale:
            message = self._waiting[0]
            async with asyncio.timeout(self._timeout_s):
                applied = await self._index.apply(self.space, self.peer, message.events)
            if not self._waiting or self._waiting[0] is not message:
                continue  # It has overflowed while it was applied.
            if applied:
                self._waiting.popleft()
                self._waiting_hashes -= sum(len(event.hashes) for event in message.events)
                self._metrics.events((event.kind for event in message.events), "applied")
            else:
                self._stale = True

    async def _touch(self) -> None:
        async with asyncio.timeout(self._timeout_s):
            applied = await self._index.touch(self.space, self.peer)
        now = self._now()
        self._touched_at = now
        if applied is None:
            self._stale = True
        elif applied != self._applied or applied >= self._told:
            self._applied = applied
            self._moved_at = now
        elif now - self._moved_at > BEHIND_S:
            logger.warning("kv_events_missing", instance=self.peer.instance, applied=applied, newest=self._told)
            self._on_silence(self.peer)
            self._moved_at = now
            self._stale = True

    async def _replace(self) -> None:
        """Replace what the index knows by a snapshot. One that follows another closely waits a while."""
        now = self._now()
        self._snapshot_pause = (
            _FIRST_PAUSE_S if now - self._snapshot_at > _CALM_S else min(2 * self._snapshot_pause, _LONGEST_PAUSE_S)
        )
        if self._snapshot_pause > _FIRST_PAUSE_S:
            await asyncio.sleep(self._snapshot_pause)
        self._snapshot_at = now
        self._stale = False  # What goes wrong from here on makes it so again.
        try:
            seq, pages = await self._fetch()
        except BaseException:
            self._stale = True
            raise
        self._metrics.snapshot(self.peer.role)
        logger.info("snapshot_taken", instance=self.peer.instance, epoch=self.peer.epoch, seq=seq, pages=pages)

    async def _fetch(self) -> tuple[int, int]:
        replacement = self._index.replacement(self.space, self.peer)
        first = await self._page(Snapshot())
        page = first
        for number in range(1, first.pages + 1):
            async with asyncio.timeout(self._timeout_s):
                await replacement.add(page)
            if number < first.pages:
                page = await self._page(Snapshot(number, first.pages))
        async with asyncio.timeout(self._timeout_s):
            await replacement.commit(first.seq)
        return first.seq, first.pages

    async def _page(self, question: Snapshot) -> SnapshotPage:
        subject = subjects.endpoint(self.peer, "snapshot")
        page = await self._bus.request(subject, question, SnapshotPage, timeout_s=_PAGE_TIMEOUT_S)
        if page.peer != self.peer:
            raise StaleError(f"{self.peer.role} {self.peer.instance} has restarted")
        return page
