"""`pdd status` on a terminal: a table of the instances, and lines about gateway and cache.

An instance is a row where 100 columns are there or nobody looks at a screen, else a column.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdd.local.instances import Instance
from pdd.local.status import CacheStatus, GatewayStatus, MeshStatus

_NOTHING = "-"
_WIDE = 100
_NAMES = ("dc", "role", "name")
_FIGURES = ("running", "wait", "held", "batch", "pool", "cached", "hit", "tokens", "wan", "fabric", "goodput")
_LEGEND = (
    "held: reservations; batch: sequences per step; pool: KV blocks in use; cached: kept for later",
    "hit: prompt tokens whose KV was here; tokens: sampled here; wan, fabric: KV sent and received",
)


def show(console: Console, status: MeshStatus) -> None:
    """Print it."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDE)
    console.print(Group(*_parts(status, wide=console.width >= _WIDE)))


def _parts(status: MeshStatus, *, wide: bool) -> Iterable[RenderableType]:
    yield Text(f"Mesh at {status.gateway.url}")
    yield (_rows if wide else _columns)(status.instances)
    if status.ended:
        yield Text(f"ended, and not started again: {', '.join(status.ended)}", style="red")
    yield Text("\n".join(_LEGEND), style="dim")
    yield _facts(status)


def _rows(instances: Iterable[Instance]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for heading in _NAMES:
        table.add_column(heading, no_wrap=True)
    for heading in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in instances:
        table.add_row(*_cells(one))
    return table


def _columns(instances: Iterable[Instance]) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1), show_header=False)
    table.add_column()
    for cells in zip((*_NAMES, *_FIGURES), *(_cells(one) for one in instances), strict=True):
        table.add_row(*cells)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _cells(one: Instance) -> Iterable[str]:
    load = one.load
    yield from (one.dc, one.role, one.instance)
    yield f"{load.running}/{load.seats}"
    yield from (str(load.waiting), str(load.reserved))
    yield f"{load.batch_sequences:.1f}" if load.steps else _NOTHING
    yield _share((load.total_blocks - load.free_blocks - load.evictable_blocks) / max(load.total_blocks, 1))
    yield _share(load.evictable_blocks / max(load.total_blocks, 1))
    yield _share(load.hit_tokens / load.prompt_tokens_seen if load.prompt_tokens_seen else None)
    yield str(load.output_tokens)
    yield _size(load.wan_bytes) if load.wan_bytes else _NOTHING
    yield _size(load.fabric_bytes) if load.fabric_bytes else _NOTHING
    yield f"{_size(load.wan_goodput_bytes_per_s)}/s" if load.wan_goodput_bytes_per_s else _NOTHING


def _facts(status: MeshStatus) -> Table:
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, said in (
        *_of_gateway(status.gateway),
        ("cache", _of_cache(status.cache)),
        ("metrics", _addresses(status)),
    ):
        facts.add_row(name, Text(said))
    return facts


def _of_gateway(gateway: GatewayStatus) -> Iterable[tuple[str, str]]:
    yield (
        "gateway",
        f"{gateway.in_flight} in flight, {gateway.waiting} waiting for room, {gateway.retries} retries,"
        f" {gateway.stale_messages} stale messages dropped",
    )
    for path, reasons in gateway.routes.items():
        why = ", ".join(f"{reason or 'no reason'} {count}" for reason, count in reasons.items())
        yield "requests", f"{path or 'no path'}: {sum(reasons.values())} ({why})"
    if gateway.hit_gap is not None:
        yield (
            "hits",
            f"prefill {_points(gateway.prefill_hit_ratio)} %, main_decode {_points(gateway.main_hit_ratio)} %,"
            f" gap {_points(gateway.hit_gap)} points",
        )
    if gateway.exposed_wait_predicted_s is not None:
        yield (
            "exposed wait",
            f"predicted {gateway.exposed_wait_predicted_s:.2f} s, measured {_seconds(gateway.exposed_wait_measured_s)}"
            " (means)",
        )
    if tokens := sum(gateway.output_tokens.values()):
        shares = (f"{stage} {_share(count / tokens)}" for stage, count in gateway.output_tokens.items())
        yield "output", f"{tokens} tokens: {', '.join(shares)}"


def _of_cache(cache: CacheStatus) -> str:
    said = ["up" if cache.up else "down"]
    if cache.lookups:
        said.append(f"look-ups: {_list(cache.lookups)}")
    if cache.kv_events:
        said.append(f"KV events: {_list(cache.kv_events)}")
    return "; ".join(said)


def _addresses(status: MeshStatus) -> str:
    ports = [(f"{one.role}-{one.dc}-{one.instance}", one.metrics_port) for one in status.instances]
    ports.append(("cache", status.cache.metrics_port))
    return f"{status.gateway.url}/metrics; on 127.0.0.1: " + ", ".join(
        f"{name} :{port}" for name, port in ports if port
    )


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _share(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.0%}"


def _points(ratio: float | None) -> str:
    return _NOTHING if ratio is None else f"{100 * ratio:.1f}"


def _seconds(seconds: float | None) -> str:
    return _NOTHING if seconds is None else f"{seconds:.2f} s"


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:  # what rounds to 1000 is 1 of the next
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"
