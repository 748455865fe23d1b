"""What the gateway shows of answered requests."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pdd.local.scrape import Samples
from pdd.local.status import gateway_status
from pdd.types import Path, Pipeline
from services.gateway.api.metrics import Metrics
from services.gateway.generation import Report


class Gateway:
    """Metrics, and the scrape that reads them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = Metrics(self._registry)

    def answered(self, prompt_tokens: int = 100, output_tokens: int = 10, **report: Any) -> None:
        given = {"request_id": "r", "pipeline": Pipeline.PDD, **report}
        self.metrics.observe_answer(Report(**given), prompt_tokens, output_tokens, 1.0)

    def scraped(self) -> Samples:
        return Samples(generate_latest(self._registry).decode())


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_requests_by_pipeline_path_and_reason(gateway: Gateway) -> None:
    gateway.answered(path=Path.DIRECT, reason="wait_short")
    gateway.answered(path=Path.RELAYED, reason="wait_long")
    gateway.answered(path=Path.RELAYED, reason="wait_long", pipeline=Pipeline.PDD)
    gateway.answered(path=Path.DIRECT, reason="pipeline", pipeline=Pipeline.PD_WAN)
    routes = gateway_status("", gateway.scraped()).routes
    assert routes == {"P->MD": {"wait_short": 1, "pipeline": 1}, "P->RLD->MD": {"wait_long": 2}}
    assert gateway.scraped().by("pdd_gateway_routes_total", "pipeline") == {"pdd": 3, "pd-wan": 1}


def test_reasons_without_end_are_one_label(gateway: Gateway) -> None:
    for number in range(100):
        gateway.answered(reason=f"reason {number}")
    reasons = gateway.scraped().by("pdd_gateway_routes_total", "reason")
    assert len(reasons) == 33
    assert reasons["other"] == 68


def test_the_gap_of_hits_can_be_computed_over_any_window(gateway: Gateway) -> None:
    """Tokens over tokens: a short prompt's ratio must not weigh as much as a long one's."""
    gateway.answered(1000, path=Path.DIRECT, prefill_hit_tokens=600, main_hit_tokens=500)
    gateway.answered(100, path=Path.DIRECT, prefill_hit_tokens=0, main_hit_tokens=64)
    gateway.answered(5000)  # no stages were found: nobody was asked for a hit
    samples = gateway.scraped()
    assert samples.total("pdd_gateway_hit_prompt_tokens_total") == 1100
    assert samples.by("pdd_gateway_hit_tokens_sum", "stage") == {"prefill": 600, "main_decode": 564}
    assert samples.total("pdd_gateway_hit_ratio_sum", stage="prefill") == pytest.approx(0.6)
    status = gateway_status("", samples)
    assert status.hit_gap == pytest.approx(36 / 1100)
    # Signed: one request in which Prefill held more, one in which MainDecode did.
    assert samples.total("pdd_gateway_hit_gap_ratio_bucket", le="0.0") == 1
    assert samples.total("pdd_gateway_hit_gap_ratio_bucket", le="0.1") == 2


@pytest.mark.parametrize(
    ("report", "measured_s"),
    [
        ({"prefill_done_ms": 500.0, "kv_ready_ms": 2000.0}, 1.5),
        ({"prefill_done_ms": 500.0, "kv_ready_ms": 400.0}, 0.0),
        ({"prefill_done_ms": 500.0}, None),
        ({"prefill_done_ms": 500.0, "kv_ready_ms": 9000.0, "attempts": 2}, None),
    ],
)
def test_exposed_wait_predicted_and_measured(
    gateway: Gateway, report: dict[str, Any], measured_s: float | None
) -> None:
    gateway.answered(path=Path.RELAYED, predicted_wait_ms=1200.0, **report)
    samples = gateway.scraped()
    assert samples.mean("pdd_gateway_exposed_wait_predicted_seconds") == pytest.approx(1.2)
    assert samples.mean("pdd_gateway_exposed_wait_measured_seconds") == measured_s


def test_bytes_tokens_by_stage_and_retries(gateway: Gateway) -> None:
    gateway.answered(
        path=Path.RELAYED,
        attempts=3,
        kv_fabric_bytes=1000,
        kv_wan_bytes=9000,
        prefill_tokens=1,
        relay_tokens=3,
        main_decode_tokens=6,
    )
    gateway.answered(path=Path.DIRECT, kv_wan_bytes=1, prefill_tokens=1, main_decode_tokens=9)
    samples = gateway.scraped()
    assert samples.by("pdd_gateway_request_kv_bytes_sum", "network") == {"fabric": 1000, "wan": 9001}
    assert samples.total("pdd_gateway_request_kv_bytes_bucket", network="fabric", le="0.0") == 1
    assert samples.by("pdd_gateway_output_tokens_total", "stage") == {"prefill": 2, "relay": 3, "main_decode": 15}
    assert samples.total("pdd_gateway_retries_total") == 2
