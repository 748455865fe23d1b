"""Which instance holds which KV block, in Redis: a hint for routing, never a promise.

Blocks are comparable within a `Space`: one model and one block size. Per space, Redis has the set of instances that it
knows, and per instance what is stored, what is pinned, what is in flight (with the moment when that stops being worth
waiting for), and where that stands: the instance's epoch and the number of the last change applied.

Every write is guarded by these two, on the server. A change is applied if it is the next one of that epoch; an earlier
one is known already, a later one, or one of another epoch, changes nothing and calls for a snapshot. So it does not
matter who applies changes, how many do, in which order they start, or how often one is repeated.

As eviction takes leaves only, holdings are closed under prefix, so that leading blocks are counted by exponential +
binary search, on the server, in one round trip for all instances.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import ReadOnlyError

from pdd.errors import ConfigError
from pdd.mesh.messages import KvEvent, SnapshotPage
from pdd.prefix.hashing import HASH_BYTES, block_hashes
from pdd.types import Peer, Role

ROOT = "pdd:v1"
IN_FLIGHT_S = 60
"""How long a block that is on its way is worth waiting for, unless it is announced again."""

_GOLDEN_KEY = f"{ROOT}:golden"
_SPACES_KEY = f"{ROOT}:spaces"
_HASHES_AT_ONCE = 4096
"""Most block hashes of one round trip: Redis answers nobody else meanwhile."""

_COMMON = """
local function base(name) return KEYS[1] .. ':' .. name end
local function now() return tonumber(redis.call('TIME')[1]) end
local function each(command, key, first)  -- Lua cannot pass them all at once
  for i = first, #ARGV, 1000 do redis.call(command, key, unpack(ARGV, i, math.min(i + 999, #ARGV))) end
end
local function fly(key, first, expiry)
  for i = first, #ARGV do redis.call('ZADD', key, expiry, ARGV[i]) end
end
local function drop(name)
  local at = base(name)
  redis.call('UNLINK', at .. ':at', at .. ':stored', at .. ':pinned', at .. ':flying')
  redis.call('SREM', KEYS[1], name)
end
-- The number of the last change applied, or nil if this epoch is unknown or Redis has evicted blocks of it.
local function position(name, epoch)
  local at = redis.call('HMGET', base(name) .. ':at', 'epoch', 'seq', 'blocks')
  if at[1] ~= epoch or redis.call('SCARD', base(name) .. ':stored') ~= tonumber(at[3]) then return nil end
  return tonumber(at[2])
end
local function move(name, ...)
  redis.call('HSET', base(name) .. ':at', 'blocks', redis.call('SCARD', base(name) .. ':stored'), ...)
end
"""

# name, epoch, seq, kind, seconds until in flight expires, hashes -> whether it has been applied, now or earlier
_APPLY = """
local name, seq, kind, first = ARGV[1], tonumber(ARGV[3]), ARGV[4], 6
local last = position(name, ARGV[2])
if last == nil or seq > last + 1 then return 0 end
if seq <= last then return 1 end
local stored, pinned, flying = base(name) .. ':stored', base(name) .. ':pinned', base(name) .. ':flying'
if kind == 'stored' then
  each('SADD', stored, first)
  each('ZREM', flying, first)
elseif kind == 'removed' then
  each('SREM', stored, first)
  each('SREM', pinned, first)
  each('ZREM', flying, first)
elseif kind == 'pinned' then each('SADD', pinned, first)
elseif kind == 'unpinned' then each('SREM', pinned, first)
elseif kind == 'in_flight' then fly(flying, first, now() + tonumber(ARGV[5]))
end
move(name, 'seq', seq)
return 1
"""

# name, epoch -> number of the last change applied, -1 if there must be a snapshot
_TOUCH = """
local last = position(ARGV[1], ARGV[2])
if last == nil then return -1 end
redis.call('ZREMRANGEBYSCORE', base(ARGV[1]) .. ':flying', '-inf', now())
move(ARGV[1], 'touched', now())
return last
"""

# name, token, part, seconds until in flight expires, hashes: collects a snapshot beside what is there
_COLLECT = """
local key = base(ARGV[1]) .. ':new:' .. ARGV[2] .. ':' .. ARGV[3]
if ARGV[3] == 'flying' then fly(key, 5, now() + tonumber(ARGV[4])) else each('SADD', key, 5) end
redis.call('EXPIRE', key, 60)
"""

# name, token, epoch, seq -> 1; puts the collected snapshot in place, unless changes have led further already
_COMMIT = """
local name, token, epoch, seq = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local last = position(name, epoch)
local keep = last ~= nil and last >= seq
if not keep then drop(name) end
for _, part in ipairs({'stored', 'pinned', 'flying'}) do
  local collected = base(name) .. ':new:' .. token .. ':' .. part
  if keep then redis.call('UNLINK', collected)
  elseif redis.call('EXISTS', collected) == 1 then
    redis.call('RENAME', collected, base(name) .. ':' .. part)
    redis.call('PERSIST', base(name) .. ':' .. part)
  end
end
if not keep then
  redis.call('SADD', KEYS[1], name)
  move(name, 'epoch', epoch, 'seq', seq, 'touched', now())
end
return 1
"""

# name, epoch
_FORGET = """
if redis.call('HGET', base(ARGV[1]) .. ':at', 'epoch') == ARGV[2] then drop(ARGV[1]) end
"""

# seconds -> how many instances are left
_SWEEP = """
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local touched = tonumber(redis.call('HGET', base(name) .. ':at', 'touched') or 0)
  if now() - touched >= tonumber(ARGV[1]) then drop(name) end
end
return redis.call('SCARD', KEYS[1])
"""

# hashes in one string -> for each instance that has any: name, epoch, leading blocks stored, further ones in flight,
# leading ones pinned
_LOOKUP = """
local call, sub, floor, chain, size = redis.call, string.sub, math.floor, ARGV[1], tonumber(ARGV[2])
local all, time, hashes, found = #chain / size, now(), {}, {}
local function hash(i)
  local one = hashes[i]
  if not one then one = sub(chain, (i - 1) * size + 1, i * size); hashes[i] = one end
  return one
end
local function member(key, one) return call('SISMEMBER', key, one) == 1 end
local function awaited(key, one)
  local expiry = call('ZSCORE', key, one)
  return expiry and tonumber(expiry) > time
end
-- How many blocks after block `before`, up to `last`, `holds` says yes to; it says no to all after the first no.
local function leading(before, last, holds, key)
  local low, high, step = before, before + 1, 1
  while high <= last and holds(key, hash(high)) do low, high, step = high, high + step, step * 2 end
  if high > last then high = last + 1 end
  while high - low > 1 do
    local middle = floor((low + high) / 2)
    if holds(key, hash(middle)) then low = middle else high = middle end
  end
  return low - before
end
for _, name in ipairs(call('SMEMBERS', KEYS[1])) do
  local at = base(name)
  local blocks = leading(0, all, member, at .. ':stored')
  local coming = leading(blocks, all, awaited, at .. ':flying')
  if blocks + coming > 0 then
    local fixed = leading(0, blocks, member, at .. ':pinned')
    for _, field in ipairs({name, call('HGET', at .. ':at', 'epoch') or '', blocks, coming, fixed}) do
      table.insert(found, field)
    end
  end
end
return found
"""


@dataclass(frozen=True)
class Space:
    """Blocks of one model (by fingerprint) and one block size (in tokens): only their hashes mean the same."""

    fingerprint: str
    block_size: int

    @property
    def key(self) -> str:
        """The key of this space; it begins those of all that belongs to it, in one slot of a Redis cluster."""
        return f"{ROOT}:{{{self.fingerprint}/{self.block_size}}}"


@dataclass(frozen=True)
class Held:
    """What `peer` holds of a chain, in blocks: `stored` leading ones, the first `pinned` of them not evictable, and
    `in_flight` further ones on their way."""

    peer: Peer
    stored: int
    in_flight: int
    pinned: int


class PrefixIndex:
    """See the module. The connection belongs to the caller. Redis' own errors are let through.

    A server that was made a replica refuses writes on connections that are otherwise in good order: they are dropped,
    so that the next write goes to whoever is the primary by then.
    """

    def __init__(self, redis: Redis, *, in_flight_s: int = IN_FLIGHT_S) -> None:
        self._redis = redis
        self._in_flight_s = in_flight_s
        self._apply = self._script(_APPLY)
        self._touch = self._script(_TOUCH)
        self._collect = self._script(_COLLECT)
        self._commit = self._script(_COMMIT)
        self._forget = self._script(_FORGET)
        self._sweep = self._script(_SWEEP)
        self._lookup = self._script(_LOOKUP)

    async def verify(self) -> None:
        """Make sure that whoever writes to this Redis names blocks as we do.

        Raises `ConfigError` if not: two ways of naming in one index only look like an index without hits.
        """
        ours = block_hashes(range(64), 16, salt="golden")[-1].hex().encode()
        async with self._writing():
            await self._redis.set(_GOLDEN_KEY, ours, nx=True)
            theirs = await self._redis.get(_GOLDEN_KEY)
        if theirs not in (ours, None):
            raise ConfigError(
                f"the prefix index in this Redis names blocks in another way than this version of pdd: "
                f"{_GOLDEN_KEY} is {theirs!r} there, {ours!r} here; use another database or flush it"
            )

    async def lookup(self, space: Space, hashes: Sequence[bytes]) -> list[Held]:
        """What each instance holds of the chain `hashes` (16 bytes each); those with nothing are left out."""
        # redis types a script's reply by what it may be in any client; in this one it is always awaited.
        flat = cast("list[Any]", await self._lookup(keys=[space.key], args=[b"".join(hashes), HASH_BYTES]))
        return [_held(*flat[at : at + 5]) for at in range(0, len(flat), 5)]

    async def apply(self, space: Space, peer: Peer, events: Sequence[KvEvent]) -> bool:
        """Take in changes of one instance, which follow each other. False: a snapshot is needed first."""
        done = True
        start = 0
        while start < len(events) and done:
            end, hashes = start, 0
            async with self._writing(), self._redis.pipeline(transaction=False) as pipe:
                while end < len(events) and (end == start or hashes + len(events[end].hashes) <= _HASHES_AT_ONCE):
                    event = events[end]
                    args = [_name(peer), peer.epoch, event.seq, event.kind.value, self._in_flight_s, *event.hashes]
                    await self._apply(keys=[space.key], args=args, client=pipe)
                    hashes += len(event.hashes)
                    end += 1
                done = all(await pipe.execute())
            start = end
        return done

    async def touch(self, space: Space, peer: Peer) -> int | None:
        """Note that the instance lives; the number of the last change applied. None: a snapshot is needed."""
        async with self._writing(), self._redis.pipeline(transaction=False) as pipe:
            await pipe.sadd(_SPACES_KEY, space.key)
            await self._touch(keys=[space.key], args=[_name(peer), peer.epoch], client=pipe)
            last = int((await pipe.execute())[-1])
        return None if last < 0 else last

    def replacement(self, space: Space, peer: Peer) -> Replacement:
        """Begin to replace all that is known of the instance."""
        return Replacement(self, space, peer)

    async def collect(self, space: Space, peer: Peer, token: str, part: str, hashes: Sequence[bytes]) -> None:
        """Add to a snapshot (see `Replacement`)."""
        for start in range(0, len(hashes), _HASHES_AT_ONCE):
            some = hashes[start : start + _HASHES_AT_ONCE]
            async with self._writing():
                await self._collect(keys=[space.key], args=[_name(peer), token, part, self._in_flight_s, *some])

    async def commit(self, space: Space, peer: Peer, token: str, seq: int) -> None:
        """Put a snapshot in place (see `Replacement`)."""
        async with self._writing():
            await self._redis.sadd(_SPACES_KEY, space.key)
            await self._commit(keys=[space.key], args=[_name(peer), token, peer.epoch, seq])

    async def forget(self, space: Space, peer: Peer) -> None:
        """This epoch of the instance is gone: so are its blocks."""
        async with self._writing():
            await self._forget(keys=[space.key], args=[_name(peer), peer.epoch])

    async def sweep(self, silent_s: float) -> None:
        """Forget every instance that nobody has touched for so long, by Redis' clock."""
        async with self._writing():
            for key in await self._redis.smembers(_SPACES_KEY):
                if not await self._sweep(keys=[key], args=[silent_s]):
                    await self._redis.srem(_SPACES_KEY, key)

    def _script(self, text: str) -> AsyncScript:
        return self._redis.register_script(_COMMON + text)

    @asynccontextmanager
    async def _writing(self) -> AsyncGenerator[None]:
        try:
            yield
        except ReadOnlyError:
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise


class Replacement:
    """All that an instance holds, collected beside what the index knows of it, then put in its place at once.

    What is not committed vanishes by itself within a minute.
    """

    def __init__(self, index: PrefixIndex, space: Space, peer: Peer) -> None:
        self._index = index
        self._space = space
        self._peer = peer
        self._token = secrets.token_hex(8)

    async def add(self, page: SnapshotPage) -> None:
        """Take in one page."""
        for part, hashes in (("stored", page.stored), ("pinned", page.pinned), ("flying", page.in_flight)):
            await self._index.collect(self._space, self._peer, self._token, part, hashes)

    async def commit(self, seq: int) -> None:
        """What was added is what the instance holds after change `seq`, but for changes that are still to be applied.

        If the index has been led to `seq` or further meanwhile, nothing happens.
        """
        await self._index.commit(self._space, self._peer, self._token, seq)


def _name(peer: Peer) -> str:
    return f"{peer.dc}/{peer.role.value}/{peer.instance}"


def _held(name: bytes, epoch: bytes, stored: int, in_flight: int, pinned: int) -> Held:
    dc, role, instance = name.decode().split("/")
    return Held(Peer(dc, Role(role), instance, epoch.decode()), stored, in_flight, pinned)
