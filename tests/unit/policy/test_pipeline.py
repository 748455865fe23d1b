"""The path of a request, and the wait that decides it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.pipeline import Line, Transfer, choose_path, exposed_wait_s
from pdd.types import Path, Pipeline

LINE = Line(backlog_bytes=0, goodput_bytes_per_s=10e6, delay_s=0.015)


def test_exposed_wait_is_what_prefill_does_not_cover() -> None:
    transfer = Transfer(delta_bytes=100_000_000, last_chunk_bytes=10_000_000, remaining_compute_s=4.0)
    assert exposed_wait_s(LINE, transfer) == pytest.approx(10.0 - 4.0 + 0.015)


def test_the_last_chunk_is_always_exposed() -> None:
    transfer = Transfer(delta_bytes=100_000_000, last_chunk_bytes=10_000_000, remaining_compute_s=60.0)
    assert exposed_wait_s(LINE, transfer) == pytest.approx(1.0 + 0.015)


def test_nothing_to_send_is_no_wait() -> None:
    busy = Line(backlog_bytes=10**9, goodput_bytes_per_s=1.0, delay_s=1.0)
    assert exposed_wait_s(busy, Transfer(0, 0, 0.0)) == 0.0


@pytest.mark.parametrize(
    ("pipeline", "delta", "relay", "path", "reason"),
    [
        (Pipeline.PDD, 1_000_000, True, Path.DIRECT, "wait_within_budget"),
        (Pipeline.PDD, 100_000_000, True, Path.RELAYED, "wait_exceeds_budget"),
        (Pipeline.PDD, 100_000_000, False, Path.DIRECT, "relay_full"),
        (Pipeline.PD_WAN, 100_000_000, True, Path.DIRECT, "forced_pd-wan"),
        (Pipeline.PD_LOCAL, 100_000_000, True, Path.DIRECT, "forced_pd-local"),
    ],
)
def test_choice(pipeline: Pipeline, delta: int, relay: bool, path: Path, reason: str) -> None:
    decision = choose_path(pipeline, LINE, Transfer(delta, 0, 0.0), budget_s=0.3, relay_available=relay)
    assert (decision.path, decision.reason) == (path, reason)


@given(
    backlog=st.integers(0, 10**9),
    delta=st.integers(1, 10**9),
    compute=st.floats(0, 100),
    more=st.integers(1, 10**9),
)
def test_more_backlog_never_shortens_the_wait(backlog: int, delta: int, compute: float, more: int) -> None:
    transfer = Transfer(delta, min(delta, 1000), compute)
    ahead = Line(backlog + more, LINE.goodput_bytes_per_s, LINE.delay_s)
    assert exposed_wait_s(ahead, transfer) >= exposed_wait_s(Line(backlog, 10e6, 0.015), transfer)
