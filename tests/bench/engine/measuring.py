"""Clocks and what they said."""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.engine.settings import ROUNDS

Probe = Callable[[], float]
"""Does its work once and says how many seconds it took."""


@dataclass(frozen=True)
class Figure:
    """Milliseconds over the rounds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ms ({self.least:.1f} to {self.most:.1f})"


def in_turn(probes: Mapping[str, Probe], rounds: int = ROUNDS) -> dict[str, Figure]:
    """Every probe once to warm up, then all of them in turn, round by round."""
    for probe in probes.values():
        probe()
    took: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(rounds):
        for name, probe in probes.items():
            took[name].append(probe() * 1e3)
    return {name: Figure(statistics.median(all_), min(all_), max(all_)) for name, all_ in took.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def processor() -> str:
    """The CPU's name as Linux has it."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()
