"""One direction of an emulated line, as arithmetic: when a chunk may enter the queue, when it arrives.

The bottleneck is a schedule, not a process: it keeps the absolute time at which the line has sent everything that was
admitted. No error adds up, and a late wake-up costs nothing while the queue holds something to send. Knows no socket
and no clock; times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import random

import msgspec

MIN_QUEUE_BYTES = 64 << 10
MIN_QUEUE_S = 0.004
"""Below this much line time the queue would run dry between two wake-ups of the event loop (timers tick each ms)."""


class LineSpec(msgspec.Struct, frozen=True):
    """A line, alike in both directions: rate in Mbit/s of payload, one-way delay and its jitter (+-) in ms."""

    mbps: float
    delay_ms: float
    jitter_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.mbps <= 0 or self.delay_ms < 0 or self.jitter_ms < 0:
            raise ValueError("a line needs a rate above 0, and a delay and jitter of at least 0")

    @property
    def bytes_per_s(self) -> float:
        """Rate in bytes a second."""
        return self.mbps * 1e6 / 8

    @property
    def flight_bytes(self) -> int:
        """The bandwidth-delay product: what is under way on a busy line, one way."""
        return int(self.bytes_per_s * (self.delay_ms + self.jitter_ms) / 1e3)

    @property
    def queue_bytes(self) -> int:
        """Bound of the bottleneck queue: one bandwidth-delay product, but enough to keep the line busy."""
        product = self.bytes_per_s * self.delay_ms / 1e3
        return int(max(product, MIN_QUEUE_BYTES, self.bytes_per_s * MIN_QUEUE_S))


class Bottleneck:
    """The one queue of a direction, shared by all its connections."""

    def __init__(self, spec: LineSpec, seed: int = 0) -> None:
        self._spec = spec
        self._queue_s = spec.queue_bytes / spec.bytes_per_s
        self._free_at = 0.0
        self._random = random.Random(seed)

    def wait(self, now: float, size: int) -> float:
        """Seconds until the queue has room for `size` bytes; 0 if it has. An empty queue takes any chunk."""
        backlog = self._free_at - now
        if backlog <= 0:
            return 0.0
        return max(0.0, backlog + size / self._spec.bytes_per_s - self._queue_s)

    def send(self, now: float, size: int, not_before: float) -> float:
        """Put `size` bytes into the queue and return when they arrive at the far end.

        `not_before` is the arrival of the same connection's previous chunk: jitter never changes an order.
        """
        self._free_at = max(now, self._free_at) + size / self._spec.bytes_per_s
        jitter = self._random.uniform(-1.0, 1.0) * self._spec.jitter_ms
        return max(not_before, self._free_at + max(0.0, self._spec.delay_ms + jitter) / 1e3)

    def hold(self, until: float) -> None:
        """Send nothing before `until`: the line was down."""
        self._free_at = max(self._free_at, until)
