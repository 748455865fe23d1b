"""Stages that have no room, one by one and all at once: who waits goes on, who leaves leaves nothing, who is refused
hears so."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdd.errors import CapacityError, PddError
from pdd.local.line import LineSpec
from pdd.types import Pipeline
from services.gateway.generation import GenerationRequest
from tests.integration.conftest import ControlPlane
from tests.integration.stages import ALWAYS_RELAY_S, Oracle, Stages, open_stages

WAITS_NEVER_S = 1e9


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


async def answer(stages: Stages, request: GenerationRequest) -> list[int]:
    return (await stages.complete(request))[0]


def again(oracle: Oracle, request: GenerationRequest, tokens: int, **fields: object) -> GenerationRequest:
    """Another request with the same prompt."""
    return msgspec.structs.replace(oracle.request(tokens), prompt=request.prompt, **fields)


async def test_relay_and_main_decode_never_wait_for_each_other(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """One is at its limit on RelayDecode and waits for blocks at MainDecode; these belong to another, which has its KV
    cached there, and which waits for the first one's blocks on RelayDecode, where it must sample before it hands on."""
    async with open_stages(
        control_plane, tiny_model, pool_tokens=192, budget_s=ALWAYS_RELAY_S, line=LineSpec(0.5, 5.0)
    ) as stages:
        warm = oracle.request(3, prompt_tokens=48)
        await answer(stages, warm)
        await stages.settle()
        first = oracle.request(90, prompt_tokens=48, handoff_at=60)
        second = again(oracle, warm, 90, handoff_at=60)
        one = asyncio.create_task(answer(stages, first))
        async with asyncio.timeout(5):
            while not len(stages.relay.attempts):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        two = asyncio.create_task(answer(stages, second))
        async with asyncio.timeout(12):
            assert [await one, await two] == [oracle.ids(first), oracle.ids(second)]
        await stages.settle()


async def test_kv_that_is_here_waits_for_the_blocks_of_the_answer(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """All KV has arrived, and the rest of MainDecode's pool runs: it is neither lost nor sent nor computed again."""
    async with open_stages(
        control_plane, tiny_model, pool_tokens=320, budget_s=WAITS_NEVER_S, pace_step_ms=8
    ) as stages:
        intake = stages.main.service.stage._intake
        first, second = oracle.request(150, prompt_tokens=100), oracle.request(60, prompt_tokens=40)
        one = asyncio.create_task(answer(stages, first))
        async with asyncio.timeout(5):
            while not stages.main.host.engine.status().running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        two = asyncio.create_task(stages.complete(second))
        async with asyncio.timeout(5):
            while not any(intake.waits_for_room(a.kv) for _, a in stages.main.attempts):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        steps = stages.main.host.engine.status().steps
        async with asyncio.timeout(5):
            while stages.main.host.engine.status().steps < steps + 50:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert any(intake.waits_for_room(a.kv) for _, a in stages.main.attempts)
        assert await one == oracle.ids(first)
        ids, live = await two
        assert ids == oracle.ids(second)
        assert live.report.attempts == 1
        token_bytes = stages.main.host.loaded.kv_pool.spec.token_bytes
        assert stages.main.host.metrics.transferred_bytes["wan"] == 140 * token_bytes
        assert stages.main.host.engine.status().prompt_tokens_computed == 0
        assert stages.prefill.host.engine.status().prompt_tokens_computed == 140
        await stages.settle()


async def test_who_finds_the_pool_full_is_told_so_and_holds_nothing(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Prefill has begun by the time that MainDecode refuses; its blocks come back long before any lease ends."""
    async with open_stages(
        control_plane, tiny_model, pool_tokens=320, budget_s=WAITS_NEVER_S, pace_step_ms=8
    ) as stages:
        stages.gateway.limits = replace(stages.gateway.limits, queue_timeout_s=0.3)
        running = asyncio.create_task(answer(stages, oracle.request(150, prompt_tokens=160)))
        async with asyncio.timeout(5):
            while not stages.main.host.engine.status().running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(CapacityError, match="KV blocks"):
            await stages.complete(oracle.request(8, prompt_tokens=40))
        refused = time.monotonic()
        cache = stages.prefill.host.loaded.engine.cache
        while held := cache.total_blocks - cache.available_blocks:
            assert time.monotonic() - refused < 1, f"{held} blocks are held"
            await asyncio.sleep(0.01)
        await running
        await stages.settle()


@pytest.mark.parametrize("pipeline", [Pipeline.PDD, Pipeline.PD_WAN])
async def test_leaving_just_when_the_kv_is_complete_leaks_nothing(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle, pipeline: Pipeline
) -> None:
    """The end of the transfer and the end of the attempt meet in every order; then one request needs the whole pool."""
    async with open_stages(
        control_plane, tiny_model, pool_tokens=320, budget_s=ALWAYS_RELAY_S, line=LineSpec(10.0, 5.0)
    ) as stages:
        for turns in (0, 0, 1, 2, 3, 5, 8, 13):
            leaving = asyncio.create_task(answer(stages, oracle.request(100, prompt_tokens=120, pipeline=pipeline)))
            async with asyncio.timeout(5):
                while not any(a.kv.incoming.complete for _, a in stages.main.attempts):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            for key, _ in stages.main.attempts:  # nothing is slower than a cancel by message
                await stages.main.service.stage.drop(key)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await stages.settle()
        whole = oracle.request(20, prompt_tokens=300, pipeline=pipeline)
        assert await answer(stages, whole) == oracle.ids(whole)
        await stages.settle()


async def test_three_times_too_many_who_leave_and_come_again(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Clients lose patience and ask anew, which is how an overload feeds itself. The line stays bounded, who finds it
    full is refused at once, who is served is served right, and soon after the last one everything is at rest."""
    generator = random.Random(21)
    served, left = 0, 0
    refused: list[str] = []

    async def client() -> None:
        nonlocal served, left
        for _ in range(4):
            request = oracle.request(generator.randrange(4, 24), prompt_tokens=generator.choice((10, 40, 90)))
            patience_s = generator.choice((0.05, 0.5, 2.5))
            try:
                async with asyncio.timeout(patience_s):
                    assert await answer(stages, request) == oracle.ids(request)
                served += 1
            except TimeoutError:
                left += 1
            except PddError as error:
                refused.append(error.code)
                await asyncio.sleep(0.2)

    async with open_stages(
        control_plane, tiny_model, pool_tokens=160, seats=3, budget_s=ALWAYS_RELAY_S, relay_max_tokens=6, pace_step_ms=4
    ) as stages:
        line = stages.gateway.line(Pipeline.PDD)
        line._most = 8
        clients = [asyncio.create_task(client()) for _ in range(20)]
        most = 0
        while not all(one.done() for one in clients):
            most = max(most, line.waiting)
            await asyncio.sleep(0.02)
        await asyncio.gather(*clients)
        await stages.settle()
        assert most <= 8
        assert line.waiting == 0
        assert min(served, len(refused), left) > 0, (served, refused, left)
        assert set(refused) == {CapacityError.code}
        last = oracle.request(20, prompt_tokens=130)
        assert await answer(stages, last) == oracle.ids(last)
        await stages.settle()


async def test_who_waits_for_room_waits_for_a_stage_that_comes_back(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Prefill is out of sight for a moment when a request becomes the first in line, not having asked anybody yet: it
    has time left, and so have all those behind it, whom the same would befall one after the other."""
    async with open_stages(
        control_plane, tiny_model, pool_tokens=320, budget_s=WAITS_NEVER_S, pace_step_ms=8
    ) as stages:
        running = asyncio.create_task(answer(stages, oracle.request(150, prompt_tokens=160)))
        async with asyncio.timeout(5):
            while not stages.main.host.engine.status().running:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        requests = [oracle.request(8, prompt_tokens=40) for _ in range(3)]
        waiting: list[asyncio.Task[list[int]]] = []
        async with asyncio.timeout(5):
            for one in requests:
                waiting.append(asyncio.create_task(answer(stages, one)))
                while stages.gateway.waiting < len(waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        first, *others = waiting
        stages.gateway.registry.forget(stages.prefill.me)
        first.cancel()
        async with asyncio.timeout(15):
            assert await asyncio.gather(*others) == [oracle.ids(one) for one in requests[1:]]
            await running
        await stages.settle()


async def test_answers_that_outgrow_the_pool_take_turns(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """MainDecode begins more answers than it can hold to their ends: the newest give way and go on later, unchanged."""
    async with open_stages(control_plane, tiny_model, pool_tokens=640, budget_s=WAITS_NEVER_S) as stages:
        requests = [oracle.request(220, prompt_tokens=30) for _ in range(6)]
        answers = await asyncio.gather(*(stages.complete(one) for one in requests))
        assert [ids for ids, _ in answers] == [oracle.ids(one) for one in requests]
        assert [live.report.attempts for _, live in answers] == [1] * len(requests)
        assert stages.main.host.metrics._preemptions._value.get() > 0
        await stages.settle()
