"""What Prefill, RelayDecode and MainDecode share: identity, engine, output, beats, and word to the gateway.

Owns the beat and the tasks of the stage. It knows when the gateway has lost interest in an attempt, and says so
through `on_abandoned`; what to do then is each stage's own business.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog

from pdd.engine.engine import StepResult
from pdd.engine.loading import LoadedEngine
from pdd.engine.thread import EngineThread
from pdd.errors import DeadlineError, PddError, UnreachableError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus
from pdd.mesh.messages import Beat, Failed, Finished, GatewayBeat, Load, Ok, Phase, Progress
from pdd.mesh.registry import BEAT_INTERVAL_S, MISSED_BEATS, Registry
from pdd.stage.metrics import StageMetrics
from pdd.stage.output import TokenPublisher
from pdd.tasks import Tasks
from pdd.types import AttemptKey, FinishReason, Path, Peer, Role

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_FINISHED_TIMEOUT_S = 2.0
_SMOOTHING = 0.2


@dataclass(frozen=True)
class LineFigures:
    """What a sender of KV knows of its WAN line: bytes queued, goodput (None until measured) and round trip."""

    backlog_bytes: int = 0
    goodput_bytes_per_s: float | None = None
    rtt_s: float | None = None


@dataclass
class Interest:
    """Sign of life of one attempt from its gateway: when it was last listed, and beats since that did not list it."""

    gateway: Peer
    seen_at: float
    missing: int = 0


class StageHost:
    """See the module. `now` is a monotonic clock in seconds; `metrics` can be scraped at `metrics_port`."""

    def __init__(
        self,
        *,
        me: Peer,
        bus: Bus,
        loaded: LoadedEngine,
        engine: EngineThread,
        registry: Registry,
        fabric: str,
        metrics: StageMetrics,
        metrics_port: int,
        lease_s: float,
        now: Callable[[], float],
    ) -> None:
        self.me = me
        self.bus = bus
        self.loaded = loaded
        self.engine = engine
        self.registry = registry
        self.metrics = metrics
        self.now = now
        self.lease_s = lease_s
        self.tasks = Tasks()
        self.publisher = TokenPublisher(bus, me)
        self.on_abandoned: Callable[[AttemptKey], None] = lambda key: None
        self.line_figures: Callable[[], LineFigures] = LineFigures
        self.on_beat: Callable[[], None] = lambda: None
        self.reserved: Callable[[], int] = lambda: 0
        self.waiting: Callable[[], int] = lambda: 0
        """Sequences that wait for a place before the engine's own queue."""
        self.stale_messages: Callable[[], int] = lambda: 0
        self.kv_seq: Callable[[], int] = lambda: 0
        self._fabric = fabric
        self._metrics_port = metrics_port
        self._interest: dict[AttemptKey, Interest] = {}
        self._prefill_tokens_per_s = 0.0
        self._itl_s = 0.0

    async def start(self) -> None:
        """Listen to gateways and peers and begin to beat."""
        await self.registry.listen(self.bus, roles=(Role.PREFILL, Role.RELAY, Role.MAIN_DECODE))
        await self.bus.subscribe(subjects.beats(role=Role.GATEWAY), GatewayBeat, self._hear_gateway)
        self.tasks.spawn(self.publisher.run(), "publish_tokens")
        self.tasks.spawn(self._beat(), "beat")

    async def close(self) -> None:
        """Stop beating and end the stage's tasks."""
        await self.tasks.close()

    def watch(self, key: AttemptKey, gateway: Peer) -> None:
        """Begin to expect `key` in the beats of `gateway`."""
        self._interest[key] = Interest(gateway, self.now())

    def unwatch(self, key: AttemptKey) -> None:
        """The attempt is over."""
        self._interest.pop(key, None)

    def spawn_for(
        self,
        key: AttemptKey,
        work: Coroutine[Any, Any, None],
        name: str,
        fail: Callable[[PddError], Awaitable[None]],
    ) -> asyncio.Task[None]:
        """Run `work` for an attempt. What it raises by accident is logged, and `fail` hears of it at once."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                logger.exception("attempt_broken", request_id=key.request_id)
                await fail(PddError(f"unexpected {type(error).__name__}"))

        task = self.tasks.spawn(guarded(), f"{name} {key}")
        task.add_done_callback(lambda _: work.close())  # one that is cancelled before its first step never awaits it
        return task

    def measure(self, result: StepResult) -> None:
        """Take the figures of one engine step into the stage's metrics and running estimates."""
        self.metrics.step(result)
        prefill_tokens = result.scheduled_tokens - result.decodes
        if result.duration_s <= 0:
            return
        if prefill_tokens > 0 and not result.decodes:
            rate = prefill_tokens / result.duration_s
            old = self._prefill_tokens_per_s
            self._prefill_tokens_per_s = rate if not old else old + _SMOOTHING * (rate - old)
        if result.decodes and not prefill_tokens:
            old = self._itl_s
            self._itl_s = result.duration_s if not old else old + _SMOOTHING * (result.duration_s - old)

    def progress(
        self,
        key: AttemptKey,
        gateway: Peer,
        phase: Phase,
        *,
        received_bytes: int = 0,
        tokens: int = 0,
        path: Path | None = None,
        reason: str = "",
    ) -> None:
        """Tell the gateway where an attempt stands. Superseded by the next report, so it may be lost."""
        recomputed = 0 if self.me.role is Role.PREFILL else self.engine.status().prompt_tokens_computed
        report = Progress(key, self.me, phase, received_bytes, tokens, recomputed, path, reason)
        self.tasks.spawn(self._publish(subjects.progress(gateway), report), "progress")

    async def report_finished(
        self, key: AttemptKey, gateway: Peer, generation: int, end_position: int, reason: FinishReason
    ) -> None:
        """Tell the gateway how the answer ended; repeated until it is acknowledged or the lease runs out."""
        message = Finished(key, self.me, generation, end_position, reason)
        await self._tell(gateway, "finished", message)

    async def report_failed(self, key: AttemptKey, gateway: Peer, error: PddError) -> None:
        """Tell the gateway that the attempt cannot go on here."""
        logger.warning("attempt_failed", request_id=key.request_id, attempt=key.attempt, error=str(error))
        await self._tell(gateway, "failed", Failed(key, self.me, error.code, str(error)))

    def beat(self) -> Beat:
        """What this stage says of itself right now."""
        status = self.engine.status()
        line = self.line_figures()
        load = Load(
            running=status.running,
            waiting=status.waiting + self.waiting(),
            reserved=self.reserved(),
            seats=status.seats,
            free_blocks=status.free_blocks,
            evictable_blocks=status.evictable_blocks,
            total_blocks=status.total_blocks,
            steps=status.steps,
            prompt_tokens=status.prompt_tokens_computed,
            output_tokens=status.output_tokens,
            recomputed_prompt_tokens=0 if self.me.role is Role.PREFILL else status.prompt_tokens_computed,
            prompt_tokens_seen=self.metrics.prompt_tokens_seen,
            hit_tokens=self.metrics.hit_tokens,
            batch_sequences=self.metrics.batch_sequences,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            itl_s=self._itl_s,
            wan_backlog_bytes=line.backlog_bytes,
            wan_goodput_bytes_per_s=line.goodput_bytes_per_s,
            wan_rtt_s=line.rtt_s,
            wan_bytes=self.metrics.transferred_bytes["wan"],
            fabric_bytes=self.metrics.transferred_bytes["fabric"],
            stale_messages=self.stale_messages(),
            pace_overruns=self.engine.pace_overruns,
        )
        self.metrics.beat(load)
        return Beat(
            peer=self.me,
            pid=os.getpid(),
            identity=self.loaded.identity,
            spec=self.loaded.kv_pool.spec,
            max_model_len=self.loaded.max_model_len,
            step_tokens=status.step_tokens,
            fabric=self._fabric,
            metrics_port=self._metrics_port,
            load=load,
            kv_seq=self.kv_seq(),
        )

    async def release(self, key: AttemptKey) -> None:
        """Let the engine forget a sequence and free its blocks; done even if whoever waits for it is cancelled."""
        await asyncio.shield(self.engine.call(lambda engine: engine.release(key)))

    async def _tell(self, gateway: Peer, verb: str, message: object) -> None:
        deadline = self.now() + self.lease_s
        while True:
            try:
                await self.bus.request(subjects.endpoint(gateway, verb), message, Ok, timeout_s=_FINISHED_TIMEOUT_S)
                return
            except (UnreachableError, DeadlineError) as error:
                if self.now() >= deadline:
                    logger.warning("gateway_unreachable", verb=verb, error=str(error))
                    return
                await asyncio.sleep(0.1)
            except PddError as error:
                logger.info("gateway_declined", verb=verb, error=str(error))
                return

    async def _publish(self, subject: str, message: object) -> None:
        try:
            await self.bus.publish(subject, message)
        except PddError as error:
            logger.warning("message_lost", subject=subject, error=str(error))

    async def _beat(self) -> None:
        while True:
            await self._publish(subjects.beat(self.me), self.beat())
            self.registry.expire()
            self._sweep()
            self.on_beat()
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _hear_gateway(self, beat: GatewayBeat) -> None:
        live = set(beat.live)
        for key, interest in self._interest.items():
            if interest.gateway.instance != beat.gateway.instance or interest.gateway.dc != beat.gateway.dc:
                continue
            if key in live:
                interest.seen_at, interest.missing = self.now(), 0
            else:
                interest.missing += 1

    def _sweep(self) -> None:
        for key, interest in list(self._interest.items()):
            silent_s = self.registry.silence_s(interest.seen_at)
            if interest.missing >= MISSED_BEATS or silent_s > self.lease_s:
                logger.warning("attempt_abandoned", request_id=key.request_id, attempt=key.attempt)
                self.unwatch(key)
                self.on_abandoned(key)
