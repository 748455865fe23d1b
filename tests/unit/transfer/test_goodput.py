"""The meter gives the line's rate, not the round trip's or the pauses'."""

import pytest

from pdd.transfer.goodput import HORIZON_S, GoodputMeter


def busy(meter: GoodputMeter, begin_s: float, rate: float, seconds: float) -> float:
    """Acknowledge 1 kB at a time for `seconds`; returns the end."""
    size = 1000
    for number in range(int(seconds * rate / size) + 1):
        meter.acked(begin_s + number * size / rate, size)
    meter.idle()
    return begin_s + seconds


def test_nothing_before_a_measurement() -> None:
    meter = GoodputMeter()
    assert meter.bytes_per_s is None
    meter.acked(1.0, 1000)
    meter.idle()
    assert meter.bytes_per_s is None


def test_pauses_do_not_count() -> None:
    meter = GoodputMeter()
    now_s = 0.0
    for _ in range(4):
        now_s = busy(meter, now_s + 0.7, rate=50_000, seconds=0.2)
    assert meter.bytes_per_s == pytest.approx(50_000)


def test_the_last_seconds_count_and_the_last_value_stays() -> None:
    meter = GoodputMeter()
    now_s = busy(meter, 0.0, rate=10_000, seconds=3)
    now_s = busy(meter, now_s + HORIZON_S, rate=80_000, seconds=1)
    assert meter.bytes_per_s == pytest.approx(80_000)
    meter.acked(now_s + 100, 1)
    assert meter.bytes_per_s == pytest.approx(80_000)
