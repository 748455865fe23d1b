"""The one thread that runs an engine's step loop, and its bridge to the event loop.

Commands run between steps, on the engine's thread, in the order in which they were given. Results of steps arrive on
the event loop, in order; a command's answer arrives after the results of all steps before it. If the event loop falls
behind by `MAX_UNDELIVERED` results, the step loop waits for it. With nothing to compute it sleeps.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog
import torch

from pdd.engine.engine import Engine, EngineStatus, StepResult
from pdd.errors import PddError

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_UNDELIVERED = 16

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Pace:
    """A step takes at least `step_s` + `token_s` for each scheduled token, as on the chip that is stood for."""

    step_s: float = 0.0
    token_s: float = 0.0

    def step_time_s(self, scheduled_tokens: int) -> float:
        """Least duration of a step."""
        return self.step_s + self.token_s * scheduled_tokens


class EngineThread:
    """See the module. Made and used on the event loop.

    `failed` carries the error that ended the step loop, if one did; whoever owns the process watches it.
    `pace_overruns` counts steps whose real compute took longer than the pace allows.
    """

    def __init__(self, engine: Engine, *, threads: int = 1, pace: Pace | None = None) -> None:
        """`threads` are torch's intra-op threads; `pace` slows steps down (None: as fast as they go)."""
        self._engine = engine
        self._threads = threads
        self._pace = pace if pace != Pace() else None
        self._loop = asyncio.get_running_loop()
        self._on_step: Callable[[StepResult], None] | None = None
        self._changed = threading.Condition()
        self._commands: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._undelivered = 0
        self._stopping = threading.Event()
        self._status = engine.status()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.pace_overruns = 0

    def start(self, on_step: Callable[[StepResult], None]) -> None:
        """Start the step loop. `on_step` is called on the event loop with each step's result."""
        self._on_step = on_step
        self._engine.cache.on_free.append(self._wake)
        self._thread.start()

    async def stop(self) -> None:
        """End the step loop after the step it is in. Commands that did not run fail. Idempotent."""
        self._stopping.set()
        self._wake()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._refuse_commands(PddError("the engine has stopped"))

    def call(self, command: Callable[[Engine], Answer]) -> asyncio.Future[Answer]:
        """Run `command` between steps. It is queued before this returns; the future brings its answer or error.

        Cancelling the future keeps a command that has not begun from running.
        """
        answer: Future[Answer] = Future()
        with self._changed:
            if self._stopping.is_set():
                answer.set_exception(PddError("the engine has stopped"))
            else:
                self._commands.append((command, answer))
                self._changed.notify_all()
        return asyncio.wrap_future(answer)

    def status(self) -> EngineStatus:
        """The engine's counts as of the last step or command; those of blocks as of now."""
        cache = self._engine.cache
        return replace(self._status, free_blocks=cache.free_blocks, evictable_blocks=cache.evictable_blocks)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._wait_for_work():
                self._run_commands()
                if self._engine.has_work():
                    self._step()
                self._status = self._engine.status()
        except Exception as error:
            logger.exception("engine_failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False if that is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping.is_set() or self._commands or self._engine.has_work())
        return not self._stopping.is_set()

    def _run_commands(self) -> None:
        with self._changed:
            commands, self._commands = self._commands, deque()
        for command, answer in commands:
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                result = command(self._engine)
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)

    def _step(self) -> None:
        result = self._engine.step()
        if self._pace is not None:
            rest_s = self._pace.step_time_s(result.scheduled_tokens) - result.duration_s
            if rest_s < 0:
                self.pace_overruns += 1
            elif self._stopping.wait(rest_s):
                return
        with self._changed:
            self._changed.wait_for(lambda: self._stopping.is_set() or self._undelivered < MAX_UNDELIVERED)
            if self._stopping.is_set():
                return
            self._undelivered += 1
        self._loop.call_soon_threadsafe(self._deliver, result)

    def _deliver(self, result: StepResult) -> None:
        with self._changed:
            self._undelivered -= 1
            self._changed.notify_all()
        if self._on_step is None or self.failed.done():
            return
        try:
            self._on_step(result)
        except Exception as error:
            logger.exception("step_result_not_handled")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._stopping.set()
        self._wake()
        self._refuse_commands(PddError(f"the engine failed: {error}"))
        if not self.failed.done():
            self.failed.set_exception(error)

    def _refuse_commands(self, error: PddError) -> None:
        with self._changed:
            commands, self._commands = self._commands, deque()
        for _, answer in commands:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
