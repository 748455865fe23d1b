"""However an attempt ends, all it held is given back, on every stage, and nothing of it can come to life again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pdd.errors import RemoteError, StaleError
from pdd.mesh import subjects
from pdd.mesh.messages import (
    Cancel,
    Failed,
    Finished,
    GatewayBeat,
    KvReady,
    Ok,
    Replay,
    Replayed,
    Reserve,
    Reserved,
    Submit,
    Submitted,
    TokenBatch,
    Withdraw,
    Withdrawn,
)
from pdd.types import AttemptKey, FinishReason, Handoff, HandoffReply, Peer, Pipeline, TokenEvent, hash_prompt
from services.gateway.generation import GenerationRequest
from tests.integration.conftest import ControlPlane
from tests.integration.stages import ALWAYS_RELAY_S, Oracle, Stage, Stages, open_stages

LEASE_S = 1.5


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


async def ask(stages: Stages, stage: Stage, verb: str, message: object, reply: type[Any]) -> Any:
    """Send as the gateway would."""
    return await stages.gateway_bus.request(subjects.endpoint(stage.me, verb), message, reply)


def submit(stages: Stages, request: GenerationRequest, attempt: int = 1) -> Submit:
    key = AttemptKey(request.request_id, attempt)
    return Submit(key, stages.gateway.me, request.prompt, [], request.sampling, request.stop)


def reserve(stages: Stages, request: GenerationRequest, attempt: int = 1) -> Reserve:
    return Reserve(
        key=AttemptKey(request.request_id, attempt),
        gateway=stages.gateway.me,
        source=stages.prefill.me,
        prompt=request.prompt,
        outputs=[],
        sampling=request.sampling,
        stop=request.stop,
        max_outputs=request.stop.max_tokens,
    )


async def open_attempts(stages: Stages, request: GenerationRequest, attempt: int = 1) -> None:
    """Let all three stages hold something for the request, which goes nowhere."""
    await ask(stages, stages.prefill, "submit", submit(stages, request, attempt), Submitted)
    for stage in (stages.main, stages.relay):
        await ask(stages, stage, "reserve", reserve(stages, request, attempt), Reserved)
    assert [len(stage.attempts) for stage in stages.all()] == [1, 1, 1]
    assert all(stage.held() for stage in stages.all())


async def test_a_cancel_that_overtakes_what_it_cancels_wins(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model) as stages:
        request = oracle.request(8)
        for stage, verb, message, reply in (
            (stages.prefill, "submit", submit(stages, request), Submitted),
            (stages.relay, "reserve", reserve(stages, request), Reserved),
            (stages.main, "reserve", reserve(stages, request), Reserved),
        ):
            await ask(stages, stage, "cancel", Cancel(message.key, "client left"), Ok)
            with pytest.raises(RemoteError, match="is over") as told:
                await ask(stages, stage, verb, message, reply)
            assert told.value.code == StaleError.code
            assert not stage.held()
            assert stage.host.beat().load.stale_messages == 1
        # Another attempt at the same request is another matter.
        await open_attempts(stages, request, attempt=2)
        for stage in stages.all():
            await ask(stages, stage, "cancel", Cancel(AttemptKey(request.request_id, 2), "over"), Ok)
        await stages.settle()


async def test_without_its_gateway_an_attempt_ends_with_its_lease(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(
        control_plane, tiny_model, pace_step_ms=20, lease_s=LEASE_S, budget_s=ALWAYS_RELAY_S
    ) as stages:
        running = oracle.request(400, prompt_tokens=40, handoff_at=300)
        async with stages.gateway.generate(running) as live:
            emitted = 0
            async for emission in live:
                emitted += len(emission.tokens)
                if emitted > 3:
                    break
            waiting = oracle.request(8)
            await ask(stages, stages.main, "reserve", reserve(stages, waiting), Reserved)
            await ask(stages, stages.prefill, "submit", submit(stages, waiting), Submitted)
            began = time.monotonic()
            await stages.gateway_bus.close()  # no beat and no cancel leaves it any more
            await asyncio.sleep(LEASE_S / 3)
            assert [len(stage.attempts) for stage in stages.all()] == [2, 1, 2], "dropped before the lease was over"
            async with asyncio.timeout(LEASE_S + 2.0):  # the gateway itself goes on, deaf
                while any(stage.held() for stage in stages.all()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert time.monotonic() - began > LEASE_S - 1.0  # the last beat may be a second old
            assert stages.relay.host.engine.status().output_tokens < 299, "RelayDecode had reached its limit"


async def test_a_gateway_that_lists_an_attempt_no_more_has_dropped_it(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Three beats without it, and the stages let go, long before the lease."""
    async with open_stages(control_plane, tiny_model) as stages:
        request = oracle.request(8)
        key = AttemptKey(request.request_id, 1)
        stages.gateway.enter(key, None)  # it is listed while it is live
        await open_attempts(stages, request)
        await asyncio.sleep(2.2)
        assert [len(stage.attempts) for stage in stages.all()] == [1, 1, 1]
        stages.gateway.leave(key)
        for _ in range(3):
            await stages.gateway_bus.publish(subjects.beat(stages.gateway.me), GatewayBeat(stages.gateway.me, []))
        await stages.settle(3.0)


async def test_another_gateways_beat_ends_nothing(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model) as stages:
        request = oracle.request(8)
        key = AttemptKey(request.request_id, 1)
        stages.gateway.enter(key, None)
        await open_attempts(stages, request)
        stranger = Peer("a", stages.gateway.me.role, "stranger", "1")
        for _ in range(100):  # far more than three between any two of its own gateway's
            await stages.gateway_bus.publish(subjects.beat(stranger), GatewayBeat(stranger, []))
            await asyncio.sleep(0.02)
        assert [len(stage.attempts) for stage in stages.all()] == [1, 1, 1]
        stages.gateway.leave(key)
        for stage in stages.all():
            await ask(stages, stage, "cancel", Cancel(key, "over"), Ok)
        await stages.settle()


async def test_messages_of_an_older_attempt_are_refused_and_counted(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model) as stages:
        request = oracle.request(8)
        old, new = AttemptKey(request.request_id, 1), AttemptKey(request.request_id, 2)
        await open_attempts(stages, request, attempt=1)
        for stage in stages.all():
            await ask(stages, stage, "cancel", Cancel(old, "re-routed"), Ok)
        await open_attempts(stages, request, attempt=2)

        prefill, relay, main = stages.all()
        first = len(request.prompt)
        handoff = Handoff(old, prefill.me, 1, 0, first, [7], True, first, hash_prompt(request.prompt))
        late: list[tuple[Stage, str, object, type[Any]]] = [
            (prefill, "submit", submit(stages, request, 1), Submitted),
            (prefill, "replay", Replay(old, first), Replayed),
            (relay, "reserve", reserve(stages, request, 1), Reserved),
            (relay, "handoff", handoff, HandoffReply),
            (relay, "kv_ready", KvReady(old, main.me), Ok),
            (main, "reserve", reserve(stages, request, 1), Reserved),
            (main, "handoff", handoff, HandoffReply),
            (main, "withdraw", Withdraw(old, relay.me, 1), Withdrawn),
        ]
        for stage, verb, message, reply in late:
            with pytest.raises(RemoteError) as told:
                await ask(stages, stage, verb, message, reply)
            assert told.value.code == StaleError.code, f"{verb} at {stage.me.role}"
        assert [stage.host.beat().load.stale_messages for stage in stages.all()] == [2, 3, 3]
        # Its cancel comes late, too, and is fine; the new attempt does not notice any of it.
        for stage in stages.all():
            await ask(stages, stage, "cancel", Cancel(old, "again"), Ok)
            assert [key for key, _ in stage.attempts] == [new]
            await ask(stages, stage, "cancel", Cancel(new, "over"), Ok)
        await stages.settle()


async def test_the_gateway_refuses_and_counts_what_is_over(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model) as stages:
        request = oracle.request(6)
        ids, _ = await stages.complete(request)
        await stages.settle()
        before = stages.gateway.stale_messages
        key, main = AttemptKey(request.request_id, 1), stages.main
        late = TokenEvent(key, 0, len(request.prompt) + 6, 9, 0)
        await main.bus.publish(subjects.tokens(stages.gateway.me), TokenBatch(main.me, [late, late]))
        broken = Failed(key, main.me, "internal", "too late to matter")
        with pytest.raises(RemoteError) as told:
            await main.bus.request(subjects.endpoint(stages.gateway.me, "failed"), broken, Ok)
        assert told.value.code == StaleError.code
        # That it has ended is what the gateway knows already.
        ended = Finished(key, main.me, 0, len(request.prompt) + 7, FinishReason.STOP)
        await main.bus.request(subjects.endpoint(stages.gateway.me, "finished"), ended, Ok)
        assert ids == oracle.ids(request)
        async with asyncio.timeout(2):
            while stages.gateway.stale_messages < before + 3:  # noqa: ASYNC110 (the two planes are not ordered)
                await asyncio.sleep(0.01)
        assert (before, stages.gateway.stale_messages) == (0, 3)


async def test_a_defect_fails_the_attempt_at_once(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a minute without progress; and whatever was held is given back."""

    async def broken(reservation: object) -> None:
        raise KeyError("by accident")

    async with open_stages(control_plane, tiny_model) as stages:
        await stages.complete(oracle.request(3))
        with monkeypatch.context() as patch:
            patch.setattr(stages.main.service.stage._intake, "wait_ready", broken)
            began = time.monotonic()
            with pytest.raises(RemoteError, match="unexpected KeyError"):
                await stages.complete(oracle.request(8, pipeline=Pipeline.PD_WAN))
            assert time.monotonic() - began < 3
        await stages.settle()
        request = oracle.request(8)
        ids, _ = await stages.complete(request)
        assert ids == oracle.ids(request)
