"""Which instance holds which KV block, in Redis: a hint for routing, never a promise.

Per model fingerprint: the set of instances that hold anything, and per instance the set of its block hashes. As
eviction takes leaves only, an instance's holdings are closed under prefix, so that the number of leading blocks it
holds is found by exponential + binary search, on the server, in one round trip for all instances.
"""

from __future__ import annotations

from collections.abc import Sequence

from redis.asyncio import Redis

from pdd.mesh.messages import Hit, KvEvent
from pdd.types import KvEventKind, Peer, Role

_LOOKUP = """
local counts = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local held = KEYS[1] .. ':' .. name
  local low, high = 0, 1
  while high <= #ARGV and redis.call('SISMEMBER', held, ARGV[high]) == 1 do
    low, high = high, high * 2
  end
  high = math.min(high, #ARGV + 1)
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if redis.call('SISMEMBER', held, ARGV[middle]) == 1 then low = middle else high = middle end
  end
  if low > 0 then table.insert(counts, name); table.insert(counts, low) end
end
return counts
"""


class PrefixIndex:
    """See the module. The connection belongs to the caller. Redis' own errors are let through."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lookup = redis.register_script(_LOOKUP)

    async def apply(self, event: KvEvent) -> None:
        """Take in what happened to blocks of one instance. Applying the same event again changes nothing."""
        instances, name = _instances_key(event.fingerprint), _name(event.peer)
        held = f"{instances}:{name}"
        async with self._redis.pipeline(transaction=True) as pipe:
            match event.kind:
                case KvEventKind.STORED:
                    pipe.sadd(instances, name)
                    pipe.sadd(held, *event.hashes)
                case KvEventKind.REMOVED:
                    pipe.srem(held, *event.hashes)
                case KvEventKind.CLEARED:
                    pipe.srem(instances, name)
                    pipe.delete(held)
            await pipe.execute()

    async def forget(self, fingerprint: str, peer: Peer) -> None:
        """The instance is gone: so are its blocks."""
        await self.apply(KvEvent(peer, 0, KvEventKind.CLEARED, fingerprint, []))

    async def lookup(self, fingerprint: str, hashes: Sequence[bytes]) -> list[Hit]:
        """How many leading blocks of the chain `hashes` each instance holds; those with none are left out."""
        flat = await self._lookup(keys=[_instances_key(fingerprint)], args=list(hashes))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [_hit(name.decode(), int(blocks)) for name, blocks in pairs]


def _instances_key(fingerprint: str) -> str:
    return f"pdd:v1:{fingerprint}"


def _name(peer: Peer) -> str:
    return f"{peer.dc}/{peer.role.value}/{peer.instance}"


def _hit(name: str, blocks: int) -> Hit:
    dc, role, instance = name.split("/")
    return Hit(dc, Role(role), instance, blocks)
