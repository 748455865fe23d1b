"""What was computed and sent once is neither computed nor sent again, and the answer is the same."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from pdd.mesh import subjects
from pdd.mesh.messages import Cancel, Ok, Reserve, Reserved
from pdd.types import AttemptKey, Pipeline
from services.gateway.coordinator import LiveRequest
from services.gateway.generation import GenerationRequest
from tests.integration.conftest import ControlPlane
from tests.integration.stages import ALWAYS_RELAY_S, Oracle, Stages, open_stages

WAITS_NEVER_S = 1e9
"""An acceptable wait that every prediction stays under: the direct path, unforced."""

P_BLOCK, MAIN_BLOCK, STEP_TOKENS = 8, 16, 16


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def follow_up(
    oracle: Oracle, before: GenerationRequest, answer: list[int], tokens: int, more: int
) -> GenerationRequest:
    """The next turn of a conversation: what was said, and `more` tokens of the user's."""
    fresh = oracle.request(tokens, prompt_tokens=more)
    return msgspec.structs.replace(fresh, prompt=[*before.prompt, *answer, *fresh.prompt])


def wan_bytes(stages: Stages) -> int:
    return stages.main.host.metrics.transferred_bytes["wan"]


async def check(stages: Stages, oracle: Oracle, request: GenerationRequest) -> LiveRequest:
    """Run it: the answer must be the single engine's."""
    ids, live = await stages.complete(request)
    assert ids == oracle.ids(request)
    await stages.settle()
    return live


async def test_the_second_turn_sends_only_what_main_decode_lacks(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """MainDecode holds more than Prefill: its own answer. Prefill computes that again and sends none of it."""
    async with open_stages(control_plane, tiny_model, budget_s=WAITS_NEVER_S) as stages:
        first = oracle.request(40, prompt_tokens=100)
        cold = (await check(stages, oracle, first)).report
        assert (cold.prefill_hit_tokens, cold.main_hit_tokens) == (0, 0)
        second = follow_up(oracle, first, oracle.ids(first), 5, more=20)
        warm = (await check(stages, oracle, second)).report
        assert warm.prefill_hit_tokens == 100 // P_BLOCK * P_BLOCK
        assert warm.main_hit_tokens == (100 + 39) // MAIN_BLOCK * MAIN_BLOCK, "the last token was never computed"
        per_token = cold.kv_wan_bytes // 100
        assert warm.kv_wan_bytes == (160 - warm.main_hit_tokens) * per_token
        assert stages.prefill.host.engine.status().prompt_tokens_computed == 100 + 160 - warm.prefill_hit_tokens


async def test_at_ninety_percent_hits_an_eighth_of_the_bytes_crosses(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """The same conversations with and without caches. Of 160 tokens 144 are cached, in whole blocks."""
    sent: list[int] = []
    shared = oracle.request(1, prompt_tokens=144).prompt
    turns = [oracle.request(3, prompt_tokens=16) for _ in range(12)]
    for prefix_cache in (True, False):
        async with open_stages(
            control_plane, tiny_model, budget_s=WAITS_NEVER_S, prefix_cache=prefix_cache, pool_tokens=1024
        ) as stages:
            await check(stages, oracle, msgspec.structs.replace(turns[0], prompt=shared, request_id="0" * 32))
            before = wan_bytes(stages)
            for turn in turns:
                await check(stages, oracle, msgspec.structs.replace(turn, prompt=[*shared, *turn.prompt]))
            sent.append(wan_bytes(stages) - before)
    assert 0 < sent[0] <= 0.12 * sent[1], sent


async def test_salts_share_nothing(control_plane: ControlPlane, tiny_model: Path, oracle: Oracle) -> None:
    async with open_stages(control_plane, tiny_model, budget_s=WAITS_NEVER_S) as stages:
        request = oracle.request(4, prompt_tokens=64)
        for salt, hit in (("one", 0), ("two", 0), ("one", 56)):
            again = msgspec.structs.replace(request, request_id=oracle.request(1).request_id, salt=salt)
            live = await check(stages, oracle, again)
            assert live.report.prefill_hit_tokens == hit
            assert live.report.main_hit_tokens == (64 if hit else 0)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 15, 16, 17, 32, 33])
async def test_prompts_around_block_borders_cold_and_hot(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle, tokens: int
) -> None:
    """A prompt that is cached to its end must still compute one token: the logits come from it."""
    async with open_stages(control_plane, tiny_model, budget_s=ALWAYS_RELAY_S) as stages:
        request = oracle.request(6, prompt_tokens=tokens)
        for _ in range(3):
            again = msgspec.structs.replace(request, request_id=oracle.request(1).request_id)
            live = await check(stages, oracle, again)
        assert live.report.prefill_hit_tokens == (tokens - 1) // P_BLOCK * P_BLOCK
        assert live.report.main_hit_tokens == tokens // MAIN_BLOCK * MAIN_BLOCK


async def test_what_is_cached_leaves_before_anything_is_computed(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Prefill holds the prompt, MainDecode (as if restarted) does not: KV crosses while Prefill's step still runs."""
    async with open_stages(control_plane, tiny_model, budget_s=ALWAYS_RELAY_S, pace_step_ms=400) as stages:
        first = oracle.request(1, prompt_tokens=96)  # ends with its first token: nothing is handed on
        await check(stages, oracle, first)
        main = stages.main.host.loaded.engine.cache
        main.release(main.allocate(main.available_blocks))
        steps = stages.prefill.host.engine.status().steps
        second = follow_up(oracle, first, [], 4, more=20)
        async with stages.gateway.generate(second):
            async with asyncio.timeout(0.35):
                while not any(a.kv.incoming.received_tokens >= 80 for _, a in stages.main.attempts):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert stages.prefill.host.engine.status().steps == steps
        await stages.settle()


async def start_pair(
    stages: Stages, first: GenerationRequest, second: GenerationRequest
) -> tuple[asyncio.Task[list[int]], asyncio.Task[list[int]]]:
    """Two requests, the second while the first one's KV is on its way (and Prefill computes slowly)."""

    async def run(request: GenerationRequest) -> list[int]:
        return (await stages.complete(request))[0]

    one = asyncio.create_task(run(first))
    async with asyncio.timeout(5):
        while not len(stages.main.attempts):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return one, asyncio.create_task(run(second))


@pytest.mark.parametrize("budget_s", [ALWAYS_RELAY_S, WAITS_NEVER_S])
async def test_two_cold_requests_with_one_system_prompt_send_it_once(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle, budget_s: float
) -> None:
    async with open_stages(control_plane, tiny_model, budget_s=budget_s, pace_step_ms=60) as stages:
        first = oracle.request(12, prompt_tokens=90)
        second = msgspec.structs.replace(
            oracle.request(12), prompt=[*first.prompt[:80], *oracle.request(1, prompt_tokens=23).prompt]
        )
        tasks = await start_pair(stages, first, second)
        answers = await asyncio.gather(*tasks)
        assert answers == [oracle.ids(first), oracle.ids(second)]
        await stages.settle()
        spec = stages.main.host.loaded.kv_pool.spec
        assert wan_bytes(stages) == (90 + 23) * spec.token_bytes
        computed = stages.prefill.host.engine.status().prompt_tokens_computed
        assert computed <= 90 + 23 + 2 * STEP_TOKENS, "computed once, too, but for what two steps had in hand"


async def test_if_the_first_is_cancelled_the_second_takes_the_transfer_over(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model, budget_s=ALWAYS_RELAY_S, pace_step_ms=60) as stages:
        for cancel_after_s in (0.05, 0.15, 0.25, 0.35):
            first = oracle.request(12, prompt_tokens=90)
            second = msgspec.structs.replace(
                oracle.request(12), prompt=[*first.prompt[:80], *oracle.request(1, prompt_tokens=23).prompt]
            )
            one, two = await start_pair(stages, first, second)
            async with asyncio.timeout(5):
                while len(stages.main.attempts) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            follows = any(a.kv.incoming.ticket.in_flight_end > 0 for _, a in stages.main.attempts)
            assert follows
            await asyncio.sleep(cancel_after_s)
            one.cancel()
            assert await two == oracle.ids(second)
            await asyncio.gather(one, return_exceptions=True)
            await stages.settle()


async def test_a_transfer_that_does_not_move_is_not_awaited_for_ever(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """The first one's Prefill may have no blocks for it, as long as the second one holds them."""
    async with open_stages(control_plane, tiny_model, budget_s=WAITS_NEVER_S) as stages:
        first = oracle.request(4, prompt_tokens=90)
        key = AttemptKey(first.request_id, 1)
        stages.gateway._live[key] = None  # type: ignore[assignment]  # listed in its beats, as if it were under way
        reserve = Reserve(
            key=key,
            gateway=stages.gateway.me,
            source=stages.prefill.me,
            prompt=first.prompt,
            outputs=[],
            sampling=first.sampling,
            stop=first.stop,
            max_outputs=4,
        )
        await stages.gateway_bus.request(subjects.endpoint(stages.main.me, "reserve"), reserve, Reserved)
        second = follow_up(oracle, msgspec.structs.replace(first, prompt=first.prompt[:80]), [], 12, more=23)
        ids, live = await stages.complete(second)
        assert ids == oracle.ids(second)
        assert live.report.main_decode_tokens > 0
        assert [attempt.kv_freed for other, attempt in stages.main.attempts if other == key] == [False]
        del stages.gateway._live[key]
        await stages.gateway_bus.request(subjects.endpoint(stages.main.me, "cancel"), Cancel(key, "over"), Ok)
        await stages.settle()


async def test_an_answer_that_ends_on_relay_decode_still_leaves_its_kv_at_main_decode(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Otherwise MainDecode's cache would fall behind Prefill's with every short answer."""
    async with open_stages(control_plane, tiny_model, budget_s=ALWAYS_RELAY_S) as stages:
        request = oracle.request(2, prompt_tokens=300, handoff_at=9)  # RelayDecode waits for a ninth token in vain
        live = await check(stages, oracle, request)
        deadline = time.monotonic() + 3
        cache = stages.main.host.loaded.engine.cache
        while cache.cached_blocks < 300 // MAIN_BLOCK:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        again = await check(stages, oracle, follow_up(oracle, request, oracle.ids(request), 3, more=9))
        assert live.report.main_decode_tokens == 0
        assert again.report.main_hit_tokens == 300 // MAIN_BLOCK * MAIN_BLOCK


async def test_what_arrived_of_a_cancelled_request_is_kept_and_only_the_rest_is_sent(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model, budget_s=ALWAYS_RELAY_S, pace_step_ms=60) as stages:
        request = oracle.request(12, prompt_tokens=120)
        running = asyncio.create_task(stages.complete(request))
        async with asyncio.timeout(5):
            while not any(a.kv.incoming.received_tokens >= 48 for _, a in stages.main.attempts):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await stages.settle()
        again = msgspec.structs.replace(request, request_id=oracle.request(1).request_id)
        live = await check(stages, oracle, again)
        assert 48 <= live.report.main_hit_tokens < 120
        assert 48 <= live.report.prefill_hit_tokens < 120


async def test_a_cancel_that_would_keep_what_nobody_has_changes_nothing(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model) as stages:
        key = AttemptKey("e" * 32, 1)
        for stage in stages.all():
            cancel = Cancel(key, "over", keep_kv=True)
            assert await stages.gateway_bus.request(subjects.endpoint(stage.me, "cancel"), cancel, Ok) == Ok()
            assert not stage.held()
        request = msgspec.structs.replace(oracle.request(3), pipeline=Pipeline.PD_WAN)
        await check(stages, oracle, request)
