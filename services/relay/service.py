"""RelayDecode: decodes while MainDecode's KV is still on the WAN, then hands the stream over.

Adds to a decode stage what only RelayDecode decides: when to hand over (`kv_ready`), and what to do when MainDecode
refuses or is silent. The decisions are `pdd.handoff.sender`'s; this module carries them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from pdd.errors import PddError, StaleError, TooLargeError, UnknownRequestError, UnreachableError
from pdd.handoff.sender import Action, AskBack, Freeze, HandoffSender, Offer, Release, Resume, State
from pdd.mesh import subjects
from pdd.mesh.bus import Endpoint
from pdd.mesh.messages import KvReady, Ok, Phase, Withdraw, Withdrawn
from pdd.stage.decode import DecodeAttempt, DecodeStage
from pdd.stage.host import StageHost
from pdd.transfer.interface import KvReceiver
from pdd.types import AttemptKey, Handoff, HandoffReply, Peer, hash_prompt

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_OFFER_TIMEOUT_S = 2.0
_ASK_BACK_INTERVAL_S = 0.2

_NOT_TAKEN = frozenset({StaleError.code, UnknownRequestError.code, TooLargeError.code})
"""Errors that prove MainDecode does not own the stream: it has buried the attempt, or the message never left. Any
other leaves that open, like silence."""


class RelayService:
    """See the module."""

    def __init__(self, host: StageHost, *, fabric: KvReceiver, wan: KvReceiver) -> None:
        self._host = host
        self.stage = DecodeStage(host, self, fabric=fabric, wan=wan, caches=False)
        self._handoffs: dict[AttemptKey, HandoffSender] = {}
        host.registry.on_gone = self.main_gone

    def endpoints(self) -> list[Endpoint]:
        """What RelayDecode serves."""
        kv_ready = Endpoint("kv_ready", subjects.endpoint(self._host.me, "kv_ready"), KvReady, self.kv_ready)
        return [*self.stage.endpoints(), kv_ready]

    async def kv_ready(self, message: KvReady) -> Ok:
        """MainDecode is ready to take over: begin when due. Answered before the hand-over, which may take a step."""
        attempt = self.stage.attempts.get(message.key)
        self._act(attempt, self._handoffs[message.key].kv_ready(message.main))
        return Ok()

    def on_reserved(self, attempt: DecodeAttempt) -> None:
        """A ticket was issued: the hand-over may not begin before the first token is known."""
        first = len(attempt.reserve.outputs) + 1
        self._handoffs[attempt.key] = HandoffSender(hold_until=max(first, attempt.reserve.handoff_at or first))

    def may_start(self, attempt: DecodeAttempt) -> bool:
        """Not while the stream is on offer: MainDecode may be ready before RelayDecode has sampled anything."""
        return self._handoffs[attempt.key].state is State.DECODING

    def on_kv_complete(self, attempt: DecodeAttempt) -> None:
        """Nothing to do: the stage starts by itself."""

    def on_outputs(self, attempt: DecodeAttempt) -> None:
        """More output IDs: perhaps the hand-over is due, perhaps the answer has ended."""
        handoff = self._handoffs[attempt.key]
        if attempt.stream.finish is not None:
            handoff.ended()
        else:
            self._act(attempt, handoff.outputs_grew(len(attempt.stream.ids)))
            self._give_up_if_stuck(attempt)

    def on_closed(self, attempt: DecodeAttempt) -> None:
        """The attempt is over."""
        self._handoffs.pop(attempt.key).ended()

    def main_gone(self, peer: Peer) -> None:
        """That peer is dead. If it is a MainDecode: take back what it was offered, go on with what is held."""
        for key, attempt in self.stage.attempts:
            self._act(attempt, self._handoffs[key].main_gone(peer))
            self._give_up_if_stuck(attempt)

    def _give_up_if_stuck(self, attempt: DecodeAttempt) -> None:
        """At its limit and with no MainDecode left to take over, only a new attempt helps."""
        main = attempt.reserve.main
        at_limit = len(attempt.stream.ids) >= attempt.reserve.max_outputs
        decoding = self._handoffs[attempt.key].state is State.DECODING
        if not (at_limit and decoding) or main is None or attempt.kv_freed or attempt.stream.finish is not None:
            return
        if self._handoffs[attempt.key].rejected:
            error = PddError(f"main_decode {main.instance} refused to take over")
        elif not self._host.registry.is_live(main):
            error = UnreachableError(f"main_decode {main.instance} is gone")
        else:
            return
        self.stage.spawn(attempt, self.stage.fail(attempt, error), "fail")

    def _act(self, attempt: DecodeAttempt, actions: Sequence[Action]) -> None:
        with attempt.trace.active():
            for action in actions:
                self.stage.spawn(attempt, self._carry_out(attempt, action), type(action).__name__.lower())

    async def _carry_out(self, attempt: DecodeAttempt, action: Action) -> None:
        handoff = self._handoffs[attempt.key]
        match action:
            case Freeze():
                attempt.trace.begin("handoff")
                ids = await self._freeze(attempt)
                attempt.trace.end(self.stage.decode_phase, tokens=attempt.sampled)
                self._act(attempt, handoff.frozen(ids))
            case Offer():
                await self._offer(attempt, handoff, action)
            case AskBack():
                await self._ask_back(attempt, handoff, action)
            case Resume(generation):
                attempt.generation = generation
                attempt.trace.end("handoff", outcome="withdrawn")
                if attempt.started:
                    await self._host.engine.call(lambda engine: engine.thaw(attempt.key))
                self.stage.start_if_ready(attempt)
            case Release(handed_over):
                self._host.metrics.handoff("accepted", handed_over)
                self._host.progress(attempt.key, attempt.gateway, Phase.HANDED_OVER, tokens=attempt.sampled)
                logger.info("handoff_completed", request_id=attempt.key.request_id, tokens=handed_over)
                attempt.trace.end("handoff", tokens=handed_over)
                await self.stage.free_kv(attempt)

    async def _freeze(self, attempt: DecodeAttempt) -> list[int]:
        """Output IDs at a standstill. Steps that ended before are published before this returns."""
        if attempt.started:
            await self._host.engine.call(lambda engine: engine.freeze(attempt.key))
        return attempt.stream.ids

    async def _offer(self, attempt: DecodeAttempt, handoff: HandoffSender, offer: Offer) -> None:
        if handoff.state is not State.OFFERED:
            return
        prompt = attempt.reserve.prompt
        message = Handoff(
            key=attempt.key,
            sender=self._host.me,
            seq=offer.seq,
            generation=offer.generation,
            first_position=len(prompt),
            ids=list(offer.ids),
            final=True,
            covered_tokens=len(attempt.kv.tokens),
            prompt_hash=hash_prompt(prompt),
        )
        attempt.trace.event("handoff", "offered", to=f"{offer.main.dc}/{offer.main.role}/{offer.main.instance}")
        subject = subjects.endpoint(offer.main, "handoff")
        try:
            reply = await self._host.bus.request(subject, message, HandoffReply, timeout_s=_OFFER_TIMEOUT_S)
        except PddError as error:
            logger.warning("handoff_declined", request_id=attempt.key.request_id, error=str(error))
            if error.code in _NOT_TAKEN:
                self._host.metrics.handoff("refused", len(offer.ids))
            actions = handoff.refused(offer.seq) if error.code in _NOT_TAKEN else handoff.silent(offer.seq)
        else:
            if not reply.accepted:
                self._host.metrics.handoff("refused", len(offer.ids))
            actions = handoff.accepted(offer.seq) if reply.accepted else handoff.refused(offer.seq)
        self._act(attempt, actions)
        self._give_up_if_stuck(attempt)

    async def _ask_back(self, attempt: DecodeAttempt, handoff: HandoffSender, action: AskBack) -> None:
        message = Withdraw(attempt.key, self._host.me, action.seq)
        subject = subjects.endpoint(action.main, "withdraw")
        try:
            answer = await self._host.bus.request(subject, message, Withdrawn, timeout_s=_OFFER_TIMEOUT_S)
        except PddError as error:
            if error.code in _NOT_TAKEN or not self._host.registry.is_live(action.main):
                actions = handoff.main_gone(action.main)
            else:
                await asyncio.sleep(_ASK_BACK_INTERVAL_S)
                actions = handoff.silent(action.seq)
        else:
            if answer.withdrawn:
                self._host.metrics.handoff("withdrawn", 0)
            actions = handoff.withdraw_answered(action.seq, answer.withdrawn)
        self._act(attempt, actions)
