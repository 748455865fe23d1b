"""How long a look-up in the prefix index takes: 1M blocks over 64 instances, prompts of 4,096 blocks.

Run by hand: `python -m tests.bench.prefix_index`. Starts a Valkey of its own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from redis.asyncio import Redis

from pdd.local import servers
from pdd.local.preflight import free_ports
from pdd.local.supervisor import ProcessGroup
from pdd.mesh.messages import SnapshotPage
from pdd.prefix.index import PrefixIndex, Space
from pdd.types import Peer, Role

INSTANCES = 64
BLOCKS = 1_000_000
PROMPT = 4_096
LOOKUPS = 1_000
SPACE = Space("bench", 16)


async def measure(port: int) -> None:
    """Fill the index, then ask for prompts of which each instance holds a random share."""
    draw = random.Random(1)
    prompts = [[draw.randbytes(16) for _ in range(PROMPT)] for _ in range(8)]
    async with Redis(port=port) as redis:
        index = PrefixIndex(redis)
        began = time.perf_counter()
        for number in range(INSTANCES):
            peer = Peer("a", Role.PREFILL, str(number), "1")
            stored = [one for prompt in prompts for one in prompt[: draw.randrange(PROMPT // 2)]]
            pinned, coming = prompts[0][:64], prompts[1][PROMPT // 2 :][:64]
            stored += [draw.randbytes(16) for _ in range(BLOCKS // INSTANCES - len(stored))]
            replacement = index.replacement(SPACE, peer)
            await replacement.add(SnapshotPage(peer, 1, 0, 1, stored, pinned, coming))
            await replacement.commit(1)
        print(f"filled in {time.perf_counter() - began:.1f} s")
        took: list[float] = []
        used = await _cpu_s(redis), time.process_time()
        for _ in range(LOOKUPS):
            prompt = draw.choice(prompts)
            began = time.perf_counter()
            found = await index.lookup(SPACE, prompt)
            took.append((time.perf_counter() - began) * 1e3)
            assert len(found) > INSTANCES // 2
        cuts = statistics.quantiles(took, n=100)
        print(f"look-up: p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms, longest {max(took):.2f} ms")
        server, client = await _cpu_s(redis) - used[0], time.process_time() - used[1]
        print(f"CPU per look-up: server {server / LOOKUPS * 1e3:.2f} ms, client {client / LOOKUPS * 1e3:.2f} ms")
        memory = (await redis.info("memory"))["used_memory_human"]
        print(f"memory of the index: {memory}")


async def _cpu_s(redis: Redis) -> float:
    """CPU time of the server: on a machine that does other things too, it says more than the clock."""
    told = await redis.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


def main() -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as folder:
        (port,) = free_ports(1, None)
        group = ProcessGroup(Path(folder))
        try:
            group.start(servers.valkey_server(Path(folder), port))
            group.wait_for(lambda: "" if servers.valkey_ready(port) else "valkey", 20.0)
            asyncio.run(measure(port))
        finally:
            group.stop()


if __name__ == "__main__":
    main()
