"""Threads for CPU work on text, so that a long prompt does not hold up other requests' tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdd.errors import CapacityError

ResultT = TypeVar("ResultT")

_THREADS = 2
_MAX_WAITING = 256


class TextWorkers:
    """A bounded pool: a few threads, and a bounded number of jobs that wait for one."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")
        self._jobs = 0

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` on a thread. Raises `CapacityError` if too many jobs wait already."""
        if self._jobs >= _THREADS + _MAX_WAITING:
            raise CapacityError("too many prompts wait to be tokenised")
        self._jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._jobs -= 1

    def close(self) -> None:
        """Drop the jobs that wait; running ones end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
