"""Prefill: computes prompts, samples each first token, ships KV while it computes, hands the stream over.

An attempt's life: submitted (it waits its turn) -> admitted (blocks are held, cached ones among them; the rest of the
prompt is computed) -> attached, perhaps before that (destinations are known: KV that exists leaves at once, each
further chunk when it exists) -> first token -> handed over -> delivered: then its blocks stay cached until they are
needed. Prefill decides the path again when it has the first token and knows what is left on the line.

Attempts are admitted one by one, as late as the engine allows, so that a prompt finds cached what it has in common with
those before it. Whoever waits holds nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog

from pdd.engine.engine import SequenceSpec, StepResult
from pdd.errors import CapacityError, DeadlineError, PddError, RemoteError, TooLargeError, UnreachableError
from pdd.kv import KvNamespace, Ticket
from pdd.mesh import subjects
from pdd.mesh.bus import Endpoint
from pdd.mesh.messages import Attach, Cancel, Drain, InFlight, Ok, Phase, Replay, Replayed, Submit, Submitted
from pdd.policy.pipeline import Line, Transfer, choose_path
from pdd.stage.attempts import TOMBSTONE_S, Attempts
from pdd.stage.host import StageHost
from pdd.stage.output import OutputStream
from pdd.telemetry.tracing import Trace, outside
from pdd.transfer.interface import KvSender
from pdd.transfer.outgoing import KvExport
from pdd.types import AttemptKey, Handoff, HandoffReply, Path, Peer, Pipeline, TokenEvent, hash_prompt
from services.prefill.line import LineMeter

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_HANDOFF_TIMEOUT_S = 2.0
_HANDOFF_TRIES = 5


@dataclass(eq=False)
class PrefillAttempt:
    """One attempt on Prefill."""

    submit: Submit
    stream: OutputStream
    trace: Trace
    blocks: list[int] = field(default_factory=list[int])
    """None before it is admitted."""
    hit_tokens: int = 0
    computed: int = 0
    path: Path = Path.DIRECT
    attach: Attach | None = None
    exports: dict[str, KvExport] = field(default_factory=dict[str, KvExport])
    """Running exports by transfer ID."""
    missing_from: dict[str, int] = field(default_factory=dict[str, int])
    """By transfer ID: what the receiver lacks of what was in flight to it, heard before the export was begun."""
    handing_over: bool = False
    handed_over: bool = False
    freeing: asyncio.Task[None] | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    @property
    def key(self) -> AttemptKey:
        return self.submit.key

    @property
    def gateway(self) -> Peer:
        return self.submit.gateway

    @property
    def tokens(self) -> list[int]:
        """Those whose KV Prefill computes: the prompt and what earlier attempts emitted."""
        return [*self.submit.prompt, *self.submit.outputs]

    @property
    def target_tokens(self) -> int:
        """How many these are."""
        return len(self.submit.prompt) + len(self.submit.outputs)

    @property
    def namespace(self) -> KvNamespace:
        """Who may share its KV."""
        return KvNamespace(self.submit.salt)

    @property
    def sampled(self) -> bool:
        """Whether the first token exists."""
        return len(self.stream.ids) > len(self.submit.outputs)


@dataclass(frozen=True)
class Admission:
    """Bounds: attempts that may wait, and the share of the pool that computed prompts may hold, waiting for the WAN,
    before no further prompt is begun."""

    max_waiting: int
    held_for_wan_share: float


@dataclass(frozen=True)
class LinePrior:
    """The WAN line until it has been measured, and the exposed wait that is acceptable."""

    goodput_bytes_per_s: float
    delay_s: float
    budget_s: float


class PrefillService:
    """See the module. `sender` opens exports to any kind of endpoint."""

    def __init__(
        self, host: StageHost, sender: KvSender, line: LineMeter, prior: LinePrior, admission: Admission
    ) -> None:
        self._host = host
        self._cache = host.loaded.engine.cache
        self._admission = admission
        self._sender = sender
        self._line = line
        self._prior = prior
        self._attempts: Attempts[PrefillAttempt] = Attempts(host.now)
        self._waiting: deque[PrefillAttempt] = deque()
        self._kept: dict[AttemptKey, PrefillAttempt] = {}
        """Attempts that are over and whose KV still goes to MainDecode, oldest first."""
        self._exporting: dict[str, PrefillAttempt] = {}
        """Whose export runs, by transfer ID; attempts that are over, too: an export leaves only when it is quiet."""
        self._stopped: dict[str, float] = {}
        """When transfers were stopped on purpose, by transfer ID; what is here is not (again) begun."""
        host.on_abandoned = self._abandon
        host.on_beat = self._on_beat
        host.waiting = lambda: len(self._waiting)
        host.stale_messages = lambda: self._attempts.stale_messages
        host.line_figures = line.figures

    def endpoints(self) -> list[Endpoint]:
        """What Prefill serves."""
        me = self._host.me
        return [
            Endpoint("submit", subjects.endpoint(me, "submit"), Submit, self.submit),
            Endpoint("attach", subjects.endpoint(me, "attach"), Attach, self.attach),
            Endpoint("in_flight", subjects.endpoint(me, "in_flight"), InFlight, self.in_flight),
            Endpoint("drain", subjects.endpoint(me, "drain"), Drain, self.drain),
            Endpoint("cancel", subjects.endpoint(me, "cancel"), Cancel, self.cancel),
            Endpoint("replay", subjects.endpoint(me, "replay"), Replay, self.replay),
        ]

    async def submit(self, message: Submit) -> Submitted:
        """Take a prompt in. Raises `TooLargeError`, `CapacityError` (too many wait already) or `StaleError`."""
        known = self._attempts.find(message.key)
        if known is not None:
            return Submitted(self._host.me, known.hit_tokens)
        stream = OutputStream(message.key, len(message.prompt), message.outputs)
        attempt = PrefillAttempt(message, stream, Trace.here(attempt=message.key.attempt))
        tokens, needed = attempt.target_tokens, self._needed_blocks(attempt)
        if tokens >= self._host.loaded.max_model_len:
            raise TooLargeError(
                f"prompt of {tokens} tokens, prompt and answer may have {self._host.loaded.max_model_len}"
            )
        if needed > self._cache.total_blocks:
            total = self._cache.total_blocks
            raise TooLargeError(f"prompt of {tokens} tokens needs {needed} KV blocks, prefill has {total}")
        if self._waiting and len(self._waiting) >= self._admission.max_waiting:
            raise CapacityError(f"{len(self._waiting)} prompts wait for prefill already")
        self._attempts.open(message.key, attempt)
        self._host.watch(message.key, message.gateway)
        attempt.trace.begin("prefill_queue", tokens=tokens)
        self._waiting.append(attempt)
        self._admit()
        hit = attempt.hit_tokens if attempt.blocks else self._cache.peek(attempt.namespace, attempt.tokens[:-1])
        return Submitted(self._host.me, hit)

    async def attach(self, message: Attach) -> Ok:
        """Destinations are known: send what exists, and the rest as it comes."""
        attempt = self._attempts.get(message.key)
        if attempt.attach is not None:
            return Ok()
        attempt.attach = message
        attempt.path = message.path
        if attempt.blocks:
            self._export_all(attempt, message)
        self._hand_over_if_due(attempt)
        return Ok()

    async def in_flight(self, message: InFlight) -> Ok:
        """MainDecode has got what came under another's ticket, or wants it from us after all."""
        exporting = self._exporting.get(message.transfer_id)
        if exporting is not None:
            exporting.exports[message.transfer_id].resolve_in_flight(message.missing_from)
        elif message.transfer_id not in self._stopped:
            self._attempts.get(message.key).missing_from[message.transfer_id] = message.missing_from
        return Ok()

    async def drain(self, message: Drain) -> Ok:
        """Stop writing under one transfer; answered once nothing of it is in flight."""
        await self._stop_export(message.transfer_id)
        attempt = self._attempts.find(message.key)
        if attempt is not None:
            await self._free_if_done(attempt)
        return Ok()

    async def cancel(self, message: Cancel) -> Ok:
        """Drop the attempt; answered once it writes to nobody, except to MainDecode's cache if that is wanted."""
        await self._drop(message.key, keep_kv=message.keep_kv)
        return Ok()

    async def replay(self, message: Replay) -> Replayed:
        """Say the first token again."""
        return self._attempts.get(message.key).stream.replay(message.first_position, 0)

    def on_step(self, result: StepResult) -> None:
        """After each engine step: ship what now exists, publish first tokens, hand over."""
        self._host.measure(result)
        batches: dict[Peer, list[TokenEvent]] = {}
        for update in result.updates:
            attempt = self._attempts.find(update.key)
            if attempt is None:
                continue
            attempt.computed = update.num_computed
            for export in attempt.exports.values():
                export.advance(attempt.computed)
            attempt.trace.event("prefill", "chunk", computed_tokens=attempt.computed)
            phase = Phase.PREFILL_DONE if update.new_tokens else Phase.PREFILL_CHUNK
            self._host.progress(attempt.key, attempt.gateway, phase, tokens=attempt.computed)
            if update.new_tokens:
                batches.setdefault(attempt.gateway, []).extend(attempt.stream.emit(update.new_tokens, 0))
                attempt.stream.finish = update.finish
                with attempt.trace.active():
                    self._first_token(attempt)
        for gateway, events in batches.items():
            self._host.publisher.publish(gateway, events)
        self._admit()

    def _first_token(self, attempt: PrefillAttempt) -> None:
        attempt.trace.end("prefill", tokens=attempt.computed - attempt.hit_tokens)
        if attempt.stream.finish is not None:
            self._spawn(attempt, self._end(attempt), "end")
        else:
            self._reconsider(attempt)
            self._hand_over_if_due(attempt)

    def _spawn(self, attempt: PrefillAttempt, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run `work` for an attempt; it ends with it. What it raises by accident fails the attempt at once."""
        fail = partial(self._fail, attempt)
        attempt.tasks.append(self._host.spawn_for(attempt.key, work, name, fail))

    def _needed_blocks(self, attempt: PrefillAttempt) -> int:
        return self._host.loaded.kv_pool.spec.blocks_for(attempt.target_tokens)

    def _admit(self) -> None:
        """Begin with waiting attempts, in order, while the engine has less to do than this step and the next."""
        while self._waiting:
            to_compute = sum(a.target_tokens - a.computed for _, a in self._attempts if a.blocks and not a.sampled)
            if to_compute >= 2 * self._host.engine.status().step_tokens or not self._take_blocks(self._waiting[0]):
                return
            attempt = self._waiting.popleft()
            with attempt.trace.active():
                self._start(attempt)

    def _take_blocks(self, attempt: PrefillAttempt) -> bool:
        """Give an attempt the blocks it needs, cached ones first. False if there are too few."""
        computed = [*(a for _, a in self._attempts if a.sampled and a.freeing is None), *self._kept.values()]
        held_for_wan = sum(len(a.blocks) - a.hit_tokens // self._cache.block_size for a in computed)
        if held_for_wan > self._admission.held_for_wan_share * self._cache.total_blocks:
            self._drop_oldest_kept()
            return False
        # The last token is computed in any case: it gives the logits.
        tokens, needed = attempt.tokens[:-1], self._needed_blocks(attempt)
        cached = self._cache.peek(attempt.namespace, tokens) // self._cache.block_size
        if needed - cached > self._cache.available_blocks:
            self._drop_oldest_kept()
            return False  # without pinning and unpinning what is there, of which the index would hear each time
        hit = self._cache.match(attempt.namespace, tokens)
        try:
            attempt.blocks = [*hit, *self._cache.allocate(needed - len(hit))]
        except CapacityError:
            self._cache.release(hit)
            self._drop_oldest_kept()
            return False
        attempt.hit_tokens = attempt.computed = len(hit) * self._cache.block_size
        self._host.metrics.hit(attempt.target_tokens, attempt.hit_tokens)
        return True

    def _start(self, attempt: PrefillAttempt) -> None:
        """Hand an admitted attempt to the engine; what is cached leaves before anything is computed."""
        attempt.trace.end("prefill_queue", hit_tokens=attempt.hit_tokens)
        attempt.trace.begin("prefill", hit_tokens=attempt.hit_tokens)
        message = attempt.submit
        spec = SequenceSpec(
            key=message.key,
            prompt=message.prompt,
            outputs=message.outputs,
            sampling=message.sampling,
            stop=message.stop,
            num_computed=attempt.hit_tokens,
            blocks=attempt.blocks,
            sample_limit=len(message.outputs) + 1,
            namespace=attempt.namespace,
        )
        # Queued here and now, so that a release that follows comes after it.
        added = self._host.engine.call(lambda engine: engine.add(spec))
        self._spawn(attempt, self._confirm_start(attempt, added), "start")
        self._host.progress(message.key, message.gateway, Phase.PREFILL_STARTED, tokens=attempt.hit_tokens)
        if attempt.attach is not None:
            try:
                self._export_all(attempt, attempt.attach)
            except PddError as error:
                # Nobody is there to be told by a reply, and the step that made room is not to blame.
                self._spawn(attempt, self._fail(attempt, error), "fail")

    def _on_beat(self) -> None:
        """Waiting is a sign of life; and blocks may have become free that nobody told of."""
        for attempt in self._waiting:
            self._host.progress(attempt.key, attempt.gateway, Phase.QUEUED)
        self._admit()

    async def _confirm_start(self, attempt: PrefillAttempt, added: Awaitable[None]) -> None:
        """The engine answers at its next step boundary; the gateway need not wait for that."""
        try:
            await asyncio.shield(added)
        except PddError as error:
            await self._fail(attempt, error)

    def _export_all(self, attempt: PrefillAttempt, attach: Attach) -> None:
        for ticket in (attach.relay, attach.main):
            if ticket is not None:
                self._export(attempt, ticket)

    def _export(self, attempt: PrefillAttempt, ticket: Ticket) -> None:
        if ticket.transfer_id in self._stopped or attempt.stream.finish is not None or attempt.freeing is not None:
            return
        self._line.note(ticket)
        with outside():  # A connection that this opens serves later requests, too.
            export = self._sender.open(ticket, attempt.key, attempt.blocks)
        attempt.trace.begin(
            "kv_transfer",
            ticket.transfer_id,
            to=f"{ticket.holder.dc}/{ticket.holder.role}/{ticket.holder.instance}",
            transfer_path="fabric" if ticket.holder.dc == self._host.me.dc else "wan",
        )
        attempt.exports[ticket.transfer_id] = export
        self._exporting[ticket.transfer_id] = attempt
        export.advance(attempt.computed)
        if (missing_from := attempt.missing_from.get(ticket.transfer_id)) is not None:
            export.resolve_in_flight(missing_from)
        self._spawn(attempt, self._deliver(attempt, ticket, export), "deliver")

    async def _deliver(self, attempt: PrefillAttempt, ticket: Ticket, export: KvExport) -> None:
        try:
            await export.wait_delivered()
        except PddError as error:
            attempt.trace.fail("kv_transfer", error, ticket.transfer_id)
            if ticket.transfer_id not in self._stopped:
                await self._fail(attempt, error)
            return
        logger.info(
            "kv_transfer_completed",
            request_id=attempt.key.request_id,
            to=f"{ticket.holder.dc}/{ticket.holder.role}",
            bytes=export.sent_bytes,
        )
        self._account(attempt, export, "delivered")
        self._forget_export(attempt, ticket.transfer_id)
        await self._free_if_done(attempt)

    def _account(self, attempt: PrefillAttempt, export: KvExport, outcome: str) -> None:
        """A transfer is over: count what it moved."""
        network = "fabric" if export.ticket.holder.dc == self._host.me.dc else "wan"
        self._host.metrics.transfer(network, "sent", export.sent_bytes, export.elapsed_s)
        attempt.trace.end(
            "kv_transfer",
            export.ticket.transfer_id,
            transfer_bytes=export.sent_bytes,
            goodput_bytes_per_s=export.sent_bytes / max(export.elapsed_s, 1e-6),
            outcome=outcome,
        )

    async def _stop_export(self, transfer_id: str) -> None:
        """Never write under this transfer (again); returns once nothing of it is in flight."""
        now = self._host.now()
        self._stopped = {k: t for k, t in self._stopped.items() if now - t < TOMBSTONE_S} | {transfer_id: now}
        attempt = self._exporting.get(transfer_id)
        if attempt is None:
            return
        export = attempt.exports[transfer_id]
        if not export.ended:
            # Before whoever waits for the delivery hears of the end: it is no failure.
            self._account(attempt, export, "stopped")
        await export.cancel()
        self._forget_export(attempt, transfer_id)

    def _forget_export(self, attempt: PrefillAttempt, transfer_id: str) -> None:
        attempt.exports.pop(transfer_id, None)
        self._exporting.pop(transfer_id, None)

    def _reconsider(self, attempt: PrefillAttempt) -> None:
        """With the first token at hand: is RelayDecode still worth its while?"""
        attach = attempt.attach
        if attach is None or attach.relay is None or not attach.may_release_relay:
            return
        export = attempt.exports.get(attach.main.transfer_id)
        left = export.unsettled_bytes if export is not None else 0
        figures = self._line.figures()
        line = Line(
            backlog_bytes=max(figures.backlog_bytes - left, 0),
            goodput_bytes_per_s=figures.goodput_bytes_per_s or self._prior.goodput_bytes_per_s,
            delay_s=self._prior.delay_s,
        )
        transfer = Transfer(delta_bytes=left, last_chunk_bytes=0, remaining_compute_s=0.0)
        decision = choose_path(Pipeline.PDD, line, transfer, budget_s=self._prior.budget_s, relay_available=True)
        if decision.path is Path.DIRECT:
            attempt.path = Path.DIRECT
            self._spawn(attempt, self._release_relay(attempt, attach.relay), "release_relay")
            self._host.progress(
                attempt.key, attempt.gateway, Phase.PREFILL_DONE, path=Path.DIRECT, reason="relay_not_needed"
            )

    async def _release_relay(self, attempt: PrefillAttempt, relay: Ticket) -> None:
        await self._stop_export(relay.transfer_id)
        await self._free_if_done(attempt)

    def _hand_over_if_due(self, attempt: PrefillAttempt) -> None:
        due = attempt.sampled and attempt.attach is not None and attempt.stream.finish is None
        if due and not attempt.handing_over:
            attempt.handing_over = True
            self._spawn(attempt, self._hand_over(attempt), "handoff")

    async def _hand_over(self, attempt: PrefillAttempt) -> None:
        attach = attempt.attach
        if attach is None:
            return
        relayed = attempt.path is Path.RELAYED and attach.relay is not None
        ticket = attach.relay if relayed and attach.relay is not None else attach.main
        message = Handoff(
            key=attempt.key,
            sender=self._host.me,
            seq=1,
            generation=0,
            first_position=len(attempt.submit.prompt),
            ids=attempt.stream.ids,
            final=True,
            covered_tokens=attempt.target_tokens,
            prompt_hash=hash_prompt(attempt.submit.prompt),
        )
        attempt.trace.begin("handoff", to=f"{ticket.holder.dc}/{ticket.holder.role}/{ticket.holder.instance}")
        try:
            reply = await self._offer(ticket.holder, message)
            if not reply.accepted:
                raise RemoteError("handoff_refused", f"{ticket.holder.role} refused the hand-over: {reply.reason}")
        except PddError as error:
            self._host.metrics.handoff("failed", len(message.ids))
            attempt.trace.fail("handoff", error)
            await self._fail(attempt, error)
            return
        self._host.metrics.handoff("accepted", len(message.ids))
        attempt.trace.end("handoff", tokens=len(message.ids))
        attempt.handed_over = True
        await self._free_if_done(attempt)

    async def _offer(self, target: Peer, message: Handoff) -> HandoffReply:
        """The hand-over is idempotent by `seq`, so silence is answered by saying it again."""
        subject = subjects.endpoint(target, "handoff")
        for _ in range(_HANDOFF_TRIES - 1):
            try:
                return await self._host.bus.request(subject, message, HandoffReply, timeout_s=_HANDOFF_TIMEOUT_S)
            except DeadlineError:
                logger.warning("handoff_unanswered", request_id=message.key.request_id, to=target.instance)
            except UnreachableError:
                await asyncio.sleep(0.2)
        return await self._host.bus.request(subject, message, HandoffReply, timeout_s=_HANDOFF_TIMEOUT_S)

    async def _end(self, attempt: PrefillAttempt) -> None:
        """The first token ended the answer: nothing more crosses."""
        finish = attempt.stream.finish
        if finish is None:
            return
        await self._free_kv(attempt)
        await self._host.report_finished(attempt.key, attempt.gateway, 0, attempt.stream.end_position, finish)

    async def _fail(self, attempt: PrefillAttempt, error: PddError) -> None:
        await self._host.report_failed(attempt.key, attempt.gateway, error)
        await self._drop(attempt.key)

    async def _drop(self, key: AttemptKey, *, keep_kv: bool = False) -> None:
        attempt = self._attempts.close(key)
        if attempt is None:
            return
        self._host.unwatch(key)
        if not attempt.blocks:
            self._waiting.remove(attempt)
        for task in attempt.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if attempt.attach is not None:
            main = attempt.exports.get(attempt.attach.main.transfer_id)
            if keep_kv and main is not None and attempt.sampled and attempt.freeing is None:
                self._kept[key] = attempt
                for transfer_id in [one for one in attempt.exports if one != main.ticket.transfer_id]:
                    await self._stop_export(transfer_id)
                self._host.tasks.spawn(self._let_arrive(attempt, main), f"keep {key}")
                return
        await self._free_kv(attempt)

    async def _let_arrive(self, attempt: PrefillAttempt, export: KvExport) -> None:
        """The answer has ended; MainDecode gets the KV for its cache, unless that takes too long."""
        try:
            async with asyncio.timeout(self._host.lease_s):
                await export.wait_delivered()
            self._account(attempt, export, "delivered")
        except (TimeoutError, PddError) as error:
            logger.info("kv_not_kept", request_id=attempt.key.request_id, error=str(error) or "too late")
        self._kept.pop(attempt.key, None)
        await self._free_kv(attempt)

    def _drop_oldest_kept(self) -> None:
        """Blocks are wanted by requests that live."""
        attempt = next(iter(self._kept.values()), None)
        if attempt is not None:
            del self._kept[attempt.key]
            self._host.tasks.spawn(self._free_kv(attempt), f"drop {attempt.key}")

    async def _free_if_done(self, attempt: PrefillAttempt) -> None:
        if attempt.handed_over and not attempt.exports:
            await self._free_kv(attempt)

    async def _free_kv(self, attempt: PrefillAttempt) -> None:
        """Stop all exports, then give the blocks back. Goes on to its end even if whoever waits is cancelled."""
        if attempt.freeing is None:
            attempt.freeing = self._host.tasks.spawn(self._give_back(attempt), f"free {attempt.key}")
        await asyncio.shield(attempt.freeing)

    async def _give_back(self, attempt: PrefillAttempt) -> None:
        for transfer_id in list(attempt.exports):
            await self._stop_export(transfer_id)
        attempt.trace.close("over")
        await self._host.release(attempt.key)
        self._admit()

    def _abandon(self, key: AttemptKey) -> None:
        self._host.tasks.spawn(self._drop(key), f"drop {key}")
