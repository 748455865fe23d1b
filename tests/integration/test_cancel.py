"""A client that goes away leaves nothing: at whatever moment, all that was held for it is given back, and soon."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.local.line import LineSpec
from pdd.types import AttemptKey, Pipeline, StopRule
from services.gateway.coordinator import LiveRequest
from services.gateway.generation import GenerationRequest
from tests.integration.conftest import ControlPlane
from tests.integration.leftovers import Belongings, settle, watch_blocks
from tests.integration.stages import ALWAYS_RELAY_S, Oracle, Stages, open_stages

GIVEN_BACK_S = 2.0
ROUND_TRIP_S = 0.02
STEP_TOKENS = 16
SLOW_LINE = LineSpec(mbps=2.0, delay_ms=1e3 * ROUND_TRIP_S / 2)
"""A prompt of a hundred tokens takes a fifth of a second, so that clients leave while KV is on its way."""

CROWDS = (8, 24, 10, 24, 10, 10, 24, 10, 24, 10, 10, 10, 26)
"""Clients at once, wave by wave: a few find room at every stage, many wait in the gateway's line and in P's queue."""

FEW = 10
"""So many mostly leave while their prompts are computed and their KV is on its way."""
PACE_S = 0.01
BUSY_S = 0.3
"""What a machine that also does other things may add to a wait."""


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


class Client:
    """Somebody who asks, reads, and leaves. `ids` is what it got, `phases` where its request was when it left."""

    def __init__(self, stages: Stages, request: GenerationRequest) -> None:
        self.request = request
        self.ids: list[int] = []
        self.phases: list[str] = []
        self._stages = stages
        self._live: LiveRequest | None = None

    async def stay(self, longest_s: float) -> None:
        """Ask, and leave after `longest_s`, or with the whole answer before that. Raises what an answer raised."""
        reading = asyncio.create_task(self._read())
        await asyncio.wait({reading}, timeout=longest_s)
        if reading.done():
            await reading
            self.phases = ["kept"] if await self._is_kept() else ["answered"]
        else:
            self.phases = self._where()
            reading.cancel()
            await asyncio.wait({reading})

    async def _read(self) -> None:
        async with self._stages.gateway.generate(self.request) as self._live:
            async for emission in self._live:
                self.ids.extend(emission.tokens)

    async def _is_kept(self) -> bool:
        """Whether KV still goes to MainDecode, for its cache alone."""
        for _ in range(5):
            kept = self._stages.main.service.stage._intake._kept
            if any(key.request_id == self.request.request_id for key in kept):
                return True
            await asyncio.sleep(0.01)
        return False

    def _where(self) -> list[str]:
        attempt = None if self._live is None else self._live.attempt
        if attempt is None or attempt.key not in self._stages.gateway._live:
            return ["line" if self._stages.gateway.waiting else "asking"]
        main = self._stages.main.attempts.find(attempt.key)
        follows = main is not None and not main.kv.in_flight_settled and not main.kv.incoming.complete
        return [self._stage_of(attempt.key), *(["following"] if follows else [])]

    def _stage_of(self, key: AttemptKey) -> str:
        prefill, relay, main = (stage.attempts.find(key) for stage in self._stages.all())
        if main is not None and main.started:
            return "main_decode"
        if relay is not None and relay.started:
            return "relay_decode"
        if prefill is None:
            return "asking"
        if not prefill.blocks:
            return "queue"
        return "transfer" if prefill.sampled else "prefill"


def crowd(oracle: Oracle, generator: random.Random, size: int) -> list[GenerationRequest]:
    """Requests of every kind, most of which share the beginning of their prompts."""
    kinds: list[dict[str, Any]] = [
        {"tokens": 40},
        {"tokens": 40, "handoff_at": 9},
        {"tokens": 30, "pipeline": Pipeline.PD_WAN},
        {"tokens": 2, "handoff_at": 20},  # ends on RelayDecode
    ]
    shared = oracle.request(1, prompt_tokens=generator.choice((48, 80))).prompt
    requests: list[GenerationRequest] = []
    for number in range(size):
        kind = kinds[number % len(kinds)]
        one = oracle.request(**kind, prompt_tokens=generator.randrange(20, 100))
        if size <= FEW or generator.random() < 0.8:
            one = msgspec.structs.replace(one, prompt=[*shared, *one.prompt[:30]])
        requests.append(one)
    return requests


def some_time(generator: random.Random, size: int) -> float:
    """How long one of a crowd stays: perhaps until its end, sometimes no longer than it takes to find stages."""
    longest_s = 0.45 if size <= FEW else 0.5 + size / 30
    return generator.uniform(0, 0.01 if generator.random() < 0.1 else longest_s)


@pytest.mark.timeout(180)
async def test_clients_that_leave_at_any_moment_leave_nothing(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Two hundred of them, in every phase that a request has."""
    generator = random.Random(5)
    phases: Counter[str] = Counter()
    clients: list[Client] = []
    async with open_stages(
        control_plane,
        tiny_model,
        pace_step_ms=1e3 * PACE_S,
        budget_s=ALWAYS_RELAY_S,
        pool_tokens=768,
        seats=6,
        line=SLOW_LINE,
    ) as stages:
        for _ in range(2):  # connections, and subscriptions for answers, are made by the first requests
            await stages.complete(oracle.request(12, handoff_at=3))
        await stages.settle()
        before = Belongings.now(stages)
        given_up_too_early = watch_blocks(stages)
        slowest_s = 0.0
        for size in CROWDS:
            wave = [Client(stages, request) for request in crowd(oracle, generator, size)]
            await asyncio.gather(*(one.stay(some_time(generator, size)) for one in wave))
            slowest_s = max(slowest_s, await settle(stages, before, GIVEN_BACK_S + PACE_S + ROUND_TRIP_S))
            clients += wave
            survivor = oracle.request(8)
            ids, _ = await stages.complete(survivor)
            assert ids == oracle.ids(survivor)
        await settle(stages, before, GIVEN_BACK_S)
    assert not given_up_too_early
    for client in clients:
        got = client.ids
        if got:
            assert got == oracle.ids(msgspec.structs.replace(client.request, stop=StopRule(max_tokens=len(got))))
        phases.update(client.phases)
    print(f"given back after {slowest_s:.2f} s at most; {dict(phases)}")
    assert len(clients) == 200
    everywhere = ("asking", "line", "queue", "prefill", "transfer", "following", "relay_decode", "main_decode", "kept")
    assert min(phases[phase] for phase in everywhere) >= 3, phases


async def test_prefill_stops_within_a_chunk(control_plane: ControlPlane, tiny_model: Path, oracle: Oracle) -> None:
    """Of a long prompt nothing is computed beyond the step that runs when the cancel arrives; the next in line begins,
    and nobody decodes."""
    pace_s = 0.1
    async with open_stages(
        control_plane, tiny_model, pace_step_ms=1e3 * pace_s, budget_s=ALWAYS_RELAY_S, prefix_cache=False
    ) as stages:
        engine, attempts = stages.prefill.host.engine, stages.prefill.attempts
        arrived: list[int] = []
        close = attempts.close

        def closing(key: AttemptKey) -> Any:
            arrived.append(engine.status().prompt_tokens_computed)
            return close(key)

        attempts.close = closing  # type: ignore[method-assign]
        idle_s = await time_to_first_token(stages, oracle.request(2, prompt_tokens=10))
        await stages.settle()
        decoded = [stage.host.engine.status().output_tokens for stage in (stages.relay, stages.main)]
        for stay_s in (0.02, 0.35, 0.72, 1.08):
            arrived.clear()
            before = engine.status().prompt_tokens_computed
            leaving = Client(stages, oracle.request(8, prompt_tokens=25 * STEP_TOKENS))
            await leaving.stay(stay_s)
            ttft_s = await time_to_first_token(stages, oracle.request(1, prompt_tokens=10))
            assert leaving.phases == ["prefill"]
            assert 0 <= engine.status().prompt_tokens_computed - 10 - arrived[0] <= STEP_TOKENS
            assert arrived[0] - before <= (stay_s / pace_s + 1) * STEP_TOKENS, "the pace was not kept"
            # It waits for the running step at most, and for a busy machine; behind the whole prompt it would wait for
            # 14 steps or more.
            assert ttft_s <= idle_s + pace_s + BUSY_S
            await stages.settle(GIVEN_BACK_S + pace_s)
        assert [stage.host.engine.status().output_tokens for stage in (stages.relay, stages.main)] == decoded


async def time_to_first_token(stages: Stages, request: GenerationRequest) -> float:
    """Seconds from asking until the first token. Reads no further."""
    began = time.monotonic()
    async with stages.gateway.generate(request) as live:
        async for emission in live:
            assert emission.tokens
            break
    return time.monotonic() - began
