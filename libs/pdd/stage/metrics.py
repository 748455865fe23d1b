"""What a stage counts and measures, in Prometheus' terms, and the sums of it that its beat carries.

Written on the event loop, read by scrapes on another thread. What the engine and the stage know anyway is not counted
twice: it is shown as the last beat said it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdd.engine.engine import StepResult
from pdd.mesh.messages import Load
from pdd.telemetry.metrics import LATENCY_S, RATIO, TOKENS

Network = Literal["wan", "fabric"]
"""What KV crossed: the line between datacenters, or the fabric inside one."""

Direction = Literal["sent", "received"]

HandoffOutcome = Literal["accepted", "refused", "withdrawn", "failed", "taken_over", "declined"]
"""Of the side that hands over: `accepted`, `refused` by the other side, `withdrawn` after silence, `failed` for good.
Of the side that is handed to: `taken_over` or `declined`."""

_SMOOTHING = 0.2
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_BYTES_PER_S = (1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)


class StageMetrics:
    """See the module. `registry` None: nothing is shown, only the sums are kept."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        self.prompt_tokens_seen = 0
        """Prompt tokens for which a prefix was looked up."""
        self.hit_tokens = 0
        """Those of them whose KV was here already."""
        self.transferred_bytes: dict[Network, int] = {"wan": 0, "fabric": 0}
        """KV bytes sent and received."""
        self.batch_sequences = 0.0
        """Sequences per step, smoothed over the last steps."""
        self._last_beat = _LastBeat()
        if registry is not None:
            registry.register(self._last_beat)
        self._step_seconds = Histogram(
            "pdd_stage_step_seconds", "Compute time of an engine step.", registry=registry, buckets=_STEP_S
        )
        self._step_sequences = Histogram(
            "pdd_stage_step_sequences", "Sequences in a step's batch.", registry=registry, buckets=_STEP_SEQUENCES
        )
        self._step_tokens = Histogram(
            "pdd_stage_step_tokens", "Tokens that one step computed.", registry=registry, buckets=_STEP_TOKENS
        )
        self._scheduled = Counter(
            "pdd_stage_scheduled_tokens",
            "Tokens computed, by what for: decode (a sequence's newest token alone) or prefill (all else).",
            ("kind",),
            registry=registry,
        )
        self._preemptions = Counter(
            "pdd_stage_preemptions", "Sequences that gave their blocks up to older ones.", registry=registry
        )
        self._queries = Counter(
            "pdd_stage_prefix_query_tokens", "Prompt tokens for which a prefix was looked up.", registry=registry
        )
        self._hits = Counter(
            "pdd_stage_prefix_hit_tokens", "Prompt tokens whose KV was here already.", registry=registry
        )
        self._hit_length = Histogram(
            "pdd_stage_prefix_hit_length_tokens", "Hit length of a prompt.", registry=registry, buckets=TOKENS
        )
        self._hit_ratio = Histogram(
            "pdd_stage_prefix_hit_ratio", "Hit length of a prompt over its length.", registry=registry, buckets=RATIO
        )
        crossed = ("network", "direction")
        self._kv_bytes = Counter("pdd_stage_kv_bytes", "KV bytes of ended transfers.", crossed, registry=registry)
        self._kv_seconds = Histogram(
            "pdd_stage_kv_transfer_seconds",
            "Length of a KV transfer, at its sender.",
            ("network",),
            registry=registry,
            buckets=LATENCY_S,
        )
        self._kv_goodput = Histogram(
            "pdd_stage_kv_transfer_bytes_per_second",
            "Goodput of a KV transfer, at its sender.",
            ("network",),
            registry=registry,
            buckets=_BYTES_PER_S,
        )
        self._handoffs = Counter(
            "pdd_stage_handoffs", "Hand-overs of the stream, by how they ended.", ("outcome",), registry=registry
        )
        self._handoff_tokens = Histogram(
            "pdd_stage_handoff_tokens",
            "Output tokens that existed at a hand-over.",
            ("outcome",),
            registry=registry,
            buckets=TOKENS,
        )

    def step(self, result: StepResult) -> None:
        """The engine did a step."""
        self._step_seconds.observe(result.duration_s)
        self._step_sequences.observe(result.sequences)
        self._step_tokens.observe(result.scheduled_tokens)
        self._scheduled.labels("decode").inc(result.decodes)
        self._scheduled.labels("prefill").inc(result.scheduled_tokens - result.decodes)
        self._preemptions.inc(result.preempted)
        old = self.batch_sequences
        self.batch_sequences = result.sequences if not old else old + _SMOOTHING * (result.sequences - old)

    def hit(self, prompt_tokens: int, hit_tokens: int) -> None:
        """`hit_tokens` leading tokens of a prompt had their KV here when the request came (never: from a transfer)."""
        self.prompt_tokens_seen += prompt_tokens
        self.hit_tokens += hit_tokens
        self._queries.inc(prompt_tokens)
        self._hits.inc(hit_tokens)
        self._hit_length.observe(hit_tokens)
        self._hit_ratio.observe(hit_tokens / max(prompt_tokens, 1))

    def transfer(self, network: Network, direction: Direction, size_bytes: int, seconds: float) -> None:
        """A KV transfer ended that moved `size_bytes` in `seconds`, from its first byte's departure to the end.

        Only who sends knows that length: a receiver sees a small transfer come all at once.
        """
        self.transferred_bytes[network] += size_bytes
        self._kv_bytes.labels(network, direction).inc(size_bytes)
        if direction == "sent" and size_bytes and seconds > 0:
            self._kv_seconds.labels(network).observe(seconds)
            self._kv_goodput.labels(network).observe(size_bytes / seconds)

    def handoff(self, outcome: HandoffOutcome, tokens: int) -> None:
        """A hand-over ended, with so many output tokens in it."""
        self._handoffs.labels(outcome).inc()
        self._handoff_tokens.labels(outcome).observe(tokens)

    def beat(self, load: Load) -> None:
        """The stage said this of itself: scrapes show it until the next time."""
        self._last_beat.load = load


Figure = tuple[str, str, Callable[[Load], float | None]]

_GAUGES: tuple[Figure, ...] = (
    ("pdd_stage_running_sequences", "Sequences with something to compute.", lambda load: load.running),
    ("pdd_stage_waiting_sequences", "Sequences that are not admitted yet.", lambda load: load.waiting),
    ("pdd_stage_reserved_sequences", "Reservations whose sequence has not begun.", lambda load: load.reserved),
    ("pdd_stage_seats", "Sequences that may run at once.", lambda load: load.seats),
    ("pdd_stage_prefill_tokens_per_second", "Rate of pure prefill steps.", lambda load: load.prefill_tokens_per_s),
    ("pdd_stage_decode_step_seconds", "Length of pure decode steps.", lambda load: load.itl_s),
    ("pdd_stage_wan_backlog_bytes", "KV bytes queued for the WAN.", lambda load: load.wan_backlog_bytes),
    (
        "pdd_stage_wan_goodput_bytes_per_second",
        "Rate of the WAN as measured; absent before the first measurement.",
        lambda load: load.wan_goodput_bytes_per_s,
    ),
    ("pdd_stage_wan_round_trip_seconds", "Round trip over the WAN, as measured.", lambda load: load.wan_rtt_s),
)

_COUNTERS: tuple[Figure, ...] = (
    ("pdd_stage_steps", "Engine steps.", lambda load: load.steps),
    ("pdd_stage_prompt_tokens", "Prompt tokens computed.", lambda load: load.prompt_tokens),
    ("pdd_stage_output_tokens", "Output tokens sampled.", lambda load: load.output_tokens),
    (
        "pdd_stage_recomputed_prompt_tokens",
        "Prompt tokens that a decode stage had to compute.",
        lambda load: load.recomputed_prompt_tokens,
    ),
    ("pdd_stage_stale_messages", "Messages of attempts that were over: dropped.", lambda load: load.stale_messages),
    ("pdd_stage_pace_overruns", "Steps that took longer than their pace.", lambda load: load.pace_overruns),
)


class _LastBeat(Collector):
    """Shows what the last beat said; nothing before the first."""

    def __init__(self) -> None:
        self.load: Load | None = None

    def collect(self) -> Iterator[Metric]:
        load = self.load
        if load is None:
            return
        for name, meaning, read in _GAUGES:
            if (value := read(load)) is not None:
                yield GaugeMetricFamily(name, meaning, value)
        for name, meaning, read in _COUNTERS:
            yield CounterMetricFamily(name, meaning, read(load))
        blocks = GaugeMetricFamily(
            "pdd_stage_kv_blocks",
            "Blocks of the KV pool: in use, cached (not in use, evicted when room is needed) or free.",
            labels=("state",),
        )
        blocks.add_metric(("used",), load.total_blocks - load.free_blocks - load.evictable_blocks)
        blocks.add_metric(("cached",), load.evictable_blocks)
        blocks.add_metric(("free",), load.free_blocks)
        yield blocks
