"""What the gateway counts and measures, in Prometheus' terms. Times are seconds on the gateway's clock."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.generation import Report

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MAX_REASONS = 32


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
        self._ttft = Histogram(
            "pdd_gateway_time_to_first_token_seconds", "Arrival to first token.", registry=registry, buckets=_LATENCY_S
        )
        self._t2 = Histogram(
            "pdd_gateway_time_to_second_token_seconds",
            "Arrival to second token.",
            registry=registry,
            buckets=_LATENCY_S,
        )
        self._gap = Histogram(
            "pdd_gateway_inter_token_latency_seconds", "Token to next token.", registry=registry, buckets=_GAP_S
        )
        self._e2e = Histogram(
            "pdd_gateway_e2e_request_latency_seconds",
            "Arrival to the end of the answer.",
            registry=registry,
            buckets=_LATENCY_S,
        )
        self._reasons: set[str] = set()

    def clock(self, arrived_s: float) -> TokenClock:
        """Start to time the tokens of a request that arrived at `arrived_s`."""
        return TokenClock(self._ttft, self._t2, self._gap, arrived_s)

    def observe_request(self, endpoint: str, status: int, finish: str) -> None:
        """Count a request when it is over."""
        self._requests.labels(endpoint, str(status), finish).inc()

    def observe_answer(self, report: Report, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """Count what an answered (or cut short) request took, and its route."""
        self._routes.labels(report.pipeline, report.path or "", self._bounded(report.reason)).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(output_tokens)
        self._e2e.observe(seconds)

    def _bounded(self, reason: str) -> str:
        """A label may not take values without end."""
        if len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"


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
