"""Output tokens on their way to gateways: what a stage has sampled, and the one message a step sends each gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from pdd.errors import PddError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus
from pdd.mesh.messages import Replayed, TokenBatch
from pdd.types import EMPTY_OUTPUT_HASH, AttemptKey, FinishReason, Peer, TokenEvent, hash_output

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_BATCHES_AT_ONCE = 1024


class OutputStream:
    """All output IDs of one attempt as this stage knows them; what the gateway missed is replayed from here."""

    def __init__(self, key: AttemptKey, prompt_tokens: int, outputs: Sequence[int]) -> None:
        self.key = key
        self.finish: FinishReason | None = None
        self._prompt_tokens = prompt_tokens
        self._ids: list[int] = []
        self._hash = EMPTY_OUTPUT_HASH
        self.learn(outputs)

    @property
    def ids(self) -> list[int]:
        """All output IDs, from the prompt's end."""
        return list(self._ids)

    @property
    def end_position(self) -> int:
        """One past the last token, in prompt + output."""
        return self._prompt_tokens + len(self._ids)

    def learn(self, outputs: Sequence[int]) -> None:
        """Take in all output IDs emitted so far by others (a superset of what is known)."""
        new = outputs[len(self._ids) :]
        self._ids.extend(new)
        self._hash = hash_output(self._hash, new)

    def emit(self, tokens: Sequence[int], generation: int) -> list[TokenEvent]:
        """Append tokens sampled here and return their events."""
        events: list[TokenEvent] = []
        for token in tokens:
            events.append(TokenEvent(self.key, generation, self.end_position, token, self._hash))
            self._ids.append(token)
            self._hash = hash_output(self._hash, (token,))
        return events

    def replay(self, first_position: int, generation: int) -> Replayed:
        """IDs from `first_position` on."""
        start = max(first_position - self._prompt_tokens, 0)
        prefix_hash = hash_output(EMPTY_OUTPUT_HASH, self._ids[:start])
        return Replayed(generation, self._prompt_tokens + start, prefix_hash, self._ids[start:], self.finish)


class TokenPublisher:
    """Publishes token events, in order, one message per (step, gateway).

    The queue is bounded and never waited for: the step loop must not wait for the network. A batch that finds it full
    is dropped and logged; the gateway sees the gap and asks for a replay.
    """

    def __init__(self, bus: Bus, me: Peer) -> None:
        self._bus = bus
        self._me = me
        self._queue: asyncio.Queue[tuple[Peer, list[TokenEvent]]] = asyncio.Queue(_BATCHES_AT_ONCE)

    def publish(self, gateway: Peer, events: list[TokenEvent]) -> None:
        """Send `events` of one step to `gateway`."""
        try:
            self._queue.put_nowait((gateway, events))
        except asyncio.QueueFull:
            logger.error("token_batch_dropped", gateway=gateway.instance, events=len(events))

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            gateway, events = await self._queue.get()
            try:
                await self._bus.publish(subjects.tokens(gateway), TokenBatch(self._me, events))
            except PddError as error:
                logger.warning("token_batch_lost", gateway=gateway.instance, error=str(error))
