"""Requests for which no stage has room right now, in the order in which they came.

Only the first of them asks the stages again; whoever comes later stands behind. Nobody holds anything while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from pdd.errors import CapacityError


class WaitingLine:
    """See the module. At most `most` requests wait; `now` is a monotonic clock in seconds."""

    def __init__(self, most: int, now: Callable[[], float]) -> None:
        self.waiting = 0
        self._most = most
        self._now = now
        self._first = asyncio.Lock()
        self._left = asyncio.Event()

    @asynccontextmanager
    async def turn(self, deadline: float, *, bounded: bool = True) -> AsyncGenerator[None]:
        """Stand in line until it is one's turn to ask.

        Raises `CapacityError` if time runs out, or at once if the line is full and this request is `bounded` by that.
        """
        if bounded and self.waiting >= self._most:
            raise CapacityError(f"{self.waiting} requests wait for room already")
        self.waiting += 1
        try:
            try:
                async with asyncio.timeout(deadline - self._now()):
                    await self._first.acquire()
            except TimeoutError:
                raise CapacityError(f"no stage had room for those before this request; {self.waiting} wait") from None
            try:
                yield
            finally:
                self._first.release()
        finally:
            self.waiting -= 1

    def watch(self) -> None:
        """Look out for requests that leave, from now on."""
        self._left.clear()

    async def pause(self, longest_s: float) -> None:
        """Wait until a request has left the stages since `watch`, or `longest_s`."""
        try:
            async with asyncio.timeout(longest_s):
                await self._left.wait()
        except TimeoutError:
            pass

    def somebody_left(self) -> None:
        """A request gives its room back."""
        self._left.set()
