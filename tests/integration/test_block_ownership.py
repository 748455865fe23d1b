"""When blocks run out: requests wait, nobody waits for ever, and what a late writer still sends lands nowhere."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import msgspec
import pytest

from pdd.errors import CapacityError, RemoteError
from pdd.local.line import LineSpec
from pdd.types import Sampling
from services.gateway.generation import GenerationRequest
from tests.integration.conftest import ControlPlane
from tests.integration.stages import ALWAYS_RELAY_S, Oracle, Stages, open_stages

WAITS_NEVER_S = 1e9


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


async def answer(stages: Stages, request: GenerationRequest) -> list[int]:
    return (await stages.complete(request))[0]


@pytest.mark.parametrize("budget_s", [ALWAYS_RELAY_S, WAITS_NEVER_S])
async def test_more_than_fits_is_served_one_after_the_other(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle, budget_s: float
) -> None:
    """Pools of 160 tokens everywhere; requests from a few tokens to nearly all of that, thirty at once, half of them
    with common beginnings. Blocks run out at all stages together."""
    generator = random.Random(3)
    shared = oracle.request(1, prompt_tokens=48).prompt
    requests: list[GenerationRequest] = []
    for number in range(30):
        request = oracle.request(generator.randrange(1, 20), prompt_tokens=generator.choice((3, 17, 40, 80)))
        if number % 2:
            request = msgspec.structs.replace(request, prompt=[*shared, *request.prompt])
        requests.append(request)
    async with open_stages(
        control_plane, tiny_model, pool_tokens=160, budget_s=budget_s, seats=4, relay_max_tokens=8, max_attempts=3
    ) as stages:
        answers = await asyncio.gather(*(answer(stages, request) for request in requests))
        assert answers == [oracle.ids(request) for request in requests]
        await stages.settle()


async def test_what_can_never_fit_is_refused_at_once(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """By Prefill for the prompt, by MainDecode for prompt and answer; and nothing is kept for it."""
    async with open_stages(control_plane, tiny_model, pool_tokens=160) as stages:
        for request in (oracle.request(4, prompt_tokens=200), oracle.request(200, prompt_tokens=100)):
            began = time.monotonic()
            with pytest.raises(RemoteError, match=r"needs .* KV blocks") as told:
                await stages.complete(request)
            assert told.value.code == "too_large"
            assert time.monotonic() - began < 1
            await stages.settle(1.5)


async def test_a_refusal_gives_back_what_prefill_holds(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """MainDecode has no seat left: Prefill's blocks come back now, not when a lease runs out."""
    async with open_stages(control_plane, tiny_model, seats=1, pace_step_ms=40, budget_s=WAITS_NEVER_S) as stages:
        stages.gateway.limits = type(stages.gateway.limits)(0.3, 4, 10.0, 0.1, 1, 64)
        long = asyncio.create_task(answer(stages, oracle.request(60)))
        while not len(stages.main.attempts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(CapacityError):
            await stages.complete(oracle.request(4))
        await asyncio.sleep(0.3)
        assert len(stages.prefill.attempts) <= 1
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await stages.settle()


async def test_blocks_of_an_aborted_transfer_are_not_given_to_the_next_one_too_early(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """MainDecode's pool has room for two prompts. The first one's KV creeps over a slow line when its client leaves;
    the next ones need its blocks. Bytes for the former owner must not land in theirs."""
    async with open_stages(
        control_plane, tiny_model, pool_tokens=320, budget_s=WAITS_NEVER_S, line=LineSpec(2.0, 5.0, 0.0)
    ) as stages:
        for leave_s in (0.02, 0.05, 0.1, 0.15, 0.2):
            first = asyncio.create_task(answer(stages, oracle.request(8, prompt_tokens=140)))
            await asyncio.sleep(leave_s)
            first.cancel()
            others = [oracle.request(8, prompt_tokens=140), oracle.request(8, prompt_tokens=130)]
            running = [answer(stages, request) for request in others]
            answers = await asyncio.gather(*running, first, return_exceptions=True)
            assert answers[:2] == [oracle.ids(request) for request in others]
            await stages.settle()


async def test_sessions_under_eviction_never_see_each_other(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Many sessions, each with a secret at its beginning, in pools that hold a few of them: turns come in any order."""
    generator = random.Random(9)
    sessions = [oracle.request(1, prompt_tokens=40).prompt for _ in range(24)]
    async with open_stages(control_plane, tiny_model, pool_tokens=512, budget_s=ALWAYS_RELAY_S) as stages:

        async def talk(number: int) -> None:
            for _ in range(3):
                request = oracle.request(5, prompt_tokens=6)
                # Greedy: of so many draws one would fall so near to a border that rounding decides.
                request = msgspec.structs.replace(
                    request, prompt=[*sessions[number], *request.prompt], sampling=Sampling()
                )
                ids = await answer(stages, request)
                assert ids == oracle.ids(request)
                sessions[number] = [*request.prompt, *ids]
                await asyncio.sleep(generator.uniform(0, 0.05))

        for start in range(0, len(sessions), 8):
            await asyncio.gather(*(talk(number) for number in range(start, start + 8)))
        for number in generator.sample(range(len(sessions)), 8):
            await talk(number)
        await stages.settle()
        cache = stages.main.host.loaded.engine.cache
        assert cache.evictable_blocks > 0
        assert cache.free_blocks < cache.total_blocks / 2, "eviction was at work"
