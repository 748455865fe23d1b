"""What `pdd status` knows of a running mesh: its gateway, its cache and its instances."""

from __future__ import annotations

import msgspec

from pdd.local.instances import Instance, mesh_report
from pdd.local.scrape import Samples, scrape
from pdd.local.state import RunState


class GatewayStatus(msgspec.Struct, frozen=True):
    """Sums since the gateway's start; None where nothing was measured yet.

    `routes` are answered requests by path, then by the reason for it. Hit ratios are tokens over tokens, of the same
    requests at both stages. Waits are means in seconds.
    """

    url: str
    in_flight: int
    waiting: int
    retries: int
    stale_messages: int
    routes: dict[str, dict[str, int]]
    output_tokens: dict[str, int]
    prefill_hit_ratio: float | None
    main_hit_ratio: float | None
    exposed_wait_predicted_s: float | None
    exposed_wait_measured_s: float | None

    @property
    def hit_gap(self) -> float | None:
        """How much more of its prompts Prefill held than MainDecode did, as a share of all prompt tokens."""
        if self.prefill_hit_ratio is None or self.main_hit_ratio is None:
            return None
        return self.prefill_hit_ratio - self.main_hit_ratio


class CacheStatus(msgspec.Struct, frozen=True):
    """`up`: the gateway was answered last time. Sums since the cache's start; look-ups by outcome."""

    up: bool
    metrics_port: int
    lookups: dict[str, int]
    kv_events: dict[str, int]


class MeshStatus(msgspec.Struct, frozen=True):
    """The whole mesh. `ended` are names of processes that are gone and that nothing starts again."""

    gateway: GatewayStatus
    cache: CacheStatus
    instances: list[Instance]
    ended: list[str]


def mesh_status(state: RunState) -> MeshStatus | None:
    """Ask gateway and cache; None if the gateway does not answer."""
    report = mesh_report(state.gateway_url)
    gateway = scrape(f"{state.gateway_url}/metrics")
    if report is None or gateway is None:
        return None
    cache = scrape(f"http://127.0.0.1:{state.cache_metrics}/metrics") if state.cache_metrics else None
    return MeshStatus(
        gateway_status(state.gateway_url, gateway),
        _cache_status(report.cache == "up", state.cache_metrics, cache or Samples("")),
        report.instances,
        state.ended,
    )


def gateway_status(url: str, samples: Samples) -> GatewayStatus:
    """Figures of the gateway at `url`, from its metrics."""
    routes = {
        path: _counts(samples.by("pdd_gateway_routes_total", "reason", path=path))
        for path in samples.by("pdd_gateway_routes_total", "path")
    }
    asked = samples.total("pdd_gateway_hit_prompt_tokens_total")
    hits = samples.by("pdd_gateway_hit_tokens_sum", "stage")
    return GatewayStatus(
        url=url,
        in_flight=int(samples.total("pdd_gateway_requests_in_flight")),
        waiting=int(samples.total("pdd_gateway_requests_waiting")),
        retries=int(samples.total("pdd_gateway_retries_total")),
        stale_messages=int(
            samples.total("pdd_gateway_stale_messages_total") + samples.total("pdd_gateway_dropped_token_events_total")
        ),
        routes=routes,
        output_tokens=_counts(samples.by("pdd_gateway_output_tokens_total", "stage")),
        prefill_hit_ratio=hits.get("prefill", 0) / asked if asked else None,
        main_hit_ratio=hits.get("main_decode", 0) / asked if asked else None,
        exposed_wait_predicted_s=samples.mean("pdd_gateway_exposed_wait_predicted_seconds"),
        exposed_wait_measured_s=samples.mean("pdd_gateway_exposed_wait_measured_seconds"),
    )


def _cache_status(up: bool, port: int, samples: Samples) -> CacheStatus:
    return CacheStatus(
        up,
        port,
        _counts(samples.by("pdd_cache_lookups_total", "outcome")),
        _counts(samples.by("pdd_cache_kv_events_total", "outcome")),
    )


def _counts(sums: dict[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in sums.items()}
