"""Who serves a request, and by which way, from what stages say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from pdd.errors import UnavailableError, UnreachableError
from pdd.kv import StreamEndpoint, Ticket
from pdd.mesh.messages import Beat
from pdd.mesh.registry import Registry
from pdd.types import Path, Peer, Pipeline, Role
from services.gateway.router import Router, RoutingPolicy
from tests.unit.mesh.beats import SPEC, beat, peer

P0, P1 = peer(Role.PREFILL, "0"), peer(Role.PREFILL, "1")
RLD, RLD_B = peer(Role.RELAY), peer(Role.RELAY, dc="b")
MD_A, MD_B, MD_B1 = (peer(Role.MAIN_DECODE, name, dc=dc) for name, dc in (("0", "a"), ("0", "b"), ("1", "b")))

TOKENS = 64
KV_BYTES = TOKENS * SPEC.token_bytes
POLICY = RoutingPolicy(goodput_bytes_per_s=KV_BYTES / 1.0, delay_s=0.01, budget_s=0.3)
"""A line that needs one second for the KV of such a request."""


def router_of(*beats: Beat) -> Router:
    registry = Registry(lambda: 0.0)
    for one in beats:
        registry.hear(one)
    return Router(registry, POLICY)


def ticket(first_token: int = 0) -> Ticket:
    return Ticket("t", MD_B, first_token, first_token, TOKENS, SPEC, StreamEndpoint("127.0.0.1", 1))


def decide(load: dict[str, Any] | None = None, first_token: int = 0, **choice: Any) -> tuple[Path, str]:
    choice = {"relay_available": True, "forced_relay": False, **choice}
    router = router_of(beat(P0, prefill_tokens_per_s=1e6, **(load or {})))
    decision = router.decide(choice.pop("pipeline", Pipeline.PDD), P0, first_token, ticket(first_token), **choice)
    return decision.path, decision.reason


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({}, (Path.RELAYED, "wait_exceeds_budget")),
        ({"relay_available": False}, (Path.DIRECT, "relay_full")),
        ({"first_token": TOKENS}, (Path.DIRECT, "wait_within_budget")),  # MainDecode holds all of it
        ({"first_token": 48}, (Path.DIRECT, "wait_within_budget")),  # a quarter of a second is left
        ({"load": {"wan_goodput_bytes_per_s": 10.0 * KV_BYTES}}, (Path.DIRECT, "wait_within_budget")),
        (
            {"load": {"wan_goodput_bytes_per_s": 10.0 * KV_BYTES, "wan_backlog_bytes": 5 * KV_BYTES}},
            (Path.RELAYED, "wait_exceeds_budget"),
        ),
        ({"pipeline": Pipeline.PD_WAN}, (Path.DIRECT, "forced_pd-wan")),
        ({"pipeline": Pipeline.PD_LOCAL}, (Path.DIRECT, "forced_pd-local")),
        ({"forced_relay": True, "first_token": TOKENS}, (Path.RELAYED, "forced_handoff_at")),
    ],
)
def test_the_path_follows_what_is_left_to_cross(case: dict[str, Any], expected: tuple[Path, str]) -> None:
    assert decide(**case) == expected


def test_a_slow_prefill_hides_the_line() -> None:
    """The line works while Prefill computes: only the last chunk's KV is exposed."""
    tokens_per_s = TOKENS / 10.0
    router = router_of(beat(P0, prefill_tokens_per_s=tokens_per_s))
    decision = router.decide(Pipeline.PDD, P0, 0, ticket(), relay_available=True, forced_relay=False)
    assert decision.path is Path.DIRECT
    assert decision.exposed_wait_s == pytest.approx(16 / TOKENS * 1.0 + POLICY.delay_s)  # beats say 16 tokens a step


def test_a_prefill_that_is_gone_decides_nothing() -> None:
    reborn = peer(Role.PREFILL, "0", epoch="second")
    with pytest.raises(UnreachableError, match="prefill 0 is gone"):
        router_of(beat(reborn)).decide(Pipeline.PDD, P0, 0, ticket(), relay_available=True, forced_relay=False)


def test_each_layout_has_its_own_mains() -> None:
    router = router_of(*map(beat, (P0, RLD, RLD_B, MD_A, MD_B, MD_B1)))
    assert router.mains(P0, Pipeline.PD_LOCAL, {}) == [MD_A]
    assert router.mains(P0, Pipeline.PD_WAN, {}) == router.mains(P0, Pipeline.PDD, {}) == [MD_B, MD_B1]
    assert router.relays(P0) == [RLD]


def test_nobody_there_is_said_for_each_role() -> None:
    only_b = router_of(beat(MD_B), beat(RLD_B))
    assert only_b.relays(P0) == []
    with pytest.raises(UnavailableError, match="no prefill"):
        only_b.prefills({})
    with pytest.raises(UnavailableError, match="no main_decode in the same datacenter"):
        only_b.mains(P0, Pipeline.PD_LOCAL, {})
    with pytest.raises(UnavailableError, match="no main_decode across the WAN"):
        router_of(beat(MD_A)).mains(P0, Pipeline.PDD, {})


@pytest.mark.parametrize(
    "load", [{"running": 1}, {"reserved": 1}, {"waiting": 1}, {"free_blocks": 1}], ids=lambda load: next(iter(load))
)
def test_of_equal_hits_the_less_loaded_comes_first(load: dict[str, Any]) -> None:
    """P0 wins by its name while all else is equal."""
    assert router_of(beat(P0), beat(P1)).prefills({}) == [P0, P1]
    assert router_of(beat(P0, **load), beat(P1)).prefills({}) == [P1, P0]


def test_a_hit_counts_where_it_is_and_load_against_it() -> None:
    """A conversation stays where its KV is, unless it would have to wait there for longer than that is worth."""
    router = router_of(beat(P0), beat(P1, waiting=9))
    elsewhere = {("b", Role.PREFILL, "0"): 9999, ("a", Role.RELAY, "0"): 9999}
    assert router.prefills(elsewhere) == [P0, P1]
    assert router.prefills({("a", Role.PREFILL, "1"): 2000, **elsewhere}) == [P0, P1]
    assert router.prefills({("a", Role.PREFILL, "1"): 3000, **elsewhere}) == [P1, P0]


def test_a_burst_between_two_beats_does_not_herd() -> None:
    router = router_of(beat(P0), beat(P1))
    chosen: list[Peer] = []
    for _ in range(6):
        chosen.append(router.prefills({})[0])
        router.commit(chosen[-1])
    assert chosen == [P0, P1] * 3
    for one in (P0, P0, P0):
        router.settle(one)
    assert router.prefills({}) == [P0, P1]
    router.settle(P0)  # once too often does not make it look better than idle
    for one in (P1, P1, P1):
        router.settle(one)
    router.commit(P0)
    assert router.prefills({}) == [P1, P0]
