"""What the prefix index says of a prompt: hit lengths per instance, or a cold view when it does not answer in time."""

from __future__ import annotations

from collections.abc import Sequence

from pdd.errors import PddError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus
from pdd.mesh.messages import Beat, Lookup, LookupReply
from pdd.prefix.hashing import block_hashes
from pdd.telemetry.tracing import Trace
from pdd.types import Role

HitTokens = dict[tuple[str, Role, str], int]
"""Leading tokens held, by (datacenter, role, instance)."""


class PrefixView:
    """Asks the cache service of the gateway's datacenter. `reachable` tells whether it answered last time."""

    def __init__(self, bus: Bus, dc: str, timeout_s: float) -> None:
        self._bus = bus
        self._subject = subjects.cache_lookup(dc)
        self._timeout_s = timeout_s
        self.reachable = False

    async def probe(self) -> None:
        """Ask for nothing, to learn whether the cache service is there."""
        await self._lookup(Lookup("", []))

    async def hits(self, prompt: Sequence[int], beats: Sequence[Beat]) -> HitTokens:
        """Hit lengths of `prompt` at the instances that `beats` describe (of one model and block size)."""
        if not beats:
            return {}
        spec, fingerprint = beats[0].spec, beats[0].identity.fingerprint
        question = Lookup(fingerprint, block_hashes(prompt, spec.block_size))
        trace = Trace.here()
        with trace.during("prefix_lookup"), trace.active("prefix_lookup"):
            reply = await self._lookup(question)
        return {(hit.dc, hit.role, hit.instance): hit.blocks * spec.block_size for hit in reply.hits}

    async def _lookup(self, message: Lookup) -> LookupReply:
        try:
            reply = await self._bus.request(self._subject, message, LookupReply, timeout_s=self._timeout_s)
        except PddError:
            self.reachable = False
            return LookupReply([])
        self.reachable = True
        return reply
