"""A stage that decodes: takes KV in, takes the stream over, samples. RelayDecode and MainDecode are made of it.

An attempt's life: reserved (`KvIntake` holds blocks, KV arrives in them) -> ready (all KV is here, and room for the
answer) -> started (it owns the stream; the blocks belong to the engine) -> ended or handed on (KV is given up, output
IDs stay for replay) -> forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import structlog

from pdd.engine.engine import SequenceSpec, StepResult
from pdd.errors import CapacityError, PddError
from pdd.handoff.receiver import HandoffReceiver
from pdd.mesh import subjects
from pdd.mesh.bus import Endpoint
from pdd.mesh.messages import Cancel, Ok, Phase, Replay, Replayed, Reserve, Reserved
from pdd.stage.attempts import Attempts
from pdd.stage.host import StageHost
from pdd.stage.intake import KvIntake, Reservation
from pdd.stage.output import OutputStream
from pdd.telemetry.tracing import Trace
from pdd.transfer.interface import KvReceiver
from pdd.types import AttemptKey, Handoff, HandoffReply, Peer, Role, TokenEvent

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass
class DecodeAttempt:
    """One attempt on a decode stage."""

    reserve: Reserve
    kv: Reservation
    receiver: HandoffReceiver
    stream: OutputStream
    trace: Trace
    generation: int = 0
    sampled: int = 0
    reported: tuple[int, int] = (0, 0)
    """Tokens and bytes whose arrival the gateway has heard of."""
    started: bool = False
    kv_freed: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    @property
    def key(self) -> AttemptKey:
        return self.reserve.key

    @property
    def gateway(self) -> Peer:
        return self.reserve.gateway


class DecodeEvents(Protocol):
    """What RelayDecode and MainDecode add to a decode stage."""

    def on_reserved(self, attempt: DecodeAttempt) -> None:
        """A ticket was issued."""

    def may_start(self, attempt: DecodeAttempt) -> bool:
        """Whether the stage may begin to sample, given that it owns the stream and has all KV."""
        ...

    def on_kv_complete(self, attempt: DecodeAttempt) -> None:
        """All KV is here; the stream may or may not be ours yet."""

    def on_outputs(self, attempt: DecodeAttempt) -> None:
        """The stage knows more output IDs: handed over to it, or sampled by it. `attempt.stream.finish` may be set."""

    def on_closed(self, attempt: DecodeAttempt) -> None:
        """The attempt is over and forgotten."""


class DecodeStage:
    """See the module. `fabric` and `wan` receive KV from the same and from another datacenter; for `caches` and
    `idle_share` see `KvIntake`."""

    def __init__(
        self,
        host: StageHost,
        events: DecodeEvents,
        *,
        fabric: KvReceiver,
        wan: KvReceiver,
        caches: bool,
        idle_share: float = 1.0,
    ) -> None:
        self._host = host
        self._events = events
        self._intake = KvIntake(host, fabric=fabric, wan=wan, caches=caches, idle_share=idle_share)
        self.attempts: Attempts[DecodeAttempt] = Attempts(host.now)
        self.decode_phase = "relay_decode" if host.me.role is Role.RELAY else "main_decode"
        """What the span of its sampling is called."""
        host.on_abandoned = self._abandon
        host.on_beat = self._on_beat
        host.reserved = lambda: sum(not a.started and not a.kv_freed for _, a in self.attempts)
        host.stale_messages = lambda: self.attempts.stale_messages

    def endpoints(self) -> list[Endpoint]:
        """The verbs that both decode stages serve."""
        me = self._host.me
        return [
            Endpoint("reserve", subjects.endpoint(me, "reserve"), Reserve, self.reserve),
            Endpoint("handoff", subjects.endpoint(me, "handoff"), Handoff, self.handoff),
            Endpoint("cancel", subjects.endpoint(me, "cancel"), Cancel, self.cancel),
            Endpoint("replay", subjects.endpoint(me, "replay"), Replay, self.replay),
        ]

    async def reserve(self, message: Reserve) -> Reserved:
        """Hold a seat and blocks for the prompt's KV, and say where the part that is not here is accepted.

        Raises `TooLargeError` if prompt and `max_outputs` can never fit, `CapacityError` if not now, `StaleError` if
        the attempt is over. The same reservation again answers with the same ticket.
        """
        known = self.attempts.find(message.key)
        if known is not None:
            known.reserve = message
            return Reserved(known.kv.incoming.ticket, self._host.lease_s)
        self.attempts.require_fresh(message.key)
        seats = self._host.engine.status().seats
        if sum(not a.kv_freed for _, a in self.attempts) >= seats:
            raise CapacityError(f"all {seats} seats of {self._host.me.role} are taken")
        kv = self._intake.hold(message)
        attempt = DecodeAttempt(
            reserve=message,
            kv=kv,
            receiver=HandoffReceiver(message.prompt, message.outputs, len(kv.tokens)),
            stream=OutputStream(message.key, len(message.prompt), message.outputs),
            trace=Trace.here(attempt=message.key.attempt),
        )
        self.attempts.open(message.key, attempt)
        self._host.metrics.hit(len(kv.tokens), kv.hit_tokens)
        path = "fabric" if message.source.dc == self._host.me.dc else "wan"
        attempt.trace.begin("kv_receive", transfer_path=path, hit_tokens=kv.hit_tokens)
        self._host.watch(message.key, message.gateway)
        self._events.on_reserved(attempt)
        self.spawn(attempt, self._receive(attempt), "receive")
        return Reserved(kv.incoming.ticket, self._host.lease_s)

    async def handoff(self, message: Handoff) -> HandoffReply:
        """Take the stream over, or refuse; acknowledged before any extending begins."""
        attempt = self.attempts.get(message.key)
        before = attempt.receiver.owned
        reply = attempt.receiver.take(message)
        if not reply.accepted:
            self._host.metrics.handoff("declined", len(message.ids))
            logger.warning("handoff_refused", request_id=message.key.request_id, reason=reply.reason)
        elif attempt.receiver.owned and not before:
            self._host.metrics.handoff("taken_over", len(message.ids))
            attempt.stream.learn(attempt.receiver.ids)
            attempt.generation = attempt.receiver.generation
            attempt.trace.end("handoff_wait")
            self._report(attempt, Phase.HANDED_OVER)
            self.start_if_ready(attempt)
            self._events.on_outputs(attempt)
        return reply

    async def cancel(self, message: Cancel) -> Ok:
        """Drop the attempt, whatever it is doing; perhaps not the KV that is on its way."""
        await self.drop(message.key, keep_kv=message.keep_kv)
        return Ok()

    async def replay(self, message: Replay) -> Replayed:
        """Say again which output IDs follow from a position on."""
        attempt = self.attempts.get(message.key)
        return attempt.stream.replay(message.first_position, attempt.generation)

    def on_step(self, result: StepResult) -> None:
        """Publish what one engine step sampled: one message per gateway."""
        self._host.measure(result)
        batches: dict[Peer, list[TokenEvent]] = {}
        grown: list[DecodeAttempt] = []
        for update in result.updates:
            attempt = self.attempts.find(update.key)
            if attempt is None or not update.new_tokens:
                continue
            batches.setdefault(attempt.gateway, []).extend(attempt.stream.emit(update.new_tokens, attempt.generation))
            attempt.sampled += len(update.new_tokens)
            attempt.stream.finish = update.finish
            grown.append(attempt)
        for gateway, events in batches.items():
            self._host.publisher.publish(gateway, events)
        for attempt in grown:
            with attempt.trace.active():
                attempt.trace.end("extend")
                attempt.trace.begin(self.decode_phase)
                if attempt.stream.finish is not None:
                    attempt.trace.end(self.decode_phase, tokens=attempt.sampled)
                    self.spawn(attempt, self._end(attempt), "end")
                self._events.on_outputs(attempt)

    def spawn(self, attempt: DecodeAttempt, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` for an attempt; it ends with it. What it raises by accident fails the attempt at once."""
        fail = partial(self.fail, attempt)
        attempt.tasks.append(self._host.spawn_for(attempt.key, work, name, fail))

    async def fail(self, attempt: DecodeAttempt, error: PddError) -> None:
        """The attempt cannot go on here: say so and drop it."""
        await self._host.report_failed(attempt.key, attempt.gateway, error)
        await self.drop(attempt.key)

    async def drop(self, key: AttemptKey, *, keep_kv: bool = False) -> None:
        """Forget an attempt and give up what it holds. Fine for one that is unknown or over."""
        attempt = self.attempts.close(key)
        if attempt is None:
            return
        self._host.unwatch(key)
        for task in attempt.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        attempt.trace.close("over")
        await self.free_kv(attempt, keep=keep_kv)
        self._events.on_closed(attempt)

    async def free_kv(self, attempt: DecodeAttempt, *, keep: bool = False) -> None:
        """Give the attempt's blocks up, keeping its output IDs; `keep`: let KV that is on its way arrive first."""
        if attempt.kv_freed:
            return
        attempt.kv_freed = True
        if attempt.started:
            await self._host.release(attempt.key)
        elif keep:
            self._intake.keep(attempt.kv)
        else:
            self._intake.give_up(attempt.kv)

    def start_if_ready(self, attempt: DecodeAttempt) -> None:
        """Begin to sample once everything is here and nothing speaks against it."""
        if not self._events.may_start(attempt) or attempt.kv_freed:
            return
        outputs = attempt.receiver.start()
        if outputs is None:
            return
        message = attempt.reserve
        spec = SequenceSpec(
            key=message.key,
            prompt=message.prompt,
            outputs=outputs,
            sampling=message.sampling,
            stop=message.stop,
            num_computed=len(attempt.kv.tokens),
            blocks=self._intake.hand_to_engine(attempt.kv),
            sample_limit=message.max_outputs,
            namespace=attempt.kv.namespace,
        )
        attempt.started = True
        attempt.trace.begin("extend", tokens=len(outputs))
        # Queued here and now, so that a release that follows comes after it.
        added = self._host.engine.call(lambda engine: engine.add(spec))
        self.spawn(attempt, self._confirm_start(attempt, added), "start")

    async def _confirm_start(self, attempt: DecodeAttempt, added: Awaitable[None]) -> None:
        try:
            await asyncio.shield(added)
        except PddError as error:
            await self.fail(attempt, error)
        else:
            self._report(attempt, Phase.DECODING)

    async def _receive(self, attempt: DecodeAttempt) -> None:
        try:
            await self._intake.wait_ready(attempt.kv)
        except PddError as error:
            attempt.trace.fail("kv_receive", error)
            if not attempt.kv_freed:
                await self.fail(attempt, error)
            return
        attempt.trace.end("kv_receive", transfer_bytes=attempt.kv.incoming.received_bytes)
        if not attempt.receiver.owned:
            attempt.trace.begin("handoff_wait")
        attempt.receiver.kv_complete()
        self._report(attempt, Phase.KV_READY)
        self.start_if_ready(attempt)
        self._events.on_kv_complete(attempt)

    async def _end(self, attempt: DecodeAttempt) -> None:
        finish = attempt.stream.finish
        if finish is None:
            return
        await self.free_kv(attempt)
        self._report(attempt, Phase.DECODING)
        await self._host.report_finished(
            attempt.key, attempt.gateway, attempt.generation, attempt.stream.end_position, finish
        )

    def _report(self, attempt: DecodeAttempt, phase: Phase) -> None:
        self._host.progress(
            attempt.key,
            attempt.gateway,
            phase,
            received_bytes=attempt.kv.incoming.received_bytes,
            tokens=attempt.sampled,
        )

    def _on_beat(self) -> None:
        self._intake.beat()
        self._report_life()

    def _report_life(self) -> None:
        """KV that keeps arriving is a sign of life: an honest transfer over the WAN may take half a minute. So is
        waiting for blocks."""
        for _, attempt in self.attempts:
            arrived = attempt.kv.arrived_tokens, attempt.kv.incoming.received_bytes
            if self._intake.waits_for_room(attempt.kv):
                self._report(attempt, Phase.QUEUED)
            elif arrived > attempt.reported and not attempt.kv.incoming.complete:
                attempt.reported = arrived
                self._report(attempt, Phase.RECEIVING)

    def _abandon(self, key: AttemptKey) -> None:
        self._host.tasks.spawn(self.drop(key), f"drop {key}")
