"""Control planes that break under load: NATS servers restart, a leaf link is cut. The index heals by itself."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pdd.local import servers
from pdd.local.preflight import free_ports
from pdd.local.supervisor import ProcessGroup, ProcessSpec
from pdd.types import Role
from tests.integration.conftest import START_S, ControlPlane
from tests.integration.holders import Holder, caching, holder, living, settled
from tests.integration.test_prefix_index import chain
from tests.unit.transfer.proxy import TcpProxy

HEAL_S = 20.0
"""By then all must be well again: a link redials each second, a cut connection is noticed after some."""


@dataclass
class Mesh:
    """Two NATS servers of one test's own; `link` is the leaf link between them."""

    group: ProcessGroup
    a: ProcessSpec
    b: ProcessSpec
    url_a: str
    url_b: str
    monitor: dict[str, int]
    link: TcpProxy

    async def restart(self, server: ProcessSpec, away_s: float) -> None:
        """Stop a server, let time pass, start it again and wait until it answers."""
        await asyncio.to_thread(self.group.stop, [server.name])
        await asyncio.sleep(away_s)
        self.group.start(server)
        await self._wait(lambda: servers.nats_ready(self.monitor[server.name]), server.name)

    async def linked(self) -> None:
        """Wait for the leaf link."""
        await self._wait(lambda: servers.leaf_ready(self.monitor[self.b.name]), "leaf link")

    async def _wait(self, ready: object, what: str) -> None:
        assert callable(ready)
        await asyncio.to_thread(self.group.wait_for, lambda: "" if ready() else what, START_S)


@asynccontextmanager
async def own_mesh(folder: Path) -> AsyncGenerator[Mesh]:
    """Both servers, linked."""
    a, a_http, leaf, b, b_http = free_ports(5, None)
    group = ProcessGroup(folder)
    async with TcpProxy(leaf) as link:
        spec_a = servers.nats_server("a", folder, a, a_http, servers.leaf_listener(leaf))
        spec_b = servers.nats_server("b", folder, b, b_http, servers.leaf_remote(link.port))
        mesh = Mesh(
            group,
            spec_a,
            spec_b,
            f"nats://127.0.0.1:{a}",
            f"nats://127.0.0.1:{b}",
            {spec_a.name: a_http, spec_b.name: b_http},
            link,
        )
        try:
            group.start(spec_a)
            group.start(spec_b)
            await mesh.linked()
            yield mesh
        finally:
            await asyncio.to_thread(group.stop)


@asynccontextmanager
async def load(*holders: Holder) -> AsyncGenerator[None]:
    """Changes at each, all the time."""
    draw, universe = random.Random(7), chain(300)

    async def change() -> None:
        while True:
            for one in holders:
                one.cached.change_at_random(draw, universe)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(change())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def moves(redis: Redis, one: Holder, within_s: float) -> None:
    """Wait until the index takes changes of now, not only those of before."""
    began, seq = time.monotonic(), one.cached.journal.seq
    at = f"{one.space.key}:{one.me.dc}/{one.me.role.value}/{one.me.instance}:at"
    while int(await redis.hget(at, "seq") or 0) <= seq:
        assert time.monotonic() - began < within_s, f"no changes of {one.me.instance} for {within_s:g} s"
        await asyncio.sleep(0.1)


@pytest.mark.timeout(240)
async def test_five_restarts_of_nats_under_load(control_plane: ControlPlane, tmp_path: Path, unique: str) -> None:
    """Guards against readers that stay silent after a restart of their server, and publishers that stop for good.

    Both datacenters' servers restart in turn, for a moment or for longer; changes never cease.
    """
    async with (
        own_mesh(tmp_path) as mesh,
        living(mesh.url_a, holder(f"p-{unique}"), weights=unique) as one,
        living(mesh.url_b, holder(f"m-{unique}", Role.MAIN_DECODE), weights=unique) as two,
        caching(mesh.url_a, control_plane.valkey),
        Redis(port=control_plane.valkey) as redis,
    ):
        async with load(one, two):
            await moves(redis, one, HEAL_S)
            await moves(redis, two, HEAL_S)
            for server, away_s in ((mesh.a, 0.0), (mesh.b, 2.0), (mesh.a, 5.0), (mesh.b, 0.0), (mesh.a, 2.0)):
                await mesh.restart(server, away_s)
                await mesh.linked()
                await moves(redis, one, HEAL_S)
                await moves(redis, two, HEAL_S)
        await settled(redis, one, two, within_s=HEAL_S)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("cut_s", "how"), [(3.0, "cut"), (30.0, "hang")])
async def test_a_cut_leaf_link_heals_under_load(
    control_plane: ControlPlane, tmp_path: Path, unique: str, cut_s: float, how: str
) -> None:
    """Guards against an index that stays out of date for the far datacenter once the line is back.

    The link is cut hard, and again each time it is redialled, or it swallows everything without a word for half a
    minute. The near datacenter must not notice.
    """
    async with (
        own_mesh(tmp_path) as mesh,
        living(mesh.url_a, holder(f"p-{unique}"), weights=unique) as one,
        living(mesh.url_b, holder(f"m-{unique}", Role.MAIN_DECODE), weights=unique) as two,
        caching(mesh.url_a, control_plane.valkey),
        Redis(port=control_plane.valkey) as redis,
    ):
        async with load(one, two):
            await moves(redis, one, HEAL_S)
            await moves(redis, two, HEAL_S)
            mesh.link.pause()
            end = time.monotonic() + cut_s
            while time.monotonic() < end:
                if how == "cut":
                    mesh.link.cut()
                await moves(redis, one, 2.0)
                await asyncio.sleep(0.2)
            mesh.link.cut()  # What hung for so long does not come back.
            mesh.link.resume()
            await moves(redis, two, HEAL_S)
        await settled(redis, one, two, within_s=HEAL_S)
