"""All that a request can leave behind in the processes that it went through, counted.

What must be nothing at rest is counted by `leftovers`; what a mesh at rest has of its own (subscriptions, sockets,
tasks) is compared with an earlier count by `Belongings`. `watch_blocks` looks for blocks that are given up too early.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import psutil

from tests.integration.stages import Stage, Stages


def leftovers(stages: Stages) -> dict[str, int]:
    """What is not given back, by name; empty at rest."""
    held = dict(_of_gateway(stages))
    for stage in stages.all():
        own = _of_prefill(stage) if stage is stages.prefill else _of_decode(stage)
        held |= {f"{stage.me.role}: {what}": count for what, count in chain(_of_stage(stage), own)}
    return {what: count for what, count in held.items() if count}


@dataclass(frozen=True)
class Belongings:
    """What the process has, in use or not. KV lanes are made once and stay; so are the subscriptions for answers."""

    subscriptions: dict[str, int]
    sockets: dict[tuple[str, str], int]
    """By kind and state."""
    open_files: int
    tasks: dict[str, int]
    """By what they run."""

    @classmethod
    def now(cls, stages: Stages) -> Belongings:
        """What is there at this moment."""
        process = psutil.Process()
        buses = {stage.me.role.value: stage.bus for stage in stages.all()} | {"gateway": stages.gateway_bus}
        return cls(
            subscriptions={name: len(_client(bus)._subs) for name, bus in buses.items()},
            sockets=dict(Counter((one.type.name, one.status) for one in process.net_connections("inet"))),
            open_files=process.num_fds(),
            tasks=dict(Counter(_what(task) for task in asyncio.all_tasks())),
        )


async def settle(stages: Stages, before: Belongings, within_s: float) -> float:
    """Wait until all is given back. Returns how many seconds that took; fails after `within_s`."""
    began = time.monotonic()
    while True:
        left, now = leftovers(stages), Belongings.now(stages)
        took_s = time.monotonic() - began
        if not left and now == before:
            return took_s
        assert took_s < within_s, f"after {within_s:g} s: {left}, {now} where {before} was before"
        await asyncio.sleep(0.02)


def watch_blocks(stages: Stages) -> list[str]:
    """Look, whenever a stage gives blocks up, for some that anybody could have now though a transfer still writes into
    them or reads from them. The list grows by what is found."""
    found: list[str] = []
    for stage in stages.all():
        stage.host.loaded.engine.cache.on_free.append(partial(_look, stage, found))
    return found


def _look(stage: Stage, found: list[str]) -> None:
    """On any thread. A transfer is over before its blocks are given up: seen in the other order, it still goes on."""
    cache = stage.host.loaded.engine.cache
    for transfer in _transfers(stage):
        unused = [one for one in transfer.blocks if cache._pool.references(one) - (one in cache._nodes) < 1]
        if unused and transfer in _transfers(stage):
            found.append(f"{stage.me.role}: blocks {unused} of {transfer.key}")


def _transfers(stage: Stage) -> list[Any]:
    """Exports that are read, or imports that may be written."""
    if hasattr(stage.service, "stage"):
        return [one for receiver in _receivers(stage) for one in list(receiver._imports.values()) if not one.complete]
    exporting = list(stage.service._exporting.items())
    exports = [attempt.exports.get(transfer_id) for transfer_id, attempt in exporting]
    return [one for one in exports if one is not None and not one.ended]


def _of_gateway(stages: Stages) -> Iterator[tuple[str, int]]:
    gateway = stages.gateway
    yield "gateway: live attempts", len(gateway._live)
    yield "gateway: waiting for room", gateway.waiting
    yield "gateway: taken turns", sum(line._first.locked() for line in gateway._lines.values())
    yield "gateway: commitments", sum(gateway.router._committed.values())
    yield "gateway: closing", len(gateway.closing._running)
    yield "gateway: open questions", len(_client(stages.gateway_bus)._resp_map)
    yield "gateway: answers being made", len(stages.gateway_bus._bus._tasks)


def _of_stage(stage: Stage) -> Iterator[tuple[str, int]]:
    engine = stage.host.loaded.engine
    cache = engine.cache
    yield "blocks", cache.total_blocks - cache.available_blocks
    yield "announced blocks", len(cache._in_flight)
    yield "running", len(engine._admitted)
    yield "waiting", len(engine._waiting)
    yield "attempts", len(stage.attempts)
    yield "leases", len(stage.host._interest)
    yield "reserved seats", stage.host.reserved()
    yield "open questions", len(_client(stage.bus)._resp_map)
    yield "answers being made", len(stage.bus._bus._tasks)


def _of_prefill(stage: Stage) -> Iterator[tuple[str, int]]:
    service = stage.service
    links = list(service._sender.stream._links.values())
    yield "queue", len(service._waiting)
    yield "kept", len(service._kept)
    yield "exporting", len(service._exporting)
    yield "open exports", sum(len(link._exports) for link in links)
    yield "slices in flight", sum(len(link._in_flight) for link in links)


def _of_decode(stage: Stage) -> Iterator[tuple[str, int]]:
    intake = stage.service.stage._intake
    yield "receiving", len(intake._receiving)
    yield "wanting", len(intake._wanting)
    yield "kept", len(intake._kept)
    yield "promises", len(intake._promises._promises)
    yield "promised blocks", len(intake._promises._held)
    yield "open imports", sum(len(receiver._imports) for receiver in _receivers(stage))
    yield "hand-overs", len(getattr(stage.service, "_handoffs", ()))


def _receivers(stage: Stage) -> Sequence[Any]:
    intake = stage.service.stage._intake
    return intake._fabric, intake._wan


def _client(bus: Any) -> Any:
    return bus._bus._client


def _what(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", repr(coroutine))
