"""The one thread that runs an engine's step loop, and the bridge to the event loop.

Commands run between steps, on the engine's thread, in the order in which they were given; step results arrive on the
event loop in order. At most 64 results wait to be taken: then the step loop waits, not the network.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import torch

from pdd.engine.engine import Engine, EngineStatus, StepResult

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_UNDELIVERED_RESULTS = 64

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
    """See the module. `failed` carries the exception that ended the step loop, if one did."""

    def __init__(self, engine: Engine, *, threads: int, pace: Pace) -> None:
        self._engine = engine
        self._threads = threads
        self._pace = pace
        self._on_step: Callable[[StepResult], None] = lambda result: None
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._stopping = threading.Event()
        self._undelivered = threading.Semaphore(_UNDELIVERED_RESULTS)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.pace_overruns = 0

    def start(self, on_step: Callable[[StepResult], None]) -> None:
        """Start the step loop; `on_step` is called on the event loop with each result, in order."""
        self._on_step = on_step
        self._thread.start()

    async def stop(self) -> None:
        """End the step loop after the step it is in. Commands that were not run are cancelled."""
        self._stopping.set()
        with self._wake:
            self._wake.notify()
        self._undelivered.release()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        for _, answer in self._commands:
            answer.cancel()

    def call(self, command: Callable[[Engine], Answer]) -> asyncio.Future[Answer]:
        """Run `command` between steps. It is queued at once, before this returns; the future brings its answer."""
        answer: Future[Answer] = Future()
        with self._wake:
            self._commands.append((command, answer))
            self._wake.notify()
        return asyncio.wrap_future(answer)

    def status(self) -> EngineStatus:
        """The engine's counts, without waiting for the step in progress."""
        return self._engine.status()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._next_commands():
                if self._engine.has_work():
                    self._step()
        except Exception as error:
            logger.exception("engine_failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _next_commands(self) -> bool:
        """Wait until there is something to do, run the commands given; False when it is time to stop."""
        with self._wake:
            while not (self._commands or self._stopping.is_set() or self._engine.has_work()):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command, answer in commands:
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(command(self._engine))
            except Exception as error:
                answer.set_exception(error)
        return not self._stopping.is_set()

    def _step(self) -> None:
        result = self._engine.step()
        rest_s = self._pace.step_time_s(result.scheduled_tokens) - result.duration_s
        if rest_s > 0:
            self._stopping.wait(rest_s)
        elif self._pace != Pace():
            self.pace_overruns += 1
        self._undelivered.acquire()
        if not self._stopping.is_set():
            self._loop.call_soon_threadsafe(self._deliver, result)

    def _deliver(self, result: StepResult) -> None:
        self._undelivered.release()
        self._on_step(result)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
