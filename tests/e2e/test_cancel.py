"""Clients that close their sockets at any moment leave nothing: in no stage, in no process, on no NATS server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from pdd.local.mesh import LocalMesh
from pdd.model.tokenizer import Tokenizer
from tests.e2e.conftest import OPTIONS, Client
from tests.e2e.prompts import ANSWER_TOKENS, prompts
from tests.e2e.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

WAVES, CROWD = 5, 8
LONGEST_STAY_S = 4.0
GIVEN_BACK_S = 2.0
BEAT_S = 1.0
"""What `/mesh` shows of a stage may be as old as that."""
ROUND_TRIP_S = 2 * (OPTIONS.wan_delay_ms + OPTIONS.wan_jitter_ms) / 1e3
WAYS = ("x-pdd-handoff-at: 8", "x-pdd-handoff-at: 200", "x-pdd-pipeline: pd-wan", "x-pdd-pipeline: pd-local")
PROCESSES = ("gateway", "prefill-0", "relay-0", "main_decode-b-0", "main_decode-a-0", "cache", "shaper")

Sockets = dict[str, Counter[str]]
"""By process, by state."""


@dataclass
class Leaver:
    """A client that asks over a connection of its own and closes that, hard or softly."""

    port: int
    body: dict[str, Any]
    way: str
    """Headers that say how its request travels."""
    got: bytearray = field(default_factory=bytearray)
    ended: bool = False

    async def stay(self, longest_s: float, *, hard: bool) -> None:
        """Ask, read for `longest_s`, go: with a reset, or with an orderly end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(self.body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: mesh\r\n{self.way}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        try:
            async with asyncio.timeout(longest_s):
                while not self.ended:
                    data = await reader.read(65536)
                    self.got += data
                    self.ended = not data or not self.body["stream"] or b"data: [DONE]" in self.got
        except TimeoutError:
            pass
        finally:
            writer.transport.abort() if hard else writer.close()

    @property
    def events(self) -> int:
        """Pieces of the answer that it saw."""
        return self.got.count(b"data: {")


@dataclass(frozen=True)
class Nats:
    """The monitoring pages of both NATS servers."""

    ports: frozenset[int]
    pages: tuple[int, ...]

    @classmethod
    def of(cls, servers: Path) -> Nats:
        """Read from their configuration."""
        text = "".join((servers / f"nats-{dc}.conf").read_text() for dc in "ab")
        every = frozenset(int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", text))
        return cls(every, tuple(int(port) for port in re.findall(r'http: "127\.0\.0\.1:(\d+)"', text)))

    async def subscriptions(self, http: httpx.AsyncClient) -> dict[str, list[str]]:
        """Subjects by connection."""
        found: dict[str, list[str]] = {}
        for port in self.pages:
            answer = (await http.get(f"http://127.0.0.1:{port}/connz", params={"subs": 1})).json()
            for one in answer["connections"]:
                found[f"{port}/{one['cid']} {one.get('name', '')}"] = sorted(one.get("subscriptions_list", []))
        return found


@pytest_asyncio.fixture
async def watcher(mesh: LocalMesh) -> AsyncIterator[Client]:
    """A client with one connection, so that it adds none while it looks."""
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=240, limits=limits) as http:
        yield Client(http, (await http.get("/v1/models")).json()["data"][0]["id"])


def sockets(mesh: LocalMesh, nats: Nats) -> Sockets:
    """Those of each process that are neither to a NATS server nor to Valkey: the cache service's pool of connections
    keeps as many as were ever in use at once. KV lanes are made once and stay."""
    valkey = psutil.Process(mesh.pid("valkey")).net_connections("inet")
    apart = nats.ports | {one.laddr.port for one in valkey if one.status == psutil.CONN_LISTEN}
    found: Sockets = {}
    for name in PROCESSES:
        connections = psutil.Process(mesh.pid(name)).net_connections("inet")
        ports = [{one.laddr.port, *([one.raddr.port] if one.raddr else [])} for one in connections]
        found[name] = Counter(one.status for one, its in zip(connections, ports, strict=True) if not its & apart)
    return found


async def at_rest(client: Client) -> bool:
    """Whether nothing runs, waits or is reserved, no block is in use, and the gateway answers nobody."""
    loads = [one["load"] for one in await client.instances()]
    idle = all(not (load["running"] or load["waiting"] or load["reserved"]) for load in loads)
    free = all(load["free_blocks"] + load["evictable_blocks"] == load["total_blocks"] for load in loads)
    metrics = (await client.http.get("/metrics")).text
    gauges = re.findall(r"^pdd_gateway_requests_(?:in_flight|waiting)(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
    assert len(gauges) == 2, metrics
    return idle and free and not any(map(float, gauges))


async def output_tokens(client: Client) -> Counter[tuple[str, str]]:
    """How many tokens each stage has sampled, by datacenter and role."""
    return Counter({(one["dc"], one["role"]): one["load"]["output_tokens"] for one in await client.instances()})


async def longest_step_s(client: Client) -> float:
    """How long a full step of the slowest Prefill takes."""
    rates = [one["load"]["prefill_tokens_per_s"] for one in await client.instances() if one["role"] == "prefill"]
    return 512 / min(rates)


async def until_at_rest(client: Client, within_s: float) -> float:
    began = time.monotonic()
    while not await at_rest(client):
        assert time.monotonic() - began < within_s, await client.instances()
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def test_clients_that_close_their_sockets_leave_nothing(
    mesh: LocalMesh, watcher: Client, tokenizer: Tokenizer, model: Path
) -> None:
    generator = random.Random(3)
    asked = prompts(tokenizer)[4:9]
    nats = Nats.of(mesh._state.path / "servers")
    port = httpx.URL(mesh.gateway_url).port
    assert port is not None
    # Lanes, pools of connections and subscriptions for answers are made by the first requests.
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=240) as http:
        first = Client(http, watcher.model_name)
        ways = [{"pipeline": "pd-local"}, {"pipeline": "pd-wan"}, {"handoff_at": 2}, {"handoff_at": 3}] * 2
        await asyncio.gather(*(first.complete(asked[0], max_tokens=6, ignore_eos=True, **way) for way in ways))  # type: ignore[arg-type]
    await until_at_rest(watcher, 10.0)
    before, subscriptions = sockets(mesh, nats), await nats.subscriptions(watcher.http)
    sampled = await output_tokens(watcher)

    leavers: list[Leaver] = []
    slowest_s = 0.0
    for _ in range(WAVES):
        crowd = [
            Leaver(
                port,
                {
                    "model": watcher.model_name,
                    "prompt": generator.choice(asked),
                    "max_tokens": 400,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": number % 2 == 0,
                },
                generator.choice(WAYS),
            )
            for number in range(CROWD)
        ]
        # The first two of each crowd leave before anybody can have computed anything for them.
        longest_s = [0.1, 0.1, *[LONGEST_STAY_S] * (CROWD - 2)]
        stays = [
            one.stay(generator.uniform(0, longest), hard=generator.random() < 0.5)
            for one, longest in zip(crowd, longest_s, strict=True)
        ]
        await asyncio.gather(*stays)
        bound_s = GIVEN_BACK_S + BEAT_S + await longest_step_s(watcher) + ROUND_TRIP_S
        slowest_s = max(slowest_s, await until_at_rest(watcher, bound_s))
        leavers += crowd
    print(f"at rest after {slowest_s:.2f} s, allowed {bound_s:.2f} s", [one.events for one in leavers])

    now = sockets(mesh, nats)
    grown = {name: (before[name], now[name]) for name in PROCESSES if now[name] - before[name]}
    assert not grown
    assert await nats.subscriptions(watcher.http) == subscriptions
    more = await output_tokens(watcher) - sampled
    assert set(more) == set(sampled), f"only {more} took part"
    streamed = [one for one in leavers if one.body["stream"]]
    assert min(sum(not one.events for one in streamed), sum(one.events > 0 for one in streamed)) >= 3
    assert not any(one.ended for one in leavers), "somebody got an answer, or an error"

    reference = Reference(model)
    for prompt in (asked[0], asked[4]):
        answer = await watcher.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, handoff_at=7)
        assert answer.ids == reference.generate(prompt, ANSWER_TOKENS).tokens
