"""Which stages a request gets, and what its client sees when there are none."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdd.errors import CapacityError, RemoteError, UnavailableError
from pdd.mesh import subjects
from pdd.mesh.bus import Endpoint, connect
from pdd.mesh.messages import Reserve, Reserved
from pdd.types import Path as Route
from pdd.types import Peer, Pipeline, Role
from tests.integration.conftest import ControlPlane
from tests.integration.stages import ALWAYS_RELAY_S, Oracle, open_stages


async def test_main_decode_tells_the_relay_that_has_the_request(
    control_plane: ControlPlane, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The RelayDecode thought of when MainDecode was asked is gone when its turn comes; another takes the request."""
    oracle = Oracle(tiny_model)
    request = oracle.request(40)
    async with open_stages(control_plane, tiny_model, budget_s=ALWAYS_RELAY_S, pace_step_ms=20) as stages:
        real = stages.gateway.router.relays
        answers = [[Peer("a", Role.RELAY, "ghost", "gone")]]
        monkeypatch.setattr(
            stages.gateway.router, "relays", lambda prefill: answers.pop() if answers else real(prefill)
        )
        ids, live = await stages.complete(request)
        assert ids == oracle.ids(request)
        assert live.report.path is Route.RELAYED
        assert live.report.main_decode_tokens > 0
        await stages.settle()


async def test_without_an_instance_for_the_layout_the_answer_is_immediate(
    control_plane: ControlPlane, tiny_model: Path
) -> None:
    request = Oracle(tiny_model).request(8, pipeline=Pipeline.PD_LOCAL)
    async with open_stages(control_plane, tiny_model, max_attempts=3) as stages:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="same datacenter"):
            await stages.complete(request)
        assert time.monotonic() - started < 2
        await stages.settle()


async def test_without_room_at_main_decode_nothing_is_emitted_before_the_error(
    control_plane: ControlPlane, tiny_model: Path
) -> None:
    """A client that has seen a token can no longer be told 503."""
    oracle = Oracle(tiny_model)
    first, second = oracle.request(60, pipeline=Pipeline.PD_WAN), oracle.request(8, pipeline=Pipeline.PD_WAN)
    async with open_stages(control_plane, tiny_model, seats=1, pace_step_ms=50) as stages:
        stages.gateway.limits = replace(stages.gateway.limits, queue_timeout_s=0.5)
        running = asyncio.create_task(stages.complete(first))
        while not len(stages.main.attempts):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        emitted: list[int] = []

        async def ask() -> None:
            async with stages.gateway.generate(second) as live:
                async for emission in live:
                    emitted.extend(emission.tokens)

        with pytest.raises((CapacityError, RemoteError), match="seats"):
            await ask()
        assert emitted == []
        ids, _ = await running
        assert ids == oracle.ids(first)
        await stages.settle()


async def test_a_stage_that_does_not_answer_is_passed_over(
    control_plane: ControlPlane, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes the reservation and never says a word: the next one is asked, after the deadline, and it alone is
    listened to."""
    oracle = Oracle(tiny_model)
    request = oracle.request(8, pipeline=Pipeline.PD_WAN)
    async with (
        open_stages(control_plane, tiny_model) as stages,
        connect(control_plane.nats_b, "mute") as bus,
    ):
        mute = Peer("b", Role.MAIN_DECODE, f"mute-{stages.main.me.instance}", "e")

        async def never(_: Reserve) -> Reserved:
            await asyncio.sleep(3600)
            raise AssertionError

        await bus.serve(mute, [Endpoint("reserve", subjects.endpoint(mute, "reserve"), Reserve, never)], {})
        real = stages.gateway.router.mains
        monkeypatch.setattr(stages.gateway.router, "mains", lambda *asked: [mute, *real(*asked)])
        ids, live = await stages.complete(request)
        assert ids == oracle.ids(request)
        assert live.report.main_decode == f"b/{stages.main.me.instance}"
        assert live.report.attempts == 1
