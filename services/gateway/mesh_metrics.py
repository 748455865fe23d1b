"""What the gateway knows of its requests and of the mesh, read whenever it is scraped (on the event loop)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdd.types import Role
from services.gateway.coordinator import Coordinator

_STAGES = (Role.PREFILL, Role.RELAY, Role.MAIN_DECODE)


class MeshCollector(Collector):
    """Figures of a coordinator and of what it listens to."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        coordinator = self._coordinator
        yield GaugeMetricFamily(
            "pdd_gateway_requests_waiting",
            "Requests that wait for a stage with room.",
            coordinator.waiting,
        )
        yield CounterMetricFamily(
            "pdd_gateway_stale_messages", "Messages of attempts that were over: dropped.", coordinator.stale_messages
        )
        yield CounterMetricFamily(
            "pdd_gateway_dropped_token_events",
            "Token events of live requests that were late, repeated or of another text: dropped.",
            coordinator.dropped_tokens,
        )
        yield CounterMetricFamily(
            "pdd_gateway_dropped_messages",
            "NATS messages that came faster than the gateway read them: dropped; missing tokens are asked for again.",
            coordinator.bus.dropped,
        )
        instances = GaugeMetricFamily("pdd_gateway_live_instances", "Live stages, by role.", labels=("role",))
        for role in _STAGES:
            instances.add_metric((role.value,), len(coordinator.registry.live(role)))
        yield instances
        yield GaugeMetricFamily(
            "pdd_gateway_cache_up", "Whether the cache service answered last time.", coordinator.prefixes.reachable
        )
