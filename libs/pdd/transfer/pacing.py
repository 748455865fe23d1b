"""How often to poll where nothing wakes us: at once while things move, ever more rarely while they do not."""

from __future__ import annotations

import asyncio

SHORTEST_PAUSE_S = 0.001  # What an event loop can time.
LONGEST_PAUSE_S = 0.004


class Pacing:
    """The pause before the next poll. `wake` ends a pause early."""

    def __init__(self) -> None:
        self._pause_s = SHORTEST_PAUSE_S
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """There is something to do now."""
        self._woken.set()

    async def pause(self, *, moved: bool, idle_s: float | None) -> None:
        """Wait for the time of the next poll.

        `moved`: the last poll found something. `idle_s`: nothing is expected, so wait this long (None: until `wake`);
        0 while something is.
        """
        if moved or self._woken.is_set():
            self._pause_s = SHORTEST_PAUSE_S
            self._woken.clear()
            await asyncio.sleep(0)
            return
        wait_s = self._pause_s if idle_s == 0 else idle_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()
