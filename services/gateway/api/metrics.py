"""What the gateway counts and measures, in Prometheus' terms. Times are seconds on the gateway's clock."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from pdd.telemetry.metrics import BYTES, LATENCY_S, RATIO, TOKENS, BoundedLabel
from pdd.types import Path, Role
from services.gateway.generation import Report

_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WAIT_S = (0, *LATENCY_S)
_HIT_GAP = (-1.0, -0.5, -0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class Metrics:
    """The API surface's metrics, in a registry of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.in_flight = Gauge("pdd_gateway_requests_in_flight", "Requests being answered.", registry=registry)
        self._requests = Counter(
            "pdd_gateway_requests",
            "Requests by HTTP status (499: the client left) and ending (stop, length, error, cancelled).",
            ("endpoint", "status", "finish"),
            registry=registry,
        )
        self._routes = Counter(
            "pdd_gateway_routes", "Answered requests by route.", ("pipeline", "path", "reason"), registry=registry
        )
        self._prompt_tokens = Counter("pdd_gateway_prompt_tokens", "Prompt tokens.", registry=registry)
        self._generation_tokens = Counter("pdd_gateway_generation_tokens", "Output tokens.", registry=registry)
        self._stage_tokens = Counter(
            "pdd_gateway_output_tokens", "Output tokens by the stage that sampled them.", ("stage",), registry=registry
        )
        self._retries = Counter("pdd_gateway_retries", "Attempts after a request's first.", registry=registry)
        self._hit_prompt_tokens = Counter(
            "pdd_gateway_hit_prompt_tokens", "Prompt tokens of the requests whose hits are counted.", registry=registry
        )
        self._hit_tokens = Histogram(
            "pdd_gateway_hit_tokens", "Hit length of a prompt.", ("stage",), registry=registry, buckets=TOKENS
        )
        self._hit_ratio = Histogram(
            "pdd_gateway_hit_ratio",
            "Hit length of a prompt over its length.",
            ("stage",),
            registry=registry,
            buckets=RATIO,
        )
        self._hit_gap = Histogram(
            "pdd_gateway_hit_gap_ratio",
            "Hit ratio at Prefill less the one at MainDecode.",
            registry=registry,
            buckets=_HIT_GAP,
        )
        self._predicted_wait = Histogram(
            "pdd_gateway_exposed_wait_predicted_seconds",
            "Exposed wait as the router predicted it.",
            ("path",),
            registry=registry,
            buckets=_WAIT_S,
        )
        self._measured_wait = Histogram(
            "pdd_gateway_exposed_wait_measured_seconds",
            "From the end of prefill until MainDecode had all KV; the relayed path hides it.",
            ("path",),
            registry=registry,
            buckets=_WAIT_S,
        )
        self._kv_bytes = Histogram(
            "pdd_gateway_request_kv_bytes",
            "KV bytes that a request moved.",
            ("network",),
            registry=registry,
            buckets=BYTES,
        )
        self._ttft = Histogram(
            "pdd_gateway_time_to_first_token_seconds", "Arrival to first token.", registry=registry, buckets=LATENCY_S
        )
        self._t2 = Histogram(
            "pdd_gateway_time_to_second_token_seconds",
            "Arrival to second token.",
            registry=registry,
            buckets=LATENCY_S,
        )
        self._gap = Histogram(
            "pdd_gateway_inter_token_latency_seconds", "Token to next token.", registry=registry, buckets=_GAP_S
        )
        self._e2e = Histogram(
            "pdd_gateway_e2e_request_latency_seconds",
            "Arrival to the end of the answer.",
            registry=registry,
            buckets=LATENCY_S,
        )
        self._reason = BoundedLabel()

    def clock(self, arrived_s: float) -> TokenClock:
        """Start to time the tokens of a request that arrived at `arrived_s`."""
        return TokenClock(self._ttft, self._t2, self._gap, arrived_s)

    def observe_request(self, endpoint: str, status: int, finish: str) -> None:
        """Count a request when it is over."""
        self._requests.labels(endpoint, str(status), finish).inc()

    def observe_answer(self, report: Report, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """Count what an answered (or cut short) request took, and its route."""
        self._routes.labels(report.pipeline, report.path or "", self._reason(report.reason)).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(output_tokens)
        self._e2e.observe(seconds)
        self._retries.inc(report.attempts - 1)
        for stage, tokens in (
            (Role.PREFILL, report.prefill_tokens),
            (Role.RELAY, report.relay_tokens),
            (Role.MAIN_DECODE, report.main_decode_tokens),
        ):
            self._stage_tokens.labels(stage.value).inc(tokens)
        if report.path is not None:
            self._observe_hits(report, prompt_tokens)
            self._observe_transfer(report, report.path)

    def _observe_hits(self, report: Report, prompt_tokens: int) -> None:
        """Of both stages or of neither, so that their sums are of the same requests."""
        self._hit_prompt_tokens.inc(prompt_tokens)
        ratios: list[float] = []
        for stage, tokens in (
            (Role.PREFILL, report.prefill_hit_tokens),
            (Role.MAIN_DECODE, report.main_hit_tokens),
        ):
            ratios.append(tokens / max(prompt_tokens, 1))
            self._hit_tokens.labels(stage.value).observe(tokens)
            self._hit_ratio.labels(stage.value).observe(ratios[-1])
        self._hit_gap.observe(ratios[0] - ratios[1])

    def _observe_transfer(self, report: Report, path: Path) -> None:
        if report.predicted_wait_ms is not None:
            self._predicted_wait.labels(path).observe(report.predicted_wait_ms / 1e3)
        if report.exposed_wait_ms is not None:
            self._measured_wait.labels(path).observe(report.exposed_wait_ms / 1e3)
        self._kv_bytes.labels("fabric").observe(report.kv_fabric_bytes)
        self._kv_bytes.labels("wan").observe(report.kv_wan_bytes)


class TokenClock:
    """Observes TTFT, T2 and gaps of one request. Tokens that come together count as no gap between them."""

    def __init__(self, ttft: Histogram, t2: Histogram, gap: Histogram, arrived_s: float) -> None:
        self._ttft, self._t2, self._gap = ttft, t2, gap
        self._arrived_s = arrived_s
        self._last_s = arrived_s
        self._tokens = 0

    def tick(self, tokens: int, now_s: float) -> None:
        """`tokens` more tokens have come at `now_s`."""
        for _ in range(tokens):
            self._tokens += 1
            if self._tokens == 1:
                self._ttft.observe(now_s - self._arrived_s)
            else:
                self._gap.observe(now_s - self._last_s)
            if self._tokens == 2:
                self._t2.observe(now_s - self._arrived_s)
            self._last_s = now_s
