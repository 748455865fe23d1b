"""`pdd status`: from metrics to figures to a screen of 100 columns."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pdd.local import status_view
from pdd.local.instances import Instance
from pdd.local.scrape import Samples
from pdd.local.status import CacheStatus, GatewayStatus, MeshStatus, gateway_status
from tests.unit.mesh.beats import IDLE

COLUMNS = 100


def instance(role: str, dc: str = "a", **load: Any) -> Instance:
    return Instance(dc, role, "0", "e", 4711, "nixl", "bfloat16", 8192, 43_211, msgspec.structs.replace(IDLE, **load))


BUSY = instance(
    "main_decode",
    "b",
    running=128,
    seats=128,
    waiting=1000,
    reserved=100,
    steps=10,
    batch_sequences=127.96,
    total_blocks=1000,
    free_blocks=0,
    evictable_blocks=250,
    prompt_tokens_seen=1000,
    hit_tokens=999,
    output_tokens=12_345_678,
    wan_bytes=123_456_789_012,
    fabric_bytes=999_700,
    wan_goodput_bytes_per_s=123.4e6,
)
GATEWAY = GatewayStatus(
    url="http://127.0.0.1:8000",
    in_flight=12,
    waiting=3,
    retries=1,
    stale_messages=2,
    routes={"P->MD": {"wait_short": 5, "relay_full": 1}, "P->RLD->MD": {"wait_long": 4}},
    output_tokens={"prefill": 10, "relay": 40, "main_decode": 150},
    prefill_hit_ratio=0.5,
    main_hit_ratio=0.489,
    exposed_wait_predicted_s=1.2,
    exposed_wait_measured_s=None,
)
CACHE = CacheStatus(True, 4000, {"hit": 3, "miss": 1}, {"applied": 70})


def lines(
    *instances: Instance,
    gateway: GatewayStatus = GATEWAY,
    cache: CacheStatus = CACHE,
    ended: tuple[str, ...] = (),
    width: int = COLUMNS,
    terminal: bool = True,
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, force_terminal=terminal, color_system=None)
    status_view.show(console, MeshStatus(gateway, cache, list(instances), list(ended)))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_everything_fits_and_nothing_is_cut_off() -> None:
    shown = lines(instance("prefill"), BUSY)
    assert max(map(len, shown)) <= COLUMNS
    assert "…" not in "".join(shown)
    assert shown[3].split() == [
        *("b", "main_decode", "0", "128/128", "1000", "100", "128.0", "75%", "25%", "100%", "12345678"),
        *("123", "GB", "1", "MB", "123", "MB/s"),
    ]


def test_a_narrow_terminal_shows_instances_side_by_side() -> None:
    shown = lines(instance("prefill"), instance("relay"), BUSY, width=80)
    assert max(map(len, shown)) <= 80
    assert "…" not in "".join(shown)
    rows = {line.split()[0]: line.split()[1:] for line in shown[1:15]}
    assert rows["role"] == ["prefill", "relay", "main_decode"]
    assert rows["running"] == ["0/4", "0/4", "128/128"]
    assert rows["goodput"] == ["-", "-", "123", "MB/s"]


def test_a_pipe_has_no_width() -> None:
    assert lines(instance("prefill"), BUSY, width=80, terminal=False) == lines(instance("prefill"), BUSY)


def test_a_process_that_is_gone_is_named() -> None:
    assert "ended, and not started again: prefill-0, relay-0" in lines(BUSY, ended=("prefill-0", "relay-0"))


def test_what_was_not_measured_is_not_zero() -> None:
    idle = lines(instance("relay"))[2].split()
    assert idle == ["a", "relay", "0", "0/4", "0", "0", "-", "0%", "0%", "-", "0", "-", "-", "-"]


def test_gateway_and_cache_in_words() -> None:
    text = " ".join(" ".join(lines(BUSY)).split())
    assert "gateway 12 in flight, 3 waiting for room, 1 retries, 2 stale messages dropped" in text
    assert "P->MD: 6 (wait_short 5, relay_full 1)" in text
    assert "prefill 50.0 %, main_decode 48.9 %, gap 1.1 points" in text
    assert "predicted 1.20 s, measured -" in text
    assert "200 tokens: prefill 5%, relay 20%, main_decode 75%" in text
    assert "up; look-ups: 3 hit, 1 miss; KV events: 70 applied" in text
    assert "main_decode-b-0 :43211, cache :4000" in text


def test_a_fresh_mesh() -> None:
    shown = lines(gateway=gateway_status("http://x", Samples("")), cache=CacheStatus(False, 0, {}, {}))
    assert shown[0] == "Mesh at http://x"
    assert shown[-3:] == [
        "gateway  0 in flight, 0 waiting for room, 0 retries, 0 stale messages dropped",
        "cache    down",
        "metrics  http://x/metrics; on 127.0.0.1:",
    ]


def test_what_is_no_scrape_is_an_error() -> None:
    with pytest.raises(ValueError, match="html"):
        Samples("<html>")
