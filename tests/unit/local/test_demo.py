"""The demo's timeline says what the report says, in the order it happened."""

from __future__ import annotations

import io

from rich.console import Console

from pdd.local.demo import Seen, milestones, prompt, show

RELAYED = Seen(
    text=" Salt and slate.",
    chunk_ms=[1000, 1040, 1080, 1300, 1340],
    prompt_tokens=3000,
    output_tokens=5,
    report={
        "path": "P->RLD->MD",
        "reason": "exposed_wait",
        "prefill_started_ms": 5.0,
        "prefill_done_ms": 990.0,
        "ttft_ms": 1000.0,
        "kv_relay_ready_ms": 1010.0,
        "t2_ms": 1040.0,
        "kv_ready_ms": 1200.0,
        "handoff_ms": 1250.0,
        "handoff_position": 3,
        "handoff_gap_ms": 220.0,
        "largest_gap_ms": 220.0,
        "largest_gap_at": 4,
        "prefill_tokens": 1,
        "relay_tokens": 2,
        "main_decode_tokens": 2,
        "kv_fabric_bytes": 70_000_000,
        "kv_wan_bytes": 69_000_000,
        "total_ms": 1340.0,
    },
)


def test_milestones_come_in_order_and_name_who_did_what() -> None:
    events = milestones(RELAYED)
    assert [when for when, _ in events] == sorted(when for when, _ in events)
    words = [words for _, words in events]
    assert words == [
        "prefill begins",
        "prefill done: 3,000 prompt tokens",
        "first token, sampled by prefill itself",
        "RelayDecode has the KV: 70.0 MB over the fabric",
        "second token, from RelayDecode",
        "MainDecode has the KV: 69.0 MB over the WAN",
        "MainDecode takes over after token 3, from RelayDecode",
        "answer complete: 5 tokens",
    ]


def test_what_did_not_happen_is_not_shown() -> None:
    direct = Seen("a", [10.0], 10, 1, {"path": "P->MD", "ttft_ms": 10.0, "kv_ready_ms": None, "total_ms": 11.0})
    assert [words for _, words in milestones(direct)] == [
        "first token, sampled by prefill itself",
        "answer complete: 1 tokens",
    ]
    show(Console(file=io.StringIO()), direct)


def test_the_figures_are_printed() -> None:
    out = io.StringIO()
    show(Console(file=out, width=120), RELAYED)
    printed = out.getvalue()
    assert "prefill 1, RelayDecode 2, MainDecode 2" in printed
    assert "median 40 ms, largest 220 ms (before token 4); at the handoff 220 ms" in printed
    assert "Salt and slate." in printed


def test_the_prompt_is_fixed_and_long() -> None:
    assert prompt() == prompt()
    assert 7_000 < len(prompt()) < 12_000
    assert len(set(prompt().splitlines())) > 100
