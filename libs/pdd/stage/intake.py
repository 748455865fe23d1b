"""KV on its way into a decode stage: the blocks it lands in, the transfer that brings it, and what is remembered of it.

A reservation's blocks are of three kinds: cached ones, ones that another transfer is just filling (the reservation
follows it, so that equal KV crosses the line once), and empty ones that its own ticket covers. Once all KV is here it
waits for blocks to begin the answer with; then it is ready. Blocks are given up only when no peer can still write them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog

from pdd.engine.engine import GROWTH_TOKENS
from pdd.errors import (
    CapacityError,
    PddError,
    StaleError,
    TooLargeError,
    TransferError,
    UnknownRequestError,
    UnreachableError,
)
from pdd.kv import KvNamespace
from pdd.mesh import subjects
from pdd.mesh.messages import Drain, InFlight, Ok, Reserve
from pdd.prefix.hashing import block_hashes
from pdd.stage.host import StageHost
from pdd.stage.promises import Promises
from pdd.transfer.incoming import KvImport
from pdd.transfer.interface import KvReceiver
from pdd.types import AttemptKey, Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_DRAIN_TIMEOUT_S = 5.0
_IN_FLIGHT_TIMEOUT_S = 2.0
_IN_FLIGHT_PAUSE_S = 0.2
_PATIENT_BEATS = 3
"""So many beats a reservation that lacks nothing else waits for another's transfer that does not move."""
_VERY_PATIENT_BEATS = 20
"""The same for one that has nothing to receive itself, so that nothing tells whether the sender was at work."""


@dataclass(eq=False)
class Reservation:
    """Blocks held for one attempt's KV, and the transfer that fills those that are not cached.

    `tokens` are those whose KV is received; `hashes` name their whole blocks, where the stage caches. `rest` is how
    many blocks it wants beyond `blocks` before it is ready: the answer's, or room to grow into.
    """

    key: AttemptKey
    source: Peer
    tokens: list[int]
    namespace: KvNamespace | None
    hashes: list[bytes]
    blocks: list[int]
    rest: int
    incoming: KvImport
    transport: KvReceiver
    awaited: list[bytes]
    """Hashes that were announced as on their way here."""
    in_flight_settled: bool
    """Whether the sender has been told what became of the tokens that came under another's ticket."""
    followers: list[Reservation] = field(default_factory=list["Reservation"])
    arrived_before: int = 0
    idle_beats: int = 0
    """Beats since `arrived_tokens` was more than `arrived_before`."""
    given_up: bool = False
    room: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the blocks of the answer are there, too."""

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that were cached here."""
        return self.incoming.ticket.first_token

    @property
    def arrived_tokens(self) -> int:
        """Leading tokens whose KV is in the blocks, verified."""
        return self.incoming.ticket.first_token + self.incoming.received_tokens


class KvIntake:
    """See the module. A stage that `caches` shares blocks between prompts and remembers them; `idle_share` is the share
    of its pool that reservations may hold while they wait for their KV."""

    def __init__(
        self, host: StageHost, *, fabric: KvReceiver, wan: KvReceiver, caches: bool, idle_share: float
    ) -> None:
        self._host = host
        self._fabric = fabric
        self._wan = wan
        self._caches = caches
        self._cache = host.loaded.engine.cache
        self._promises = Promises(self._cache.total_blocks, idle_share)
        self._receiving: dict[str, Reservation] = {}
        """Reservations that hold blocks and are not the engine's, by transfer ID."""
        self._wanting: deque[Reservation] = deque()
        """Those that have their KV, in order of its arrival, waiting for the blocks of the answer."""
        self._kept: dict[AttemptKey, Reservation] = {}
        """Those whose attempt is over and whose KV may still arrive, oldest first."""
        self._loop = asyncio.get_running_loop()
        self._cache.on_free.append(self._blocks_freed)

    def hold(self, message: Reserve) -> Reservation:
        """Take blocks and open the transfer for what they lack.

        Raises `TooLargeError` if prompt and answer can never fit, `CapacityError` if not now.
        """
        spec, cache = self._host.loaded.kv_pool.spec, self._cache
        tokens = [*message.prompt, *message.outputs]
        # The last token of all is followed by nothing, so that nobody wants its KV.
        longest = max(len(message.prompt) + message.max_outputs - 1, len(tokens))
        if (most := spec.blocks_for(longest)) > cache.total_blocks:
            raise TooLargeError(f"needs {most} KV blocks, {self._host.me.role} has {cache.total_blocks}")
        if self._host.engine.status().preempted:
            raise CapacityError(f"sequences of this {self._host.me.role} wait for KV blocks themselves")
        needed = spec.blocks_for(min(longest, len(tokens) + GROWTH_TOKENS))
        namespace = KvNamespace(message.salt) if self._caches else None
        hashes = [] if namespace is None else block_hashes(tokens, spec.block_size, salt=message.salt)
        cached = 0 if namespace is None else cache.peek(namespace, tokens)
        leader, leads_to = self._find_leader(tokens, hashes, message.source)
        at_least = spec.blocks_for(len(tokens)) - max(cached // spec.block_size, leads_to)
        if at_least > cache.available_blocks:
            # Refused without pinning and unpinning what is there, of which the index would hear each time.
            self._drop_oldest_kept()
            raise CapacityError(f"{at_least} KV blocks wanted, {cache.available_blocks} are not in use")
        hit = [] if namespace is None else cache.match(namespace, tokens)
        coming = [] if leader is None else leader.blocks[len(hit) : leads_to]
        cache.share(coming)
        shared = [*hit, *coming]
        own, rest = spec.blocks_for(len(tokens)) - len(shared), needed - spec.blocks_for(len(tokens))
        try:
            self._promises.check(shared, own, rest)
            blocks = [*shared, *cache.allocate(own)]
        except CapacityError:
            cache.release(shared)
            self._drop_oldest_kept()
            raise
        transport = self._fabric if message.source.dc == self._host.me.dc else self._wan
        try:
            incoming = transport.open(
                message.key,
                blocks[len(hit) :],
                len(hit) * spec.block_size,
                len(tokens),
                in_flight_end=len(shared) * spec.block_size,
                on_progress=lambda _: self._pass_on(reservation),
            )
        except PddError:
            cache.release(blocks)
            raise
        reservation = Reservation(
            key=message.key,
            source=message.source,
            tokens=tokens,
            namespace=namespace,
            hashes=hashes,
            blocks=blocks,
            rest=rest,
            incoming=incoming,
            transport=transport,
            awaited=hashes[len(hit) :],
            in_flight_settled=not coming,
        )
        self._promises.add(message.key, blocks, rest)
        self._cache.expect(reservation.awaited)
        self._receiving[incoming.ticket.transfer_id] = reservation
        if leader is not None and coming:
            leader.followers.append(reservation)
            self._pass_on(leader)
        return reservation

    async def wait_ready(self, reservation: Reservation) -> None:
        """Wait for all KV, then for the blocks of the answer. Raises `TransferError` if the KV does not come."""
        incoming = reservation.incoming
        await incoming.wait_complete()
        network = "fabric" if reservation.source.dc == self._host.me.dc else "wan"
        self._host.metrics.transfer(network, "received", incoming.received_bytes, incoming.elapsed_s)
        self._pass_on(reservation)
        if reservation.namespace is not None:
            self._cache.publish(reservation.namespace, reservation.tokens, reservation.blocks)
        self._settle_awaited(reservation)
        self._wanting.append(reservation)
        self._give_room()
        await reservation.room.wait()

    def beat(self) -> None:
        """Once a second: nobody waits for ever for what another's transfer should bring.

        That one may be waiting itself, for blocks of its sender that are held until these have arrived.
        """
        self._give_room()
        for reservation in list(self._receiving.values()):
            if reservation.given_up or reservation.in_flight_settled or not reservation.incoming.own_complete:
                continue
            moved = reservation.arrived_tokens > reservation.arrived_before
            reservation.arrived_before = reservation.arrived_tokens
            reservation.idle_beats = 0 if moved else reservation.idle_beats + 1
            patience = _PATIENT_BEATS if reservation.incoming.received_bytes else _VERY_PATIENT_BEATS
            if reservation.idle_beats >= patience:
                logger.info("in_flight_not_awaited", request_id=reservation.key.request_id)
                self._settle_in_flight(reservation)

    def waits_for_room(self, reservation: Reservation) -> bool:
        """Whether all KV is here and blocks for the answer are not."""
        return reservation in self._wanting

    def hand_to_engine(self, reservation: Reservation) -> list[int]:
        """The blocks, of a reservation that is ready: they are the engine's from here on."""
        del self._receiving[reservation.incoming.ticket.transfer_id]
        reservation.given_up = True
        reservation.transport.close(reservation.incoming.ticket.transfer_id)
        return reservation.blocks

    def give_up(self, reservation: Reservation) -> None:
        """Give the blocks up, as soon as nobody can write them any more. Fine for one that was given up before."""
        if reservation.given_up:
            return
        reservation.given_up = True
        self._promises.remove(reservation.key)
        self._pass_on(reservation)
        self._host.tasks.spawn(self._free(reservation), f"free {reservation.key}")

    def keep(self, reservation: Reservation) -> None:
        """The attempt is over, but its KV may still arrive: for the cache, as long as nobody needs the blocks.

        The same as `give_up` where there is no cache, or nothing left to wait for.
        """
        if reservation.given_up or reservation.namespace is None or reservation.incoming.complete:
            self.give_up(reservation)
            return
        self._promises.remove(reservation.key)
        self._promises.add(reservation.key, reservation.blocks, 0)
        self._kept[reservation.key] = reservation
        self._host.tasks.spawn(self._let_arrive(reservation), f"keep {reservation.key}")

    def _find_leader(
        self, tokens: Sequence[int], hashes: Sequence[bytes], source: Peer
    ) -> tuple[Reservation | None, int]:
        """The reservation whose KV, arriving now, shares most leading blocks with this prompt; and how many.

        Of one sender only: should both transfers write a block in the end, they write what it has cached once.
        """
        arriving = [
            one
            for one in self._receiving.values()
            if one.source == source and not one.given_up and one.incoming.error is None
        ]
        shared = ((common_prefix(hashes, one.hashes), one) for one in arriving)
        blocks, leader = max(shared, key=lambda found: found[0], default=(0, None))
        same = blocks * self._cache.block_size
        if leader is None or tokens[:same] != leader.tokens[:same]:  # equal hashes are no proof
            return None, 0
        return leader, blocks

    def _pass_on(self, reservation: Reservation) -> None:
        """What has arrived for a reservation has arrived for its followers; the sender hears what need not come."""
        if (
            not reservation.in_flight_settled
            and reservation.arrived_tokens >= reservation.incoming.ticket.in_flight_end
        ):
            self._settle_in_flight(reservation)
        for follower in reservation.followers:
            follower.incoming.arrived_elsewhere(reservation.arrived_tokens)

    def _settle_in_flight(self, reservation: Reservation) -> None:
        reservation.in_flight_settled = True
        work = self._tell_sender(reservation, reservation.arrived_tokens)
        self._host.tasks.spawn(work, f"in_flight {reservation.key}")

    async def _tell_sender(self, reservation: Reservation, missing_from: int) -> None:
        """Say what became of the tokens that came under another's ticket, until it is heard."""
        message = InFlight(reservation.key, reservation.incoming.ticket.transfer_id, missing_from)
        subject = subjects.endpoint(reservation.source, "in_flight")
        while not reservation.given_up or reservation.incoming.complete:
            try:
                await self._host.bus.request(subject, message, Ok, timeout_s=_IN_FLIGHT_TIMEOUT_S)
                return
            except PddError as error:
                if error.code in (StaleError.code, UnknownRequestError.code):
                    reservation.incoming.fail(TransferError(f"{reservation.source.instance} sends no more: {error}"))
                    return
                if not self._host.registry.is_live(reservation.source):
                    return
            await asyncio.sleep(_IN_FLIGHT_PAUSE_S)

    def _blocks_freed(self) -> None:
        """On any thread: perhaps somebody waits for them."""
        if self._wanting:
            self._loop.call_soon_threadsafe(self._give_room)

    def _give_room(self) -> None:
        """Give blocks for their answers to reservations that have all their KV, in order, as far as they go."""
        while self._wanting:
            first = self._wanting[0]
            if not first.given_up:
                status = self._host.engine.status()
                if status.preempted and status.running:
                    return  # what will be free is theirs; when nothing runs any more, they may lack what we hold
                try:
                    first.blocks.extend(self._cache.allocate(first.rest))
                except CapacityError:
                    self._drop_oldest_kept()
                    return
                self._promises.remove(first.key)
                first.room.set()
            self._wanting.popleft()

    async def _let_arrive(self, reservation: Reservation) -> None:
        try:
            async with asyncio.timeout(self._host.lease_s):
                await reservation.incoming.wait_complete()
        except (TimeoutError, PddError) as error:
            logger.info("kv_not_kept", request_id=reservation.key.request_id, error=str(error) or "too late")
        self._kept.pop(reservation.key, None)
        self.give_up(reservation)

    def _drop_oldest_kept(self) -> None:
        """Blocks are wanted by requests that live."""
        reservation = next(iter(self._kept.values()), None)
        if reservation is not None:
            del self._kept[reservation.key]
            self.give_up(reservation)

    async def _free(self, reservation: Reservation) -> None:
        """Give up blocks that KV may still be arriving in, once it no longer can. What has arrived may stay cached.

        The sender is asked to drain first: a fabric writes without asking, so its word is the only fence (or the end of
        its epoch); the stream fences itself, but would take the refusal of a slice for a failure of the attempt.
        """
        transfer_id, source = reservation.incoming.ticket.transfer_id, reservation.source
        drained = reservation.incoming.complete
        while not drained:
            try:
                message = Drain(reservation.key, transfer_id)
                await self._host.bus.request(
                    subjects.endpoint(source, "drain"), message, Ok, timeout_s=_DRAIN_TIMEOUT_S
                )
                drained = True
            except UnreachableError:
                drained = not self._host.registry.is_live(source)
            except PddError as error:
                logger.warning("drain_unconfirmed", source=source.instance, error=str(error))
            drained = drained or reservation.transport.fences_itself
            if not drained:
                await asyncio.sleep(1.0)
        self._close(reservation)

    def _close(self, reservation: Reservation) -> None:
        """Nothing can be written any more. Those that waited for this transfer have to see to the rest themselves."""
        arrived = reservation.arrived_tokens
        reservation.transport.close(reservation.incoming.ticket.transfer_id)
        self._receiving.pop(reservation.incoming.ticket.transfer_id, None)
        self._pass_on(reservation)
        for follower in reservation.followers:
            if not (follower.given_up or follower.in_flight_settled):
                self._settle_in_flight(follower)
        if reservation.namespace is None:
            self._cache.release(reservation.blocks)
        else:
            self._cache.retire(reservation.namespace, reservation.tokens[:arrived], reservation.blocks)
        self._settle_awaited(reservation)

    def _settle_awaited(self, reservation: Reservation) -> None:
        awaited, reservation.awaited = reservation.awaited, []
        self._cache.settle(awaited)


def common_prefix(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Length of the common prefix of two hash chains: once they differ they never meet again."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda index: one[index] != other[index])
