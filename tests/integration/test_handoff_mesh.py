"""A request's way through P, RLD and MD, with what may go wrong between them: the answer is that of one engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.mesh.messages import TokenBatch, Withdraw
from pdd.types import Handoff, Pipeline, Role
from pdd.types import Path as Way
from tests.integration.conftest import ControlPlane
from tests.integration.stages import ALWAYS_RELAY_S, Fate, Oracle, Stages, open_stages

TOKENS = 12


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


async def test_every_way_and_every_moment_of_the_handoff_give_the_single_engines_answer(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    async with open_stages(control_plane, tiny_model) as stages:
        direct = oracle.request(TOKENS, pipeline=Pipeline.PD_WAN)
        ids, live = await stages.complete(direct)
        assert ids == oracle.ids(direct)
        assert live.report.path is Way.DIRECT
        assert (live.report.prefill_tokens, live.report.main_decode_tokens) == (1, TOKENS - 1)

        for at in range(1, TOKENS + 1):
            relayed = oracle.request(TOKENS, prompt_tokens=24 + at, handoff_at=at)
            ids, live = await stages.complete(relayed)
            assert ids == oracle.ids(relayed), f"handed over at {at}"
            report = live.report
            assert report.path is Way.RELAYED
            counts = (report.prefill_tokens, report.relay_tokens, report.main_decode_tokens)
            assert counts == (1, at - 1, TOKENS - at), f"handed over at {at}"
            assert report.handoff_position == (at if at < TOKENS else None)
            assert report.recomputed_prompt_tokens == 0
        await stages.settle()
        assert [stage.host.beat().load.stale_messages for stage in stages.all()] == [0, 0, 0]


async def test_lost_token_events_are_replayed_by_whoever_owns_the_stream(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    """Whoever's events they are, whichever: also the last ones, whose loss only the announced end shows."""
    relay, main = Role.RELAY, Role.MAIN_DECODE
    async with open_stages(control_plane, tiny_model, pace_step_ms=5) as stages:
        await with_losses(stages, oracle, {(Role.PREFILL, 0)}, pipeline=Pipeline.PD_WAN)
        await with_losses(stages, oracle, {(Role.PREFILL, 0), (relay, 3), (main, 9)}, handoff_at=6)
        await with_losses(stages, oracle, {(relay, at) for at in range(1, 6)}, handoff_at=6)
        await with_losses(stages, oracle, {(main, at) for at in range(6, TOKENS)}, handoff_at=6)
        await with_losses(stages, oracle, {(relay, TOKENS - 1)}, handoff_at=TOKENS)
        await stages.settle()


async def with_losses(stages: Stages, oracle: Oracle, lose: set[tuple[Role, int]], **fields: Any) -> None:
    """Run one request whose batches with these (stage, output index) never arrive."""
    request = oracle.request(TOKENS, **fields)
    lost: set[tuple[Role, int]] = set()

    def hears(message: Any) -> bool:
        if not isinstance(message, TokenBatch):
            return True
        carried = {(message.by.role, event.position - len(request.prompt)) for event in message.events}
        lost.update(carried & lose)
        return not carried & lose

    stages.gateway_bus.hears = hears
    ids, _ = await stages.complete(request)
    assert ids == oracle.ids(request)
    assert lost == lose


def fates_of_relays_messages(kind: type[Any], fates: list[Fate], seen: list[tuple[Any, Fate]]) -> Any:
    """Let the first messages of one kind that RelayDecode sends meet these fates, and write down what left."""

    def bend(_: str, message: Any) -> tuple[Fate, Any]:
        if not isinstance(message, kind):
            return "deliver", message
        fate: Fate = fates.pop(0) if fates else "deliver"
        seen.append((message, fate))
        return fate, message

    return bend


@pytest.mark.parametrize(
    ("fates", "generation"),
    [
        pytest.param(["lose reply"], 0, id="taken over, unheard"),
        pytest.param(["lose request"], 1, id="never heard"),
        pytest.param(
            ["lose request", "lose request", "lose reply"], 2, id="never heard twice, then taken over unheard"
        ),
    ],
)
async def test_a_silent_handoff_is_withdrawn_and_leaves_one_owner(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle, fates: list[Fate], generation: int
) -> None:
    """RelayDecode's limit is at the hand-over: nothing but MainDecode can end these answers."""
    batches: list[TokenBatch] = []
    offers: list[tuple[Handoff, Fate]] = []
    async with open_stages(control_plane, tiny_model) as stages:
        stages.relay.bus.bend = fates_of_relays_messages(Handoff, fates, offers)
        stages.gateway_bus.hears = lambda message: not isinstance(message, TokenBatch) or not batches.append(message)
        request = oracle.request(TOKENS, handoff_at=5)
        ids, live = await stages.complete(request)
        assert ids == oracle.ids(request)
        assert (live.report.relay_tokens, live.report.main_decode_tokens) == (4, TOKENS - 5)
        await stages.settle()
    assert [offer.seq for offer, _ in offers] == list(range(1, generation + 2))
    owners = [(event.position, batch.by.role, event.generation) for batch in batches for event in batch.events]
    first = len(request.prompt)
    assert sorted(owners) == sorted(
        [
            (first, Role.PREFILL, 0),
            *((first + at, Role.RELAY, 0) for at in range(1, 5)),
            *((first + at, Role.MAIN_DECODE, generation) for at in range(5, TOKENS)),
        ]
    ), "a position was sampled by two stages"


async def test_withdraw_is_asked_again_until_it_is_answered(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    asked: list[tuple[Withdraw, Fate]] = []
    async with open_stages(control_plane, tiny_model, pace_step_ms=40) as stages:
        lose_offers = fates_of_relays_messages(Handoff, ["lose reply"], [])
        lose_questions = fates_of_relays_messages(Withdraw, ["lose request", "lose request"], asked)

        def bend(subject: str, message: Any) -> tuple[Fate, Any]:
            return (lose_questions if isinstance(message, Withdraw) else lose_offers)(subject, message)

        stages.relay.bus.bend = bend
        request = oracle.request(24, handoff_at=5)
        ids, _ = await stages.complete(request)
        assert ids == oracle.ids(request)
        await stages.settle()
    assert [fate for _, fate in asked] == ["lose request", "lose request", "deliver"]


async def test_after_a_refusal_relay_goes_on_to_the_end(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    def corrupt(_: str, message: Any) -> tuple[Fate, Any]:
        if isinstance(message, Handoff):
            message = msgspec.structs.replace(message, prompt_hash=b"of another prompt")
        return "deliver", message

    async with open_stages(control_plane, tiny_model, budget_s=ALWAYS_RELAY_S, pace_step_ms=10) as stages:
        stages.relay.bus.bend = corrupt
        request = oracle.request(TOKENS)
        ids, live = await stages.complete(request)
        assert ids == oracle.ids(request)
        assert live.report.path is Way.RELAYED
        assert live.report.kv_ready_ms is not None, "MainDecode was never ready, so nothing was refused"
        assert (live.report.relay_tokens, live.report.main_decode_tokens) == (TOKENS - 1, 0)
        await stages.settle()


async def test_a_refusal_at_relays_limit_is_another_attempt_and_no_stall(
    control_plane: ControlPlane, tiny_model: Path, oracle: Oracle
) -> None:
    def corrupt(_: str, message: Any) -> tuple[Fate, Any]:
        if isinstance(message, Handoff) and message.key.attempt == 1:
            message = msgspec.structs.replace(message, covered_tokens=1)
        return "deliver", message

    async with open_stages(control_plane, tiny_model, max_attempts=2) as stages:
        stages.relay.bus.bend = corrupt
        request = oracle.request(TOKENS, handoff_at=5)
        async with asyncio.timeout(5):  # patience with a silent attempt is twice that
            ids, live = await stages.complete(request)
        assert ids == oracle.ids(request)
        assert live.report.attempts == 2
        assert live.report.recomputed_prompt_tokens == 0
        await stages.settle()
