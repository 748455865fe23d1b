"""What the prefix index says of a prompt: hit lengths per instance, or a cold view when it does not answer in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdd.errors import PddError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus
from pdd.mesh.messages import Beat, Lookup, LookupReply
from pdd.prefix.hashing import block_hashes
from pdd.telemetry.tracing import Trace
from pdd.types import Role

HitTokens = dict[tuple[str, Role, str], int]
"""Leading tokens, by (datacenter, role, instance)."""


@dataclass(frozen=True)
class PrefixHits:
    """Leading tokens that instances hold, and how many further ones are on their way to them (never a hit)."""

    stored: HitTokens = field(default_factory=HitTokens)
    in_flight: HitTokens = field(default_factory=HitTokens)

    def held_soon(self) -> HitTokens:
        """Leading tokens that need not be sent again: held, or on their way. For placement; no promise."""
        return {
            place: self.stored.get(place, 0) + self.in_flight.get(place, 0) for place in {*self.stored, *self.in_flight}
        }


class PrefixView:
    """Asks the cache service of the gateway's datacenter. `reachable` tells whether it answered last time."""

    def __init__(self, bus: Bus, dc: str, timeout_s: float) -> None:
        self._bus = bus
        self._subject = subjects.cache_lookup(dc)
        self._timeout_s = timeout_s
        self.reachable = False

    async def probe(self) -> None:
        """Ask for nothing, to learn whether the cache service is there."""
        await self._lookup(Lookup("", 1, []))

    async def hits(self, prompt: Sequence[int], beats: Sequence[Beat], salt: str = "") -> PrefixHits:
        """Hit lengths of `prompt` at the instances that `beats` describe. `salt` keeps tenants apart.

        One look-up for each model and block size among them, all at once. What is not answered in time is cold.
        """
        kinds = sorted({(beat.identity.fingerprint, beat.spec.block_size) for beat in beats})
        questions = [Lookup(model, size, block_hashes(prompt, size, salt=salt)) for model, size in kinds]
        trace = Trace.here()
        with trace.during("prefix_lookup"), trace.active("prefix_lookup"):
            replies = await asyncio.gather(*(self._lookup(question) for question in questions))
        hits = PrefixHits()
        for question, reply in zip(questions, replies, strict=True):
            for hit in reply.hits:
                place = hit.dc, hit.role, hit.instance
                if hit.blocks:
                    hits.stored[place] = hit.blocks * question.block_size
                if hit.in_flight:
                    hits.in_flight[place] = hit.in_flight * question.block_size
        return hits

    async def _lookup(self, message: Lookup) -> LookupReply:
        try:
            reply = await self._bus.request(self._subject, message, LookupReply, timeout_s=self._timeout_s)
        except PddError:
            self.reachable = False
            return LookupReply([])
        self.reachable = True
        return reply
