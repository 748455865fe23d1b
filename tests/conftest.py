"""Rules for the whole suite."""

from __future__ import annotations

import os
import signal
from types import FrameType

import pytest

# NIXL reads this before its first agent is made; there is no RDMA where tests run.
os.environ.setdefault("UCX_TLS", "tcp,self")


def pytest_configure() -> None:
    """A suite that is told to end tears its servers down like one that ends by itself."""

    def terminate(number: int, frame: FrameType | None) -> None:
        pytest.exit(f"ended by {signal.Signals(number).name}")

    signal.signal(signal.SIGTERM, terminate)
    # A suite that a shell started in the background ignores Ctrl-C, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
