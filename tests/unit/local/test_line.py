"""The bottleneck as arithmetic: rate, order and bound hold whatever arrives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.local.line import Bottleneck, LineSpec

lines = st.builds(
    LineSpec,
    mbps=st.floats(1, 1000),
    delay_ms=st.floats(0, 50),
    jitter_ms=st.floats(0, 10),
)
chunks = st.lists(st.tuples(st.integers(1, 32 << 10), st.floats(0, 0.01)), min_size=1, max_size=200)


@given(lines, chunks)
def test_never_faster_than_its_rate_and_never_out_of_order(line: LineSpec, chunks: list[tuple[int, float]]) -> None:
    bottleneck = Bottleneck(line)
    now, arrives, sent_bytes = 100.0, 0.0, 0
    earliest_delay = max(0.0, line.delay_ms - line.jitter_ms) / 1e3
    for size, pause in chunks:
        now += pause + bottleneck.wait(now + pause, size)
        previous, arrives = arrives, bottleneck.send(now, size, arrives)
        sent_bytes += size
        assert arrives >= previous
        assert arrives >= 100.0 + sent_bytes / line.bytes_per_s + earliest_delay - 1e-6


@given(lines, chunks)
def test_the_queue_never_holds_more_than_its_bound(line: LineSpec, chunks: list[tuple[int, float]]) -> None:
    bottleneck = Bottleneck(line)
    now, free_at = 100.0, 100.0
    for size, pause in chunks:
        now += pause + bottleneck.wait(now + pause, size)
        bottleneck.send(now, size, 0.0)
        free_at = max(now, free_at) + size / line.bytes_per_s
        assert (free_at - now) * line.bytes_per_s <= line.queue_bytes + 1


def test_a_busy_line_loses_no_time() -> None:
    line = LineSpec(mbps=80, delay_ms=10)  # 10 MB/s
    bottleneck = Bottleneck(line)
    now, last = 100.0, 0.0
    for _ in range(1000):
        now += bottleneck.wait(now, 10_000)
        last = bottleneck.send(now, 10_000, last)
    assert last == pytest.approx(100.0 + 1.0 + 0.010)


def test_an_idle_line_saves_nothing_up() -> None:
    bottleneck = Bottleneck(LineSpec(mbps=80, delay_ms=10))
    assert bottleneck.send(100.0, 10_000, 0.0) == pytest.approx(100.011)
    assert bottleneck.send(200.0, 10_000, 0.0) == pytest.approx(200.011)


def test_the_queue_is_one_bandwidth_delay_product_but_never_tiny() -> None:
    assert LineSpec(mbps=100, delay_ms=15).queue_bytes == 187_500
    assert LineSpec(mbps=10, delay_ms=1).queue_bytes == 64 << 10
    with pytest.raises(ValueError, match="rate above 0"):
        LineSpec(mbps=0, delay_ms=1)
