"""Runs requests over the mesh: attempts, what stages say of them, repair of gaps, and the end of each.

Owns this gateway's live requests and its beat. What the assembler has emitted is all that a client has seen; a new
attempt starts from prompt + emitted IDs, so the client sees a pause, never a changed, lost or repeated token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from pdd.errors import (
    CapacityError,
    DeadlineError,
    PddError,
    RemoteError,
    StaleError,
    TooLargeError,
    UnavailableError,
    UnreachableError,
)
from pdd.mesh import subjects
from pdd.mesh.bus import Bus, Endpoint
from pdd.mesh.messages import Failed, Finished, GatewayBeat, Ok, Progress, Replay, Replayed, TokenBatch
from pdd.mesh.registry import BEAT_INTERVAL_S, Registry
from pdd.tasks import Tasks
from pdd.types import AttemptKey, FinishReason, Peer, Role, TokenEvent
from services.gateway.assembler import Assembler
from services.gateway.attempt import Attempt
from services.gateway.generation import Emission, GenerationRequest, Report
from services.gateway.prefix_view import PrefixView
from services.gateway.router import Router
from services.gateway.timeline import Timeline

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_HOPELESS = frozenset({TooLargeError.code, CapacityError.code, UnavailableError.code, "malformed"})
"""Errors that another attempt would only meet again."""

_REPLAY_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Patience: for room, for any sign of progress, for a missing token; and how often to try."""

    queue_timeout_s: float
    stall_timeout_s: float
    replay_after_s: float
    max_attempts: int
    relay_max_tokens: int


class LiveRequest:
    """One request in the gateway. Iterating it yields emissions; its driver runs attempts until one ends the answer."""

    def __init__(self, coordinator: Coordinator, request: GenerationRequest) -> None:
        self._coordinator = coordinator
        self._request = request
        self._timeline = Timeline(
            Report(request_id=request.request_id, pipeline=request.pipeline), coordinator.now, request.waited_s
        )
        self._assembler = Assembler(len(request.prompt))
        self._fresh: list[int] = []
        self._finish: FinishReason | None = None
        self._error: PddError | None = None
        self._attempt_error: PddError | None = None
        self._attached = False
        """Whether stages for the whole answer were found once: before, an error can still be an HTTP status."""
        self._changed = asyncio.Event()
        self._readable = asyncio.Event()
        self._last_sign = coordinator.now()
        self._owner: Peer | None = None
        self.attempt: Attempt | None = None

    @property
    def report(self) -> Report:
        """How the request is going."""
        return self._timeline.report

    async def __aiter__(self) -> AsyncIterator[Emission]:
        while True:
            await self._readable.wait()
            self._readable.clear()
            if self._attached or self._finish is not None:
                tokens, self._fresh = self._fresh, []
                if tokens or self._finish is not None:
                    yield Emission(tokens, self._finish)
            if self._finish is not None:
                return
            if self._error is not None:
                raise self._error

    async def drive(self) -> None:
        """Run attempts until the answer has ended or no further attempt is worth it."""
        limits = self._coordinator.limits
        try:
            for number in range(1, limits.max_attempts + 1):
                self.report.attempts = number
                error = await self._run_attempt(AttemptKey(self._request.request_id, number))
                if error is None:
                    return
                logger.warning("attempt_lost", request_id=self._request.request_id, attempt=number, error=str(error))
                if error.code in _HOPELESS or number == limits.max_attempts:
                    self._error = error
                    return
        except Exception as error:
            logger.exception("request_failed", request_id=self._request.request_id)
            self._error = PddError(f"unexpected {type(error).__name__}")
        finally:
            self._timeline.ended()
            self._readable.set()

    def heard(self, by: Peer, event: TokenEvent) -> None:
        """A token event of the current attempt arrived; it may be late, early or known."""
        self._last_sign = self._coordinator.now()
        if self._assembler.is_news(event):
            self._owner = by
        if self.attempt is not None:
            self.attempt.stages.heard_tokens(by.role)
        self._emit(by, self._assembler.accept(event))

    def progressed(self, progress: Progress) -> None:
        """A stage said where the attempt stands."""
        self._last_sign = self._coordinator.now()
        attempt = self.attempt
        if attempt is None:
            return
        prefill = attempt.stages.prefill or progress.by  # Prefill reports before its answer to `submit` is here.
        self._timeline.progressed(progress, prefill)
        self._coordinator.tasks.spawn(attempt.progressed(progress), f"progress {attempt.key}")

    def finished(self, message: Finished) -> None:
        """Whoever ended the answer said so: nothing must be missing up to there."""
        self._last_sign = self._coordinator.now()
        self._owner = message.by
        self._assembler.expect_end(message.end_position)
        self._changed.set()

    def failed(self, error: PddError) -> None:
        """The attempt cannot go on."""
        self._attempt_error = self._attempt_error or error
        self._changed.set()

    async def _run_attempt(self, key: AttemptKey) -> PddError | None:
        """One attempt, torn down at its end. Returns why it did not end the answer, or None if it did."""
        coordinator = self._coordinator
        self._assembler.new_attempt()
        self._attempt_error = None
        self._owner = None
        self._last_sign = coordinator.now()
        attempt = Attempt(
            key=key,
            me=coordinator.me,
            request=self._request,
            emitted=self._assembler.emitted,
            report=self.report,
            bus=coordinator.bus,
            router=coordinator.router,
            relay_max_tokens=coordinator.limits.relay_max_tokens,
            deadline=coordinator.now() + coordinator.limits.queue_timeout_s,
            now=coordinator.now,
        )
        self.attempt = attempt
        coordinator.enter(key, self)
        try:
            holders = [*coordinator.registry.live(Role.PREFILL), *coordinator.registry.live(Role.MAIN_DECODE)]
            hits = await coordinator.prefixes.hits(self._request.prompt, holders)
            await attempt.start(hits.stored)
            self._attached = True
            self._readable.set()
            return await self._until_over(attempt)
        except PddError as error:
            return error
        finally:
            coordinator.leave(key)
            coordinator.closing.spawn(attempt.close("over"), f"close {key}")

    async def _until_over(self, attempt: Attempt) -> PddError | None:
        limits, now = self._coordinator.limits, self._coordinator.now
        while True:
            if self._finish is not None:
                return None
            if self._attempt_error is not None:
                return self._attempt_error
            for peer in attempt.stages.all():
                if attempt.stages.needs(peer) and not self._coordinator.registry.is_live(peer):
                    return UnreachableError(f"{peer.role} {peer.instance} is gone")
            if now() - self._last_sign > limits.stall_timeout_s:
                return DeadlineError(f"no progress for {limits.stall_timeout_s:g} s")
            self._changed.clear()
            gap = self._assembler.has_gap
            try:
                async with asyncio.timeout(limits.replay_after_s if gap else BEAT_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                if gap and self._assembler.has_gap:
                    await self._repair(attempt)

    async def _repair(self, attempt: Attempt) -> None:
        """Ask the owner of the stream for what is missing."""
        if self._owner is None:
            return
        question = Replay(attempt.key, self._assembler.next_position)
        subject = subjects.endpoint(self._owner, "replay")
        try:
            answer = await self._coordinator.bus.request(subject, question, Replayed, timeout_s=_REPLAY_TIMEOUT_S)
        except PddError as error:
            logger.warning("replay_failed", request_id=attempt.key.request_id, error=str(error))
            return
        self._emit(self._owner, self._assembler.accept_replay(answer))

    def _emit(self, by: Peer, fresh: list[int]) -> None:
        """`fresh` tokens, sampled or repeated by `by`, are the client's now."""
        if fresh:
            self._timeline.emitted(len(fresh), by.role)
            self._fresh.extend(fresh)
            self._finish = self._request.stop.check(self._assembler.emitted)
            self._readable.set()
        self._changed.set()


class Coordinator:
    """See the module. `now` is a monotonic clock in seconds."""

    def __init__(
        self,
        *,
        me: Peer,
        bus: Bus,
        registry: Registry,
        router: Router,
        prefixes: PrefixView,
        limits: Limits,
        now: Callable[[], float],
    ) -> None:
        self.prefixes = prefixes
        self.me = me
        self.bus = bus
        self.registry = registry
        self.router = router
        self.limits = limits
        self.now = now
        self.tasks = Tasks()
        self.closing = Tasks()
        self.stale_messages = 0
        self._live: dict[AttemptKey, LiveRequest] = {}

    async def start(self) -> None:
        """Listen to stages, serve their reports, begin to beat."""
        await self.registry.listen(self.bus, roles=(Role.PREFILL, Role.RELAY, Role.MAIN_DECODE))
        await self.bus.subscribe(subjects.tokens(self.me), TokenBatch, self._hear_tokens)
        await self.bus.subscribe(subjects.progress(self.me), Progress, self._hear_progress)
        endpoints = [
            Endpoint("finished", subjects.endpoint(self.me, "finished"), Finished, self._hear_finished),
            Endpoint("failed", subjects.endpoint(self.me, "failed"), Failed, self._hear_failed),
        ]
        await self.bus.serve(self.me, endpoints, {})
        self.tasks.spawn(self._beat(), "beat")

    async def close(self) -> None:
        """End all requests, tell the stages, end all tasks."""
        await self.tasks.close()
        await self.closing.join(_CLOSE_TIMEOUT_S)
        await self.closing.close()

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[LiveRequest]:
        """Run `request`; leaving the context cancels whatever is still running, everywhere."""
        live = LiveRequest(self, request)
        driver = self.tasks.spawn(live.drive(), f"drive {request.request_id}")
        try:
            yield live
        finally:
            driver.cancel()
            await asyncio.gather(driver, return_exceptions=True)

    def enter(self, key: AttemptKey, live: LiveRequest) -> None:
        """`key` is live from now on: stages hear so by the beat, events of it are taken."""
        self._live[key] = live

    def leave(self, key: AttemptKey) -> None:
        """`key` is over."""
        del self._live[key]

    def _hear_tokens(self, batch: TokenBatch) -> None:
        for event in batch.events:
            live = self._live.get(event.key)
            if live is None:
                self.stale_messages += 1
            else:
                live.heard(batch.by, event)

    def _hear_progress(self, progress: Progress) -> None:
        live = self._live.get(progress.key)
        if live is not None:
            live.progressed(progress)

    async def _hear_finished(self, message: Finished) -> Ok:
        self._require(message.key).finished(message)
        return Ok()

    async def _hear_failed(self, message: Failed) -> Ok:
        self._require(message.key).failed(RemoteError(message.code, message.message))
        return Ok()

    def _require(self, key: AttemptKey) -> LiveRequest:
        live = self._live.get(key)
        if live is None:
            self.stale_messages += 1
            raise StaleError(f"attempt {key} is over")
        return live

    async def _beat(self) -> None:
        while True:
            try:
                await self.bus.publish(subjects.beat(self.me), GatewayBeat(self.me, list(self._live)))
            except PddError as error:
                logger.warning("beat_lost", error=str(error))
            self.registry.expire()
            await self.prefixes.probe()
            await asyncio.sleep(BEAT_INTERVAL_S)
