"""Whose death ends an attempt: only that of a stage without which it cannot go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdd.types import Peer, Role
from services.gateway.attempt import Stages
from tests.unit.mesh.beats import peer

P, RLD, MD = peer(Role.PREFILL), peer(Role.RELAY), peer(Role.MAIN_DECODE, dc="b")
DIRECT = Stages(prefill=P, main=MD)
RELAYED = Stages(prefill=P, main=MD, relay=RLD)


@pytest.mark.parametrize(
    ("stages", "needed"),
    [
        pytest.param(Stages(prefill=P), [P], id="submitted"),
        pytest.param(DIRECT, [P, MD], id="direct"),
        pytest.param(replace(DIRECT, kv_ready=True), [P, MD], id="direct, all KV there, not taken over"),
        pytest.param(replace(DIRECT, taken_over=True), [P, MD], id="direct, taken over, KV on its way"),
        pytest.param(replace(DIRECT, kv_ready=True, taken_over=True), [MD], id="direct, taken over with all KV"),
        pytest.param(RELAYED, [P, RLD], id="relayed: RelayDecode copes with MainDecode's death"),
        pytest.param(replace(RELAYED, taken_over=True), [P, RLD], id="relayed, MainDecode's KV on its way"),
        pytest.param(replace(RELAYED, kv_ready=True, taken_over=True), [RLD], id="relayed, all KV there"),
        pytest.param(replace(RELAYED, kv_ready=True, taken_over=True, handed_over=True), [MD], id="handed over"),
    ],
)
def test_who_is_needed(stages: Stages, needed: list[Peer]) -> None:
    assert [one for one in (P, MD, RLD) if stages.needs(one)] == needed


def test_tokens_tell_what_a_lost_report_would_have() -> None:
    stages = replace(RELAYED)
    stages.heard_tokens(Role.PREFILL)
    assert stages == RELAYED
    stages.heard_tokens(Role.RELAY)
    assert stages == replace(RELAYED, taken_over=True)
    stages.heard_tokens(Role.MAIN_DECODE)
    assert [one for one in (P, MD, RLD) if stages.needs(one)] == [MD]


def test_stages_are_named_in_the_order_they_were_asked() -> None:
    assert RELAYED.all() == [P, MD, RLD]
    assert DIRECT.all() == [P, MD]
    assert Stages().all() == []


def test_an_earlier_epoch_of_a_stage_is_not_needed() -> None:
    assert not DIRECT.needs(peer(Role.MAIN_DECODE, dc="b", epoch="earlier"))
