"""What a stage shows to a scrape, and which sums it keeps for its beat."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdd.engine.engine import StepResult
from pdd.local.scrape import Samples
from pdd.stage.metrics import StageMetrics
from pdd.types import Role
from tests.unit.mesh.beats import IDLE, beat, peer


class Stage:
    """Metrics, and the scrape that reads them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = StageMetrics(self._registry)

    def scraped(self) -> Samples:
        return Samples(generate_latest(self._registry).decode())


@pytest.fixture
def stage() -> Stage:
    return Stage()


def step(scheduled: int, sequences: int, decodes: int, seconds: float = 0.02) -> StepResult:
    return StepResult((), seconds, scheduled, sequences, decodes, 0)


def test_steps_give_batch_sizes_and_the_share_of_decode(stage: Stage) -> None:
    stage.metrics.step(step(scheduled=100, sequences=5, decodes=4))
    stage.metrics.step(step(scheduled=4, sequences=4, decodes=4, seconds=0.3))
    samples = stage.scraped()
    assert samples.total("pdd_stage_step_sequences_sum") == 9
    assert samples.total("pdd_stage_step_sequences_bucket", le="4.0") == 1
    assert samples.total("pdd_stage_step_tokens_sum") == 104
    assert samples.by("pdd_stage_scheduled_tokens_total", "kind") == {"decode": 8, "prefill": 96}
    assert samples.total("pdd_stage_step_seconds_sum") == pytest.approx(0.32)
    assert samples.total("pdd_stage_step_seconds_count") == 2


def test_the_batch_of_a_beat_follows_the_last_steps(stage: Stage) -> None:
    stage.metrics.step(step(8, 8, 8))
    assert stage.metrics.batch_sequences == 8
    for _ in range(40):
        stage.metrics.step(step(2, 2, 2))
    assert stage.metrics.batch_sequences == pytest.approx(2, abs=0.01)


def test_hits_are_counted_in_tokens(stage: Stage) -> None:
    stage.metrics.hit(1000, 640)
    stage.metrics.hit(200, 0)
    samples = stage.scraped()
    assert samples.total("pdd_stage_prefix_query_tokens_total") == 1200
    assert samples.total("pdd_stage_prefix_hit_tokens_total") == 640
    assert samples.total("pdd_stage_prefix_hit_length_tokens_bucket", le="0.0") == 1
    assert samples.total("pdd_stage_prefix_hit_ratio_sum") == pytest.approx(0.64)
    assert (stage.metrics.prompt_tokens_seen, stage.metrics.hit_tokens) == (1200, 640)


def test_transfers_give_bytes_and_goodput_by_network_and_direction(stage: Stage) -> None:
    stage.metrics.transfer("wan", "sent", 10_000_000, 2.0)
    stage.metrics.transfer("fabric", "sent", 3_000_000, 0.01)
    stage.metrics.transfer("wan", "received", 500, 0.0)
    samples = stage.scraped()
    assert samples.by("pdd_stage_kv_bytes_total", "network") == {"wan": 10_000_500, "fabric": 3_000_000}
    assert samples.total("pdd_stage_kv_bytes_total", network="wan", direction="received") == 500
    assert samples.total("pdd_stage_kv_transfer_bytes_per_second_sum", network="wan") == 5e6
    assert samples.total("pdd_stage_kv_transfer_seconds_count", network="wan") == 1
    assert stage.metrics.transferred_bytes == {"wan": 10_000_500, "fabric": 3_000_000}


def test_handoffs_by_outcome(stage: Stage) -> None:
    stage.metrics.handoff("accepted", 12)
    stage.metrics.handoff("accepted", 30)
    stage.metrics.handoff("refused", 1)
    samples = stage.scraped()
    assert samples.by("pdd_stage_handoffs_total", "outcome") == {"accepted": 2, "refused": 1}
    assert samples.total("pdd_stage_handoff_tokens_sum", outcome="accepted") == 42


def test_a_scrape_shows_the_last_beat(stage: Stage) -> None:
    assert "pdd_stage_running_sequences" not in str(stage.scraped()._samples)
    figures = {
        "running": 3,
        "waiting": 2,
        "reserved": 1,
        "free_blocks": 2,
        "evictable_blocks": 5,
        "stale_messages": 9,
        "recomputed_prompt_tokens": 4,
        "wan_goodput_bytes_per_s": None,
    }
    for running in (1, 3):
        stage.metrics.beat(beat(peer(Role.PREFILL), **{**figures, "running": running}).load)
    samples = stage.scraped()
    shown = {
        name: samples.total(f"pdd_stage_{name}")
        for name in ("running_sequences", "waiting_sequences", "reserved_sequences", "seats", "stale_messages_total")
    }
    assert list(shown.values()) == [3, 2, 1, IDLE.seats, 9]
    assert samples.total("pdd_stage_recomputed_prompt_tokens_total") == 4
    assert samples.by("pdd_stage_kv_blocks", "state") == {"used": IDLE.total_blocks - 7, "cached": 5, "free": 2}
    names = {name for name, _, _ in samples._samples}
    assert "pdd_stage_wan_goodput_bytes_per_second" not in names, "not measured is not 0"
    assert all(name.startswith("pdd_stage_") and ":" not in name for name in names)


def test_without_a_registry_the_sums_are_kept() -> None:
    metrics = StageMetrics(None)
    metrics.hit(10, 4)
    metrics.transfer("fabric", "received", 7, 1.0)
    metrics.beat(IDLE)
    assert (metrics.hit_tokens, metrics.transferred_bytes["fabric"]) == (4, 7)
