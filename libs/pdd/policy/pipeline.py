"""Which way a request goes: straight to MainDecode, or through RelayDecode while its KV crosses the WAN.

Pure functions of a snapshot. The gateway decides on MainDecode's exact hit; Prefill decides again when it has the
first token and knows what is left on the line.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdd.types import Path, Pipeline


@dataclass(frozen=True)
class Line:
    """The directed line to MainDecode: bytes queued ahead of this request, goodput and one-way delay."""

    backlog_bytes: int
    goodput_bytes_per_s: float
    delay_s: float


@dataclass(frozen=True)
class Transfer:
    """One request's KV for MainDecode: bytes that have to cross, those of the last prefill chunk, and how long
    Prefill will still compute (transfer of earlier chunks overlaps with that)."""

    delta_bytes: int
    last_chunk_bytes: int
    remaining_compute_s: float


@dataclass(frozen=True)
class Decision:
    """A path, why (a short constant, fit for a metric's label) and the exposed wait that was predicted (s)."""

    path: Path
    reason: str
    exposed_wait_s: float


def exposed_wait_s(line: Line, transfer: Transfer) -> float:
    """Predict how long MainDecode's KV arrives after Prefill's last chunk (s).

    The line works while Prefill computes, but the last chunk's KV leaves only when it exists.
    """
    if transfer.delta_bytes == 0:
        return 0.0
    crossing_s = (line.backlog_bytes + transfer.delta_bytes) / line.goodput_bytes_per_s
    last_chunk_s = transfer.last_chunk_bytes / line.goodput_bytes_per_s
    return max(crossing_s - transfer.remaining_compute_s, last_chunk_s) + line.delay_s


def choose_path(
    pipeline: Pipeline, line: Line, transfer: Transfer, *, budget_s: float, relay_available: bool
) -> Decision:
    """Choose the path of one request. Only `Pipeline.PDD` leaves a choice."""
    wait_s = exposed_wait_s(line, transfer)
    if pipeline is not Pipeline.PDD:
        return Decision(Path.DIRECT, f"forced_{pipeline.value}", wait_s)
    if wait_s <= budget_s:
        return Decision(Path.DIRECT, "wait_within_budget", wait_s)
    if not relay_available:
        return Decision(Path.DIRECT, "relay_full", wait_s)
    return Decision(Path.RELAYED, "wait_exceeds_budget", wait_s)
