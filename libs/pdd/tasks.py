"""Owned background tasks: each is awaited or cancelled by its owner, and none fails in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import structlog

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class Tasks:
    """A bag of tasks with one owner. `close` cancels what still runs and waits for it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work`; an exception it lets out is logged under `name`."""
        task = asyncio.create_task(self._guard(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # One that is cancelled before its first step has never begun to await `work`.
        task.add_done_callback(lambda _: work.close())
        return task

    async def join(self, timeout_s: float) -> None:
        """Wait until all have ended, at most `timeout_s`."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    async def close(self) -> None:
        """Cancel all and wait until they have ended. May be called from one of the tasks: that one is left alone."""
        mine = asyncio.current_task()
        others = [task for task in self._running if task is not mine]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _guard(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("task_failed", task=name)


@contextmanager
def cancellation_kept() -> Generator[None]:
    """End with the cancellation that a library has lost inside: whoever calls it in a loop would go on for ever.

    nats-py waits with `asyncio.wait_for`, which before Python 3.12 loses one that comes together with the result;
    redis-py can swallow one while it writes a command.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
