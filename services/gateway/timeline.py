"""What happened to a request, and when, on the gateway's clock: fills a `Report` from progress and arriving tokens."""

from __future__ import annotations

from collections.abc import Callable

from pdd.mesh.messages import Phase, Progress
from pdd.types import Peer, Role
from services.gateway.generation import Report

_STALL_TOKENS = 32


class Timeline:
    """Keeps `report` true. `now` is a monotonic clock in seconds; the request arrived `waited_s` ago."""

    def __init__(self, report: Report, now: Callable[[], float], waited_s: float = 0.0) -> None:
        self.report = report
        self._now = now
        self._arrived = now() - waited_s
        self._last_token_ms: float | None = None
        self._tokens = 0

    def elapsed_ms(self) -> float:
        """Milliseconds since the request arrived."""
        return (self._now() - self._arrived) * 1e3

    def progressed(self, progress: Progress, prefill: Peer) -> None:
        """A stage said where the attempt stands."""
        report, now_ms = self.report, self.elapsed_ms()
        match progress.by.role, progress.phase:
            case Role.PREFILL, Phase.PREFILL_STARTED:
                report.prefill_started_ms = now_ms
                if report.attempts == 1:
                    report.prefill_hit_tokens = progress.tokens
            case Role.PREFILL, Phase.PREFILL_DONE:
                report.prefill_done_ms = report.prefill_done_ms or now_ms
            case Role.RELAY, Phase.KV_READY:
                report.kv_relay_ready_ms = now_ms
            case Role.MAIN_DECODE, Phase.KV_READY:
                report.kv_ready_ms = now_ms
            case Role.MAIN_DECODE, Phase.HANDED_OVER:
                report.handoff_ms = now_ms
            case _:
                pass
        if progress.path is not None:
            report.path, report.reason = progress.path, progress.reason
        if progress.received_bytes and progress.phase is Phase.KV_READY:
            if progress.by.dc == prefill.dc:
                report.kv_fabric_bytes += progress.received_bytes
            else:
                report.kv_wan_bytes += progress.received_bytes
        report.recomputed_prompt_tokens = max(report.recomputed_prompt_tokens, progress.recomputed_prompt_tokens)

    def emitted(self, count: int, by: Role) -> None:
        """`count` tokens were emitted at once, sampled (or replayed) by a stage of role `by`."""
        for _ in range(count):
            self._one_token(by, self.elapsed_ms())

    def ended(self) -> None:
        """The answer is complete."""
        self.report.total_ms = self.elapsed_ms()

    def _one_token(self, by: Role, now_ms: float) -> None:
        report = self.report
        gap = None if self._last_token_ms is None else now_ms - self._last_token_ms
        if by is Role.MAIN_DECODE and report.main_decode_tokens == 0:
            report.handoff_position = self._tokens
            report.handoff_gap_ms = gap
        self._tokens += 1
        self._last_token_ms = now_ms
        match by:
            case Role.PREFILL:
                report.prefill_tokens += 1
            case Role.RELAY:
                report.relay_tokens += 1
            case _:
                report.main_decode_tokens += 1
        match self._tokens:
            case 1:
                report.ttft_ms = now_ms
            case 2:
                report.t2_ms = now_ms
            case 16:
                report.t16_ms = now_ms
            case _:
                pass
        if gap is None:
            return
        if gap > (report.largest_gap_ms or 0.0):
            report.largest_gap_ms, report.largest_gap_at = gap, self._tokens
        if self._tokens <= _STALL_TOKENS:
            report.stall_ms = max(report.stall_ms or 0.0, gap)
