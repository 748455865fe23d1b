"""The servers under a mesh, as `pdd up` starts them: two NATS servers joined through the WAN, and Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from pathlib import Path

import nats
import psutil
import pytest
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeoutError
from redis.asyncio import Redis

from pdd.local import servers
from pdd.local.mesh import LocalMesh
from pdd.local.plan import MeshOptions, Ports, hand_out, ports_needed, shaper_process
from pdd.local.preflight import free_ports
from pdd.local.shaper import ask
from pdd.local.state import StateDir
from pdd.local.supervisor import ProcessGroup, StartError

OPTIONS = MeshOptions(wan_delay_ms=20, wan_jitter_ms=0, gateway_port=0)
NAMES = ["nats-a", "shaper", "nats-b", "valkey"]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Generator[Ports]:
    folder: Path = tmp_path_factory.mktemp("servers")
    ports = hand_out(OPTIONS, free_ports(ports_needed(OPTIONS), None))
    group = ProcessGroup(folder)
    try:
        group.start(
            servers.nats_server("a", folder, ports.nats_a, ports.nats_a_http, servers.leaf_listener(ports.leaf))
        )
        group.start(shaper_process(OPTIONS, ports))
        leaf = servers.leaf_remote(ports.leaf_wan)
        group.start(servers.nats_server("b", folder, ports.nats_b, ports.nats_b_http, leaf))
        group.start(servers.valkey_server(folder, ports.valkey))
        group.wait_for(
            lambda: "" if servers.leaf_ready(ports.nats_b_http) and servers.valkey_ready(ports.valkey) else "servers",
            20,
        )
        yield ports
    finally:
        ids = group.ids()
        group.stop(NAMES)
        assert [one.name for one in ids if psutil.pid_exists(one.pid)] == []


async def test_a_request_from_one_datacenter_to_the_other_crosses_the_wan(ports: Ports) -> None:
    a, b = (
        await nats.connect(f"nats://127.0.0.1:{ports.nats_a}"),
        await nats.connect(f"nats://127.0.0.1:{ports.nats_b}"),
    )
    try:

        async def answer(message: Msg) -> None:
            await message.respond(message.data[::-1])

        await a.subscribe("where.a", cb=answer)
        await a.flush()
        await asyncio.sleep(0.1)  # the subscription has to cross, too
        before = ask(ports.shaper_control).line
        began = time.monotonic()
        reply = await b.request("where.a", b"abc", timeout=2)
        took_ms = (time.monotonic() - began) * 1e3
        after = ask(ports.shaper_control).line
        assert reply.data == b"cba"
        assert took_ms == pytest.approx(2 * OPTIONS.wan_delay_ms, abs=8)
        assert after.b_to_a.payload_bytes > before.b_to_a.payload_bytes

        ask(ports.shaper_control, "down")
        try:
            with pytest.raises(NatsTimeoutError):
                await b.request("where.a", b"abc", timeout=0.3)
        finally:
            ask(ports.shaper_control, "up")
        assert (await b.request("where.a", b"abc", timeout=2)).data == b"cba"
    finally:
        await a.close()
        await b.close()


async def test_each_datacenter_has_its_own_jetstream(ports: Ports) -> None:
    a, b = (
        await nats.connect(f"nats://127.0.0.1:{ports.nats_a}"),
        await nats.connect(f"nats://127.0.0.1:{ports.nats_b}"),
    )
    try:
        await a.jetstream().add_stream(name="ONLY_A", subjects=["only.a"])
        assert [stream.config.name for stream in await b.jetstream().streams_info()] == []
        there = await b.jetstream(domain="dca").streams_info()
        assert [stream.config.name for stream in there] == ["ONLY_A"]
    finally:
        await a.close()
        await b.close()


async def test_valkey_answers_and_keeps_nothing(ports: Ports) -> None:
    async with Redis(port=ports.valkey) as redis:
        assert await redis.set("key", "value")
        assert await redis.get("key") == b"value"
        assert await redis.config_get("save") == {"save": ""}
        assert await redis.config_get("appendonly") == {"appendonly": "no"}


def test_no_server_listens_beyond_loopback(ports: Ports) -> None:
    mine = {ports.nats_a, ports.nats_a_http, ports.leaf, ports.nats_b, ports.nats_b_http, ports.valkey, ports.leaf_wan}
    listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {(one.ip, one.port) for one in listening if one.port in mine} == {("127.0.0.1", port) for port in mine}


@pytest.mark.model
def test_a_start_that_fails_halfway_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    mesh = LocalMesh(MeshOptions(gateway_port=0, env={"PDD_BLOCK_SIZE": "0"}), tmp_path)
    with pytest.raises(StartError, match=r"ended with status 1 during start: .*PDD_BLOCK_SIZE"):
        mesh.start()
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
    assert left == []  # the servers name their folder
    assert StateDir(tmp_path).read() is None
    assert {"nats-a", "nats-b", "shaper", "valkey", "prefill-0"} <= {log.stem for log in (tmp_path / "logs").iterdir()}
    with StateDir(tmp_path).held():  # and the lock is free again
        pass
