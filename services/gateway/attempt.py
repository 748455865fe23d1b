"""One attempt at one request: finds it stages, reserves, attaches, and tears all of it down again.

Stages are asked in the order P, MD, RLD. If one has no room, everything is released before anybody waits, so that two
requests can never wait for each other. P starts computing at once; where its KV goes is attached when the tickets are
there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from pdd.errors import CapacityError, DeadlineError, PddError, RemoteError, UnreachableError
from pdd.kv import Ticket
from pdd.mesh import subjects
from pdd.mesh.bus import Bus
from pdd.mesh.messages import Attach, Cancel, Ok, Phase, Progress, Reserve, Reserved, Submit, Submitted
from pdd.telemetry.tracing import Trace
from pdd.types import AttemptKey, Path, Peer, Pipeline, Role
from services.gateway.generation import GenerationRequest, Report
from services.gateway.prefix_view import HitTokens
from services.gateway.router import Router

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_CANCEL_TIMEOUT_S = 5.0
_CANCEL_TRIES = 3

Reply = TypeVar("Reply")


@dataclass
class Stages:
    """Instances that hold something for the attempt."""

    prefill: Peer | None = None
    main: Peer | None = None
    relay: Peer | None = None
    kv_ready: bool = False
    taken_over: bool = False
    handed_over: bool = False

    def all(self) -> list[Peer]:
        """Those that exist, in the order in which they were asked."""
        return [peer for peer in (self.prefill, self.main, self.relay) if peer is not None]

    def needs(self, peer: Peer) -> bool:
        """Whether the attempt cannot go on without `peer`, as far as is known.

        RelayDecode copes with MainDecode's death by itself, and nobody needs Prefill once its KV has arrived and a
        decode stage has taken over.
        """
        if peer == self.main:
            return self.relay is None or self.handed_over
        if peer == self.prefill:
            return not (self.kv_ready and self.taken_over)
        return peer == self.relay and not self.handed_over

    def heard_tokens(self, role: Role) -> None:
        """A stage samples: it has taken over, whatever report of that was lost."""
        self.taken_over |= role is not Role.PREFILL
        if role is Role.MAIN_DECODE:
            self.kv_ready = self.handed_over = True


class Attempt:
    """See the module."""

    def __init__(
        self,
        *,
        key: AttemptKey,
        me: Peer,
        request: GenerationRequest,
        emitted: Sequence[int],
        report: Report,
        bus: Bus,
        router: Router,
        relay_max_tokens: int,
    ) -> None:
        self.key = key
        self.stages = Stages()
        self._trace = Trace.here()
        self._asked: list[Peer] = []
        self._silent: list[Peer] = []
        self._me = me
        self._request = request
        self._emitted = list(emitted)
        self._report = report
        self._bus = bus
        self._router = router
        self._relay_max_tokens = relay_max_tokens

    async def start(self, hits: HitTokens) -> None:
        """Submit, reserve, attach. Raises `CapacityError` if a stage that is needed has no room."""
        request, report = self._request, self._report
        submit = Submit(
            key=self.key,
            gateway=self._me,
            prompt=request.prompt,
            outputs=self._emitted,
            sampling=request.sampling,
            stop=request.stop,
            salt=request.salt,
        )
        submitted = await self._place(
            self._router.prefills(hits), lambda peer: self._ask(peer, "submit", submit, Submitted)
        )
        # Whoever answered is meant from here on: it may have been restarted since its last beat.
        prefill = submitted.peer
        self.stages.prefill = prefill
        report.prefill = _name(prefill)

        relay_hint = self._relay_hint(prefill)
        reserve = self._reserve(prefill, max_outputs=request.stop.max_tokens, relay=relay_hint)
        reserved = await self._place(
            self._router.mains(prefill, request.pipeline, hits),
            lambda peer: self._ask(peer, "reserve", reserve, Reserved),
        )
        main = reserved.ticket.holder
        self.stages.main = main
        report.main_decode = _name(main)
        report.main_hit_tokens = reserved.ticket.first_token

        forced = request.handoff_at is not None
        decision = self._router.decide(
            request.pipeline,
            prefill,
            submitted.hit_tokens,
            reserved.ticket,
            relay_available=relay_hint is not None,
            forced_relay=forced,
        )
        path, reason = decision.path, decision.reason
        relay_ticket = None
        if path is Path.RELAYED:
            relay_ticket = await self._reserve_relay(prefill, main, needed=forced)
            if relay_ticket is None:
                path, reason = Path.DIRECT, "relay_full"
            elif relay_hint is None or not same_place(relay_hint, relay_ticket.holder):
                # MainDecode must tell the RelayDecode that has the request; the same reservation again corrects it.
                reserve = self._reserve(prefill, max_outputs=request.stop.max_tokens, relay=relay_ticket.holder)
                await self._ask(main, "reserve", reserve, Reserved)
        report.path, report.reason = path, reason
        report.predicted_wait_ms = decision.exposed_wait_s * 1e3
        attach = Attach(
            key=self.key,
            path=path,
            main=reserved.ticket,
            relay=relay_ticket,
            may_release_relay=not forced,
        )
        await self._ask(prefill, "attach", attach, Ok)

    async def progressed(self, progress: Progress) -> None:
        """Keep track of who is still needed; release RelayDecode if Prefill found that it is not."""
        if progress.by.role is Role.MAIN_DECODE:
            self.stages.kv_ready |= progress.phase in (Phase.KV_READY, Phase.DECODING)
            self.stages.handed_over |= progress.phase is Phase.HANDED_OVER
        if progress.by.role is not Role.PREFILL:
            self.stages.taken_over |= progress.phase is Phase.HANDED_OVER
        if progress.path is Path.DIRECT and self.stages.relay is not None:
            relay, self.stages.relay = self.stages.relay, None
            self._report.relay = None
            await self._cancel(relay, "relay_not_needed")

    def gave_up(self, peer: Peer) -> bool:
        """Whether `peer` was asked and did not answer in time: what it says later does not concern the attempt."""
        return any(same_place(peer, silent) for silent in self._silent) and peer not in self.stages.all()

    async def close(self, reason: str, *, keep_kv: bool = False) -> None:
        """Make every stage drop the attempt; for `keep_kv` see `Cancel`. Those that cannot be reached drop it by the
        gateway's beat."""
        await asyncio.gather(*(self._cancel(peer, reason, keep_kv=keep_kv) for peer in self._asked))
        for peer in self._asked:
            self._router.settle(peer)

    async def _reserve_relay(self, prefill: Peer, main: Peer, *, needed: bool) -> Ticket | None:
        """A ticket from RelayDecode; None if it has no room and the request can do without."""
        limit = self._request.handoff_at or self._relay_max_tokens
        reserve = self._reserve(
            prefill,
            max_outputs=min(self._request.stop.max_tokens, max(limit, len(self._emitted) + 1)),
            main=main,
            handoff_at=self._request.handoff_at,
        )
        try:
            reserved = await self._place(
                self._router.relays(prefill), lambda peer: self._ask(peer, "reserve", reserve, Reserved)
            )
        except PddError as error:
            if needed:
                raise
            logger.info("relay_declined", request_id=self.key.request_id, error=str(error))
            return None
        self.stages.relay = reserved.ticket.holder
        self._report.relay = _name(reserved.ticket.holder)
        return reserved.ticket

    def _relay_hint(self, prefill: Peer) -> Peer | None:
        if self._request.pipeline is not Pipeline.PDD:
            return None
        relays = self._router.relays(prefill)
        return relays[0] if relays else None

    def _reserve(
        self,
        prefill: Peer,
        *,
        max_outputs: int,
        relay: Peer | None = None,
        main: Peer | None = None,
        handoff_at: int | None = None,
    ) -> Reserve:
        request = self._request
        return Reserve(
            key=self.key,
            gateway=self._me,
            source=prefill,
            prompt=request.prompt,
            outputs=self._emitted,
            sampling=request.sampling,
            stop=request.stop,
            max_outputs=max_outputs,
            relay=relay,
            main=main,
            handoff_at=handoff_at,
            salt=request.salt,
        )

    async def _place(self, candidates: Sequence[Peer], ask: Callable[[Peer], Awaitable[Reply]]) -> Reply:
        """Ask candidates, best first, until one has room. Raises `CapacityError` if none has, `DeadlineError` if none
        answered at all.

        Whoever is asked is noted first: if this is cancelled before the answer comes, `close` still reaches it. It also
        reaches those that let the deadline pass: they may hold room by then, which is of no use any more.
        """
        refusal: PddError | None = None
        silence: DeadlineError | None = None
        for peer in candidates:
            self._asked.append(peer)
            self._router.commit(peer)
            try:
                return await ask(peer)
            except (UnreachableError, RemoteError) as error:
                if error.code not in (UnreachableError.code, CapacityError.code):
                    raise
                refusal = error
            except DeadlineError as error:
                logger.warning("stage_silent", request_id=self.key.request_id, to=_name(peer), error=str(error))
                self._silent.append(peer)
                silence = error
                continue
            self._asked.remove(peer)
            self._router.settle(peer)
            if refusal.code == UnreachableError.code:
                self._router.forget(peer)
        if refusal is None and silence is not None:
            raise silence
        raise CapacityError(str(refusal or "no instance is available"))

    async def _ask(self, peer: Peer, verb: str, message: object, reply: type[Reply]) -> Reply:
        with self._trace.during(verb, peer.epoch, role=peer.role, to=_name(peer)):
            return await self._bus.request(subjects.endpoint(peer, verb), message, reply)

    async def _cancel(self, peer: Peer, reason: str, *, keep_kv: bool = False) -> None:
        subject, message = subjects.endpoint(peer, "cancel"), Cancel(self.key, reason, keep_kv)
        for _ in range(_CANCEL_TRIES):
            try:
                await self._bus.request(subject, message, Ok, timeout_s=_CANCEL_TIMEOUT_S)
                return
            except PddError as error:
                logger.info("cancel_unconfirmed", request_id=self.key.request_id, to=peer.instance, error=str(error))


def same_place(one: Peer, other: Peer) -> bool:
    """Whether both are reached under the same subjects."""
    return (one.dc, one.role, one.instance) == (other.dc, other.role, other.instance)


def _name(peer: Peer) -> str:
    return f"{peer.dc}/{peer.instance}"
