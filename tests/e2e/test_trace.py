"""One request is one trace: every phase, in every process, under the client's own span, as a collector receives it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter

import httpx
import pytest

from pdd.local.mesh import LocalMesh
from pdd.model.tokenizer import Tokenizer
from tests.e2e.conftest import Client
from tests.e2e.prompts import prompts
from tests.otlp import CollectedSpan, Collector

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

SPANS_S = 20.0
ROOT = "text_completion {model}"
RELAYED = {
    "gateway": ["attempt", "attach", "prefix_lookup", "reserve", "reserve", "submit", "tokenise", ROOT],
    "cache": ["lookup"],
    "prefill": ["handoff", "kv_transfer", "kv_transfer", "prefill", "prefill_queue"],
    "relay": ["extend", "handoff", "kv_receive", "relay_decode"],
    "main_decode": ["extend", "kv_receive", "main_decode"],
}
"""Spans of a request that RelayDecode serves and hands over, by process."""

DIRECT = {
    "gateway": ["attempt", "attach", "prefix_lookup", "reserve", "submit", "tokenise", ROOT],
    "cache": ["lookup"],
    "prefill": ["handoff", "kv_transfer", "prefill", "prefill_queue"],
    "main_decode": ["extend", "kv_receive", "main_decode"],
}


async def ask(mesh: LocalMesh, client: Client, prompt: list[int], **headers: str) -> str:
    """One request under a client's span; its trace ID."""
    trace_id = secrets.token_hex(16)
    body = {
        "model": client.model_name,
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": trace_id,
    }
    traced = {"traceparent": f"00-{trace_id}-{'1' * 16}-01", **headers}
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=120) as http:
        response = await http.post("/v1/completions", json=body, headers=traced)
    assert response.status_code == 200, response.text
    assert response.headers["x-pdd-trace-id"] == trace_id
    return trace_id


async def tree(
    traces: Collector, model_name: str, trace_id: str, expected: dict[str, list[str]]
) -> list[CollectedSpan]:
    """All spans of a trace, once the expected ones are here; there must be no others."""
    must = {role: sorted(name.format(model=model_name) for name in names) for role, names in expected.items()}
    deadline = time.monotonic() + SPANS_S
    while True:
        spans = [span for span in traces.spans if span.trace_id == trace_id]
        found: dict[str, list[str]] = {role: [] for role in must}
        for span in spans:
            if span.name != "handoff_wait":  # only where KV came before the hand-over
                found.setdefault(span.resource["service.name"].removeprefix("pdd-"), []).append(span.name)
        if must == {role: sorted(names) for role, names in found.items()}:
            return spans
        assert time.monotonic() < deadline, differences(must, found)
        await asyncio.sleep(0.05)


def differences(must: dict[str, list[str]], found: dict[str, list[str]]) -> str:
    """By role, what is missing and what is too much."""
    missing = {role: sorted((Counter(must.get(role, [])) - Counter(found[role])).elements()) for role in found}
    surplus = {role: sorted((Counter(found[role]) - Counter(must.get(role, []))).elements()) for role in found}
    return f"after {SPANS_S:g} s missing: {missing}, not expected: {surplus}"


def check(spans: list[CollectedSpan], model_name: str) -> None:
    """Parents, identities, bytes; nothing failed, no span per token."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "a span was sent twice"
    roots = [span for span in spans if span.parent_id not in by_id]
    assert [(root.name, root.parent_id) for root in roots] == [(ROOT.format(model=model_name), "1" * 16)]
    (attempt,) = [span for span in spans if span.name == "attempt"]
    parents = {"attempt": roots[0], "tokenise": roots[0]}
    for span in spans:
        if span.name == "lookup":
            assert by_id[span.parent_id].name == "prefix_lookup"
        elif span is not roots[0]:
            assert span.parent_id == parents.get(span.name, attempt).span_id, span.name
        assert span.ended_ns >= span.started_ns
        assert not span.failed, span
    assert len({span.attributes["pdd.request_id"] for span in spans if "pdd.request_id" in span.attributes}) == 1
    transfers = [span for span in spans if span.name == "kv_transfer"]
    assert all(span.attributes["pdd.transfer_bytes"] > 0 for span in transfers)
    assert roots[0].attributes["gen_ai.usage.output_tokens"] == 12
    assert [event.name for event in attempt.events].count("first_token") == 1


async def test_both_paths_at_once(mesh: LocalMesh, client: Client, traces: Collector, tokenizer: Tokenizer) -> None:
    """Two requests at a time, so that what belongs to one could end up under the other."""
    long, short = prompts(tokenizer)[4], prompts(tokenizer)[0]
    relayed, direct = await asyncio.gather(
        ask(mesh, client, long, **{"x-pdd-handoff-at": "5"}), ask(mesh, client, short, **{"x-pdd-pipeline": "pd-wan"})
    )
    spans = await tree(traces, client.model_name, relayed, RELAYED)
    check(spans, client.model_name)
    ways = sorted(span.attributes["pdd.transfer_path"] for span in spans if span.name == "kv_transfer")
    assert ways == ["fabric", "wan"]
    spans = await tree(traces, client.model_name, direct, DIRECT)
    check(spans, client.model_name)
