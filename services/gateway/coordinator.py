"""Runs requests over the mesh: attempts, what stages say of them, repair of gaps, and the end of each.

Owns this gateway's live requests and its beat. What the assembler has emitted is all that a client has seen; a new
attempt starts from prompt + emitted IDs, so the client sees a pause, never a changed, lost or repeated token.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry.trace import Link

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
from pdd.mesh.messages import Failed, Finished, GatewayBeat, Ok, Phase, Progress, Replay, Replayed, TokenBatch
from pdd.mesh.registry import BEAT_INTERVAL_S, Registry
from pdd.tasks import Tasks
from pdd.telemetry.tracing import Trace
from pdd.types import AttemptKey, FinishReason, Peer, Pipeline, Role, TokenEvent
from services.gateway.assembler import Assembler
from services.gateway.attempt import Attempt
from services.gateway.generation import Emission, GenerationRequest, Report
from services.gateway.prefix_view import PrefixView
from services.gateway.router import Router
from services.gateway.timeline import Timeline
from services.gateway.waiting import WaitingLine

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_HOPELESS = frozenset({TooLargeError.code, CapacityError.code, UnavailableError.code, "malformed"})
"""Errors that another attempt would only meet again."""

_NOTED = frozenset({Phase.PREFILL_STARTED, Phase.PREFILL_DONE, Phase.KV_READY, Phase.HANDED_OVER})
"""Reports that become events of the attempt's span, on this process' clock."""

_REPLAY_TIMEOUT_S = 2.0
_CLOSE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
"""Between two rounds of asking for room: each carries the whole prompt, perhaps across the WAN."""


@dataclass(frozen=True)
class Limits:
    """Patience: for room, for any sign of progress, for a missing token; how many may wait, and how often to try."""

    queue_timeout_s: float
    max_waiting: int
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
        self._trace = Trace(request.context)
        self._attempt_trace = self._trace
        self._first_attempt: list[Link] = []
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
        self._tries = 0
        self._began = coordinator.now()
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
        try:
            self._error = await self._until_answered()
        except Exception as error:
            logger.exception("request_failed", request_id=self._request.request_id)
            self._error = PddError(f"unexpected {type(error).__name__}")
        finally:
            self._timeline.ended()
            self._coordinator.dropped_tokens += self._assembler.dropped
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
        attempt = self.attempt
        if attempt is None or attempt.gave_up(progress.by):
            return
        now = self._coordinator.now()
        if progress.phase is not Phase.QUEUED or now - self._began < self._coordinator.limits.queue_timeout_s:
            self._last_sign = now  # Waiting is a sign of life, but not for ever: it holds room at other stages.
        prefill = attempt.stages.prefill or progress.by  # Prefill reports before its answer to `submit` is here.
        self._timeline.progressed(progress, prefill)
        if progress.phase in _NOTED:
            self._attempt_trace.note(progress.phase, by=progress.by.role)
        with self._attempt_trace.active():
            self._coordinator.tasks.spawn(attempt.progressed(progress), f"progress {attempt.key}")

    def finished(self, message: Finished) -> None:
        """Whoever ended the answer said so: nothing must be missing up to there."""
        self._last_sign = self._coordinator.now()
        self._owner = message.by
        self._assembler.expect_end(message.end_position)
        self._changed.set()

    def failed(self, error: PddError, by: Peer) -> None:
        """The attempt cannot go on, if it is one of its stages that says so."""
        if self.attempt is not None and self.attempt.gave_up(by):
            return
        self._attempt_error = self._attempt_error or error
        self._changed.set()

    async def _until_answered(self) -> PddError | None:
        """Run attempts. Returns why there is no answer, or None if there is one."""
        most = self._coordinator.limits.max_attempts
        for number in range(1, most + 1):
            self.report.attempts = number
            error = await self._traced(self._run_attempt())
            if error is None or error.code in _HOPELESS or number == most:
                return error
            logger.warning("attempt_lost", request_id=self._request.request_id, attempt=number, error=str(error))
        return None

    async def _run_attempt(self) -> PddError | None:
        """One attempt, torn down at its end. Returns why it did not end the answer, or None if it did."""
        try:
            attempt = await self._begin()
        except PddError as error:
            return error
        self._attempt_trace.end("wait_for_room")
        try:
            self._attached = True
            self._readable.set()
            return await self._until_over(attempt)
        finally:
            # KV that the answer did not wait for is worth having at MainDecode all the same.
            self._end(attempt, keep_kv=self._finish is not None and self._owner_is_relay(attempt))

    async def _begin(self) -> Attempt:
        """An attempt that has its stages, after a wait if there is no room for it now.

        Raises `CapacityError` when there was none by the deadline, or too many wait already; `UnavailableError` if a
        stage is missing altogether, by the deadline for who waits or was being answered already, else at once.
        """
        line, now = self._coordinator.line(self._request.pipeline), self._coordinator.now
        deadline = now() + self._coordinator.limits.queue_timeout_s
        if not line.waiting:
            try:
                return await self._try()
            except CapacityError as error:
                logger.info("request_waits", request_id=self._request.request_id, reason=str(error))
            except UnavailableError:
                if self.report.attempts == 1:
                    raise
        self._attempt_trace.begin("wait_for_room")
        pause_s = _FIRST_PAUSE_S
        # Whoever was being answered already is not turned away because many wait.
        async with line.turn(deadline, bounded=self.report.attempts == 1):
            while True:
                line.watch()
                try:
                    return await self._try()
                except (CapacityError, UnavailableError):
                    # A stage that died may come back, and one that answered nobody yet may have just begun to beat.
                    if now() >= deadline:
                        raise
                await line.pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _try(self) -> Attempt:
        """Ask for stages once. Whatever goes wrong, nothing is held afterwards."""
        coordinator = self._coordinator
        self._tries += 1
        self._assembler.new_attempt()
        self._attempt_error = None
        self._owner = None
        self._last_sign = self._began = coordinator.now()
        attempt = Attempt(
            key=AttemptKey(self._request.request_id, self._tries),
            me=coordinator.me,
            request=self._request,
            emitted=self._assembler.emitted,
            report=self.report,
            bus=coordinator.bus,
            router=coordinator.router,
            relay_max_tokens=coordinator.limits.relay_max_tokens,
        )
        self.attempt = attempt
        coordinator.enter(attempt.key, self)
        begun = False
        try:
            registry = coordinator.registry
            holders = [*registry.live(Role.PREFILL), *registry.live(Role.MAIN_DECODE)]
            hits = await coordinator.prefixes.hits(self._request.prompt, holders, self._request.salt)
            await attempt.start(hits.held_soon())
            begun = True
        finally:
            if not begun:
                coordinator.leave(attempt.key)
                coordinator.closing.spawn(attempt.close("no room"), f"close {attempt.key}")
        return attempt

    def _end(self, attempt: Attempt, *, keep_kv: bool) -> None:
        coordinator = self._coordinator
        coordinator.leave(attempt.key)
        coordinator.closing.spawn(self._close(attempt, keep_kv=keep_kv), f"close {attempt.key}")

    async def _close(self, attempt: Attempt, *, keep_kv: bool) -> None:
        await attempt.close("over", keep_kv=keep_kv)
        self._coordinator.line(self._request.pipeline).somebody_left()

    def _owner_is_relay(self, attempt: Attempt) -> bool:
        return self._owner is not None and self._owner.role is Role.RELAY and not attempt.stages.handed_over

    async def _until_over(self, attempt: Attempt) -> PddError | None:
        limits, registry = self._coordinator.limits, self._coordinator.registry
        while True:
            if self._finish is not None:
                return None
            if self._attempt_error is not None:
                return self._attempt_error
            for peer in attempt.stages.all():
                if attempt.stages.needs(peer) and not registry.is_live(peer):
                    return UnreachableError(f"{peer.role} {peer.instance} is gone")
            if registry.silence_s(self._last_sign) > limits.stall_timeout_s:
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
            if self.report.ttft_ms is None:
                self._attempt_trace.note("first_token", by=by.role)
            self._timeline.emitted(len(fresh), by.role)
            self._fresh.extend(fresh)
            self._finish = self._request.stop.check(self._assembler.emitted)
            self._readable.set()
        self._changed.set()

    async def _traced(self, attempt: Coroutine[Any, Any, PddError | None]) -> PddError | None:
        """Run an attempt under a span of its own; all that it sends carries that. Later ones are linked to the first.

        One is `cancelled` by its client's leaving, and by a stop string in its text.
        """
        report = self.report
        trace = self._trace.child("attempt", *self._first_attempt, attempt=report.attempts, pipeline=report.pipeline)
        self._attempt_trace = trace
        self._first_attempt = self._first_attempt or trace.link()
        ended_by: BaseException | None = None
        try:
            with trace.active():
                ended_by = await attempt
            return ended_by
        except BaseException as error:
            # Whoever has got the last token does not wait for the driver, but cancels it.
            complete = self._finish is not None and isinstance(error, asyncio.CancelledError)
            ended_by = None if complete else error
            raise
        finally:
            trace.close(
                "finished" if ended_by is None else "failed",
                ended_by,
                path=report.path,
                reason=report.reason,
                prefill=report.prefill,
                relay=report.relay,
                main_decode=report.main_decode,
            )


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
        self.dropped_tokens = 0
        """Token events of live requests that were late, repeated or of another text, up to each request's end."""
        self._live: dict[AttemptKey, LiveRequest] = {}
        self._lines: defaultdict[Pipeline, WaitingLine] = defaultdict(lambda: WaitingLine(limits.max_waiting, now))

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return sum(line.waiting for line in self._lines.values())

    def line(self, pipeline: Pipeline) -> WaitingLine:
        """Where requests of that layout wait for room."""
        return self._lines[pipeline]

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
        # No news of an attempt that is over: whoever has the last token knows first.
        if (live := self._live.get(message.key)) is not None:
            live.finished(message)
        return Ok()

    async def _hear_failed(self, message: Failed) -> Ok:
        self._require(message.key).failed(RemoteError(message.code, message.message), message.by)
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
