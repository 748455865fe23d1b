"""Beats over real NATS: each reader hears the whole mesh, on both sides of the leaf link, and goes by its own clock."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import nats

from pdd.mesh import subjects
from pdd.mesh.bus import connect
from pdd.mesh.registry import BEAT_INTERVAL_S, MISSED_BEATS, Registry
from pdd.types import Peer, Role
from tests.integration.conftest import ControlPlane
from tests.unit.mesh.beats import beat, peer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_beats_reach_all_who_listen_and_silence_is_judged_by_each(
    control_plane: ControlPlane, unique: str
) -> None:
    in_a, in_b, unwanted = (
        peer(Role.PREFILL, unique, dc="a"),
        peer(Role.MAIN_DECODE, unique, dc="b"),
        peer(Role.RELAY, unique, dc="a"),
    )
    clocks = [Clock(), Clock()]
    registries = [Registry(clock) for clock in clocks]
    gone: list[Peer] = []
    registries[1].on_gone = gone.append

    def heard(registry: Registry) -> list[Peer]:
        return [one.peer for one in registry.live() if one.peer.instance == unique]

    async with AsyncExitStack() as stack:
        bus_a = await stack.enter_async_context(connect(control_plane.nats_a, "a"))
        bus_b = await stack.enter_async_context(connect(control_plane.nats_b, "b"))
        for registry, bus in zip(registries, (bus_a, bus_b), strict=True):
            await registry.listen(bus, roles=(Role.PREFILL, Role.MAIN_DECODE))

        async def beat_until_heard(*expected: Peer) -> None:
            async with asyncio.timeout(5):
                while True:
                    await bus_a.publish(subjects.beat(unwanted), beat(unwanted))
                    await bus_a.publish(subjects.beat(in_a), beat(in_a))
                    if in_b in expected:
                        await bus_b.publish(subjects.beat(in_b), beat(in_b))
                    await asyncio.sleep(0.05)
                    if all(heard(registry) == [*expected] for registry in registries):
                        return

        await beat_until_heard(in_a, in_b)
        stranger = await nats.connect(control_plane.nats_a)
        await stranger.publish(subjects.beat(in_a), b"\xc1 no beat")
        await stranger.drain()
        clocks[1].now += (MISSED_BEATS + 1) * BEAT_INTERVAL_S
        await beat_until_heard(in_a, in_b)  # in_a has been heard since
        registries[1].expire()
        assert heard(registries[1]) == [in_a, in_b]

        for _ in range(MISSED_BEATS + 1):
            clocks[1].now += BEAT_INTERVAL_S
            registries[0].expire()
            registries[1].expire()
        assert heard(registries[0]) == [in_a, in_b]
        assert (heard(registries[1]), sorted(one.dc for one in gone)) == ([], ["a", "b"])
