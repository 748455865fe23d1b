"""How fast a line carries KV, measured from acknowledgements while bytes are under way."""

from __future__ import annotations

from collections import deque

HORIZON_S = 5.0
MIN_MEASURED_S = 0.05


class GoodputMeter:
    """Acknowledged bytes per second over the last seconds in which the line was busy.

    The clock runs from the first acknowledgement of a busy period, whose bytes do not count: so the round trip and
    pauses between transfers are left out, and what remains is the rate of the line.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, int]] = deque()  # (end, span in seconds, bytes)
        self._span_s = 0.0
        self._bytes = 0
        self._last_ack_s: float | None = None
        self._rate: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """The last measurement, or None before any."""
        return self._rate

    def acked(self, now_s: float, size_bytes: int) -> None:
        """`size_bytes` were acknowledged at `now_s` (any monotonic clock)."""
        if self._last_ack_s is not None:
            self._add(now_s, now_s - self._last_ack_s, size_bytes)
            if self._span_s >= MIN_MEASURED_S:
                self._rate = self._bytes / self._span_s
        self._last_ack_s = now_s

    def idle(self) -> None:
        """Nothing is under way any more; the clock stops."""
        self._last_ack_s = None

    def _add(self, end_s: float, span_s: float, size_bytes: int) -> None:
        self._samples.append((end_s, span_s, size_bytes))
        self._span_s += span_s
        self._bytes += size_bytes
        while self._samples[0][0] < end_s - HORIZON_S:
            _, old_span_s, old_bytes = self._samples.popleft()
            self._span_s -= old_span_s
            self._bytes -= old_bytes
