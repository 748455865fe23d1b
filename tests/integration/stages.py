"""P, RLD, MD and a gateway's coordinator in one process, each with its own bus, over real NATS and loopback TCP.

Built as the wiring modules build them, on engines with a tiny random Llama; there is no HTTP in front. Each bus can be
bent by a test, to lose or change what a network or a faulty peer would.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pdd.config import StageSettings
from pdd.engine.engine import StepResult, generate
from pdd.engine.loading import LoadedEngine
from pdd.engine.sequence import SequenceSpec
from pdd.errors import DeadlineError
from pdd.local.emulator import Emulator, Route
from pdd.local.line import LineSpec
from pdd.local.preflight import free_ports
from pdd.mesh.bus import Bus, Endpoint, connect
from pdd.mesh.registry import Registry
from pdd.stage import runtime
from pdd.stage.attempts import Attempts
from pdd.stage.host import StageHost
from pdd.transfer.fabric import make_fabric_sender
from pdd.transfer.stream_sender import StreamSender
from pdd.types import AttemptKey, Peer, Role, Sampling, StopRule
from services.gateway.coordinator import Coordinator, Limits, LiveRequest
from services.gateway.generation import GenerationRequest
from services.gateway.prefix_view import PrefixView
from services.gateway.router import Router, RoutingPolicy
from services.main_decode.service import MainDecodeService
from services.prefill.line import LineMeter
from services.prefill.service import Admission, LinePrior, PrefillService
from services.relay.service import RelayService
from tests.integration.conftest import ControlPlane

ALWAYS_RELAY_S = -1.0
"""An acceptable wait that no prediction stays under: the relayed path, unforced."""

_LINE_BYTES_PER_S = 1e8
_LINE_DELAY_S = 0.005
_STAGES_HEARD_S = 10.0

Fate = Literal["deliver", "lose request", "lose reply"]


class BentBus:
    """A bus over a network that does what a test tells it to; without orders it is kind."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.bend: Callable[[str, Any], tuple[Fate, Any]] = lambda subject, message: ("deliver", message)
        """Decides over each request that leaves here, and may change it."""
        self.hears: Callable[[Any], bool] = lambda message: True
        """Whether a published message arrives here."""
        self.patience_s = 5.0
        """Longest timeout of a request that leaves here, for tests that would wait for it."""

    @property
    def connected(self) -> bool:
        return self._bus.connected

    @property
    def dropped(self) -> int:
        return self._bus.dropped

    async def request(self, subject: str, message: object, reply: type[Any], *, timeout_s: float = 5.0) -> Any:
        fate, message = self.bend(subject, message)
        if fate == "lose request":
            raise DeadlineError("the request was lost")
        answer = await self._bus.request(subject, message, reply, timeout_s=min(timeout_s, self.patience_s))
        if fate == "lose reply":
            raise DeadlineError("the reply was lost")
        return answer

    async def publish(self, subject: str, message: object) -> None:
        await self._bus.publish(subject, message)

    async def subscribe(self, subject: str, kind: type[Any], handler: Callable[[Any], None]) -> None:
        def deliver(message: Any) -> None:
            if self.hears(message):
                handler(message)

        await self._bus.subscribe(subject, kind, deliver)

    async def serve(self, peer: Peer, endpoints: list[Endpoint], metadata: Mapping[str, str]) -> None:
        await self._bus.serve(peer, endpoints, metadata)

    async def close(self) -> None:
        await self._bus.close()

    def __getattr__(self, name: str) -> Any:
        """What is stored (KV events) takes the straight way."""
        return getattr(self._bus, name)


@dataclass(frozen=True)
class Stage:
    """A running stage: what it is made of, and the table of its attempts."""

    host: StageHost
    service: Any
    attempts: Attempts[Any]

    @property
    def bus(self) -> BentBus:
        return self.host.bus

    @property
    def me(self) -> Peer:
        return self.host.me

    def held(self) -> str:
        """What is not given back, in words; nothing if nothing is held."""
        cache, status = self.host.loaded.engine.cache, self.host.engine.status()
        held = {
            "blocks": cache.total_blocks - cache.available_blocks,
            "running": status.running,
            "waiting": status.waiting,
            "attempts": len(self.attempts),
        }
        return ", ".join(f"{self.me.role} holds {count} {what}" for what, count in held.items() if count)


@dataclass(frozen=True)
class Stages:
    """The mesh."""

    prefill: Stage
    relay: Stage
    main: Stage
    gateway: Coordinator
    gateway_bus: BentBus

    def all(self) -> list[Stage]:
        return [self.prefill, self.relay, self.main]

    async def complete(self, request: GenerationRequest) -> tuple[list[int], LiveRequest]:
        """Run a request to its end. Its IDs, each emitted once, and the request for its report."""
        ids: list[int] = []
        async with asyncio.timeout(30), self.gateway.generate(request) as live:
            async for emission in live:
                ids.extend(emission.tokens)
        return ids, live

    async def settle(self, within_s: float = 3.0) -> None:
        """Wait until nothing is held anywhere and no task of any request is left."""
        deadline = time.monotonic() + within_s
        while left := [words for stage in self.all() if (words := stage.held())] + self._tasks_of_requests():
            assert time.monotonic() < deadline, f"after {within_s:g} s: {left}"
            await asyncio.sleep(0.02)

    def _tasks_of_requests(self) -> list[str]:
        """Names of tasks that carry a request's ID (32 hex digits) or answer a request of a peer."""
        names = [task.get_name() for task in asyncio.all_tasks()]
        return [name for name in names if name.startswith("serve ") or any(len(w) >= 32 for w in name.split())]


@asynccontextmanager
async def open_stages(
    control_plane: ControlPlane,
    model: Path,
    *,
    pace_step_ms: float = 0.0,
    lease_s: float = 30.0,
    budget_s: float = 0.3,
    relay_max_tokens: int = 64,
    pool_tokens: int = 2048,
    seats: int = 16,
    max_attempts: int = 1,
    prefix_cache: bool = True,
    line_bytes_per_s: float = _LINE_BYTES_PER_S,
    line: LineSpec | None = None,
    gateway_nats: str | None = None,
) -> AsyncGenerator[Stages]:
    """A mesh in which everybody has heard of everybody. P, RLD and MD differ in block size, as they may.

    KV crosses to MD through `line`; None: as fast as loopback is. The control plane does not.

    There is one attempt unless a test asks for more: a second try would hide what went wrong in the first.
    """
    unique = secrets.token_hex(4)

    def settings(role: Role, dc: str, block_size: int, **kv_address: Any) -> tuple[StageSettings, Peer, LoadedEngine]:
        chosen = StageSettings(
            dc=dc,
            instance=unique,
            nats_url=control_plane.nats_a if dc == "a" else control_plane.nats_b,
            model=model,
            dtype="float32",
            block_size=block_size,
            pool_tokens=pool_tokens,
            step_tokens=16,
            max_running=seats,
            pace_step_ms=pace_step_ms,
            fabric="stream",
            kv_connections=2,
            lease_s=lease_s,
            **kv_address,
        )
        return chosen, chosen.peer(role), runtime.load(chosen, prefix_cache=prefix_cache and role is not Role.RELAY)

    async with AsyncExitStack() as stack:
        gateway, gateway_bus = await stack.enter_async_context(
            open_gateway(
                gateway_nats or control_plane.nats_a,
                line_bytes_per_s=line_bytes_per_s,
                budget_s=budget_s,
                relay_max_tokens=relay_max_tokens,
                max_attempts=max_attempts,
            )
        )
        prior = LinePrior(line_bytes_per_s, _LINE_DELAY_S, budget_s)
        prefill = await _open_prefill(stack, *settings(Role.PREFILL, "a", 8), prior)
        relay = await _open_decode(stack, *settings(Role.RELAY, "a", 4), RelayService)
        across = {} if line is None else await _lay_line(stack, line)
        main = await _open_decode(
            stack,
            *settings(Role.MAIN_DECODE, "b", 16, **across),
            partial(MainDecodeService, idle_share=0.3),
        )
        stages = Stages(prefill, relay, main, gateway, gateway_bus)
        async with asyncio.timeout(_STAGES_HEARD_S):
            hearers = [gateway.registry, *(stage.host.registry for stage in stages.all())]
            while not all(one.is_live(stage.me) for one in hearers for stage in stages.all()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        yield stages


@asynccontextmanager
async def open_gateway(
    nats_url: str,
    *,
    line_bytes_per_s: float = _LINE_BYTES_PER_S,
    budget_s: float = 0.3,
    relay_max_tokens: int = 64,
    max_attempts: int = 1,
) -> AsyncGenerator[tuple[Coordinator, BentBus]]:
    """A gateway's coordinator in datacenter A, and its bus."""
    async with connect(nats_url, "gateway") as straight:
        bus = BentBus(straight)
        registry = Registry(time.monotonic)
        gateway = Coordinator(
            me=Peer("a", Role.GATEWAY, secrets.token_hex(4), secrets.token_hex(4)),
            bus=bus,
            registry=registry,
            router=Router(registry, RoutingPolicy(line_bytes_per_s, _LINE_DELAY_S, budget_s)),
            prefixes=PrefixView(bus, "a", 0.05),
            limits=Limits(
                queue_timeout_s=10.0,
                max_waiting=64,
                stall_timeout_s=10.0,
                replay_after_s=0.1,
                max_attempts=max_attempts,
                relay_max_tokens=relay_max_tokens,
            ),
            now=time.monotonic,
        )
        await gateway.start()
        try:
            yield gateway, bus
        finally:
            await gateway.close()


async def _lay_line(stack: AsyncExitStack, line: LineSpec) -> dict[str, Any]:
    """Lay a line to where MD will listen. Settings that make MD listen there and name the line's other end."""
    (port,) = free_ports(1, None)
    emulator = await stack.enter_async_context(Emulator(line, [Route("kv", 0, port, "a")]))
    return {"kv_port": port, "kv_advertise": f"127.0.0.1:{emulator.ports['kv']}"}


async def _open_prefill(
    stack: AsyncExitStack, settings: StageSettings, me: Peer, loaded: LoadedEngine, prior: LinePrior
) -> Stage:
    stream = StreamSender(
        loaded.kv_pool,
        loaded.identity,
        me,
        connections=settings.kv_connections,
        window_bytes=settings.kv_window_bytes,
    )
    senders = await make_fabric_sender("stream", loaded.kv_pool, loaded.identity, me, stream=stream)
    stack.push_async_callback(senders.stop)
    host = await stack.enter_async_context(runtime.open_host(settings, me, loaded, "stream"))
    host.bus = BentBus(host.bus)
    service = PrefillService(host, senders, LineMeter(senders.stream, me.dc), prior, Admission(64, 0.4))
    _run(stack, host, service.endpoints(), service.on_step, senders.lost)
    return Stage(host, service, service._attempts)


async def _open_decode(
    stack: AsyncExitStack,
    settings: StageSettings,
    me: Peer,
    loaded: LoadedEngine,
    make: Callable[..., RelayService | MainDecodeService],
) -> Stage:
    fabric, wan = await stack.enter_async_context(runtime.open_receivers(settings, me, loaded))
    host = await stack.enter_async_context(runtime.open_host(settings, me, loaded, "stream"))
    host.bus = BentBus(host.bus)
    service = make(host, fabric=fabric, wan=wan)
    _run(stack, host, service.endpoints(), service.stage.on_step, fabric.lost)
    return Stage(host, service, service.stage.attempts)


def _run(
    stack: AsyncExitStack,
    host: StageHost,
    endpoints: list[Endpoint],
    on_step: Callable[[StepResult], None],
    fabric_lost: asyncio.Event,
) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(runtime.run_until(host, endpoints, on_step, stop=stop, fabric_lost=fabric_lost))

    async def end() -> None:
        stop.set()
        await running

    stack.push_async_callback(end)


class Oracle:
    """The single engine that a mesh must equal, and requests to compare."""

    def __init__(self, model: Path) -> None:
        settings = StageSettings(
            model=model, dtype="float32", block_size=4, pool_tokens=512, step_tokens=64, max_running=1
        )
        self._loaded = runtime.load(settings, prefix_cache=False)
        self._random = random.Random(11)

    def request(self, tokens: int, prompt_tokens: int = 37, **fields: Any) -> GenerationRequest:
        """A request with a random prompt; sampled, so that one wrong token changes all that follow."""
        return GenerationRequest(
            request_id=secrets.token_hex(16),
            prompt=[self._random.randrange(3, 512) for _ in range(prompt_tokens)],
            sampling=Sampling(temperature=0.9, seed=self._random.getrandbits(32)),
            stop=StopRule(max_tokens=tokens),
            **fields,
        )

    def ids(self, request: GenerationRequest) -> list[int]:
        """What one engine answers."""
        key = AttemptKey(request.request_id, 1)
        return generate(self._loaded.engine, SequenceSpec(key, request.prompt, [], request.sampling, request.stop))
