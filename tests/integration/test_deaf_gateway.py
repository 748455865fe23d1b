"""A gateway that reads nothing for ten seconds while its streams are emitted: what NATS gave up meanwhile is asked for
again, and nobody is taken for dead for a silence that was the gateway's own."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

import msgspec
import pytest

from services.gateway.coordinator import Coordinator, LiveRequest
from services.gateway.generation import GenerationRequest
from tests.integration.conftest import ControlPlane
from tests.integration.stages import Oracle, Stages, open_gateway, open_stages

STREAMS = 64
TOKENS = 250
DEAF_S = 10.0
OVERFLOWS = 32


@pytest.mark.parametrize("inbox", [16_384, OVERFLOWS])
async def test_ten_deaf_seconds(
    control_plane: ControlPlane, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, inbox: int
) -> None:
    """With an inbox of the size that it has nothing is dropped; with one that overflows the gaps are filled."""
    monkeypatch.setattr("pdd.mesh.bus._PENDING_MESSAGES", inbox)
    oracle = Oracle(tiny_model)
    requests = [oracle.request(TOKENS, prompt_tokens=20) for _ in range(STREAMS)]
    async with open_stages(
        control_plane, tiny_model, pool_tokens=STREAMS * 320, seats=STREAMS, pace_step_ms=5
    ) as stages:
        calm = [ids for ids, _ in await asyncio.gather(*(stages.complete(one) for one in requests))]
        # On a thread of its own, so that the stages go on.
        deaf = deaf_in_the_middle(control_plane, stages, requests)
        answers, dropped = await asyncio.to_thread(asyncio.run, deaf)
        assert answers == calm
        assert (dropped > 0) == (inbox == OVERFLOWS)
        await stages.settle()


async def deaf_in_the_middle(
    control_plane: ControlPlane, stages: Stages, requests: list[GenerationRequest]
) -> tuple[list[list[int]], int]:
    """Another gateway, that is stopped while it has all of them answered. What they got, and messages dropped."""
    async with open_gateway(control_plane.nats_a) as (gateway, bus):
        async with asyncio.timeout(10):
            while not all(gateway.registry.is_live(stage.me) for stage in stages.all()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        lives: list[LiveRequest] = []
        running = [asyncio.create_task(answer(gateway, one, lives)) for one in requests]
        async with asyncio.timeout(20):
            while len(lives) < len(requests) or not all(emitted(one) for one in lives):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert sum(emitted(one) for one in lives) < len(requests) * TOKENS / 2
        time.sleep(DEAF_S)  # noqa: ASYNC251
        async with asyncio.timeout(20):
            answers = await asyncio.gather(*running)
        assert [one.report.attempts for one in lives] == [1] * len(requests)
        async with asyncio.timeout(5):
            while any(one.pending_msgs or one.pending_bytes for one in bus._bus._client._subs.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return answers, bus.dropped


async def answer(gateway: Coordinator, request: GenerationRequest, lives: list[LiveRequest]) -> list[int]:
    again = msgspec.structs.replace(request, request_id=secrets.token_hex(16))
    ids: list[int] = []
    async with gateway.generate(again) as live:
        lives.append(live)
        async for emission in live:
            ids.extend(emission.tokens)
    return ids


def emitted(live: LiveRequest) -> int:
    report = live.report
    return report.prefill_tokens + report.relay_tokens + report.main_decode_tokens
