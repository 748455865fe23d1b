"""One long prompt through a running mesh, and what happened to it on a timeline.

A client like any other: OpenAI's API, streamed. When tokens arrived is measured here; what the mesh did in between
comes from the gateway's report (`usage.pdd`).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdd.errors import PddError, UnreachableError
from pdd.local.loopback import client
from pdd.types import Path, Pipeline

MAX_TOKENS = 96
TIMEOUT_S = 120.0

_TOWNS = ("Ansel", "Brice", "Corvo", "Dunmere", "Estrin", "Farrow", "Galen", "Hollin", "Isham", "Jorvik")
_GOODS = ("salt", "copper", "timber", "wool", "barley", "glass", "honey", "slate", "linen", "tar")
_FACTS = 101
"""About 3,000 tokens of the default model."""


def prompt() -> str:
    """The fixed prompt: numbered facts, then a question about them."""
    facts = [
        f"{n}. In the year {1500 + 3 * n} the town of {_TOWNS[n * 7 % 10]} sold {40 + n * 37 % 400} barrels of "
        f"{_GOODS[n * 3 % 10]} to {_TOWNS[(n * 7 + 4) % 10]}."
        for n in range(1, _FACTS + 1)
    ]
    question = "What do these records describe? Name the towns, and tell the story of their trade in a few sentences."
    return "Here are the trade records of a coast.\n" + "\n".join(facts) + "\n\n" + question


class Seen(msgspec.Struct, frozen=True):
    """What the client saw. Times are ms since the request was sent; `report` is the gateway's, `usage.pdd`."""

    text: str
    chunk_ms: list[float]
    prompt_tokens: int
    output_tokens: int
    report: dict[str, Any]


def model_name(gateway_url: str) -> str:
    """The name the gateway serves its model under. Raises `UnreachableError`."""
    try:
        answer = client().get(f"{gateway_url}/v1/models", timeout=TIMEOUT_S)
        return answer.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise _improper(gateway_url, error) from None


def ask_mesh(gateway_url: str, pipeline: Pipeline) -> Seen:
    """Send the prompt and read the answer as it comes. Raises `PddError` if the mesh gives none."""
    text: list[str] = []
    chunk_ms: list[float] = []
    usage: dict[str, Any] | None = None
    body = {
        "model": model_name(gateway_url),
        "cache_salt": secrets.token_hex(8),  # what an earlier demo has left behind is not to be found
        "messages": [{"role": "user", "content": prompt()}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        began = time.monotonic()
        headers = {"x-pdd-pipeline": pipeline}
        url = f"{gateway_url}/v1/chat/completions"
        with client().stream("POST", url, json=body, headers=headers, timeout=TIMEOUT_S) as answer:
            if answer.is_error:
                answer.read()
                raise PddError(f"the gateway answered {answer.status_code}: {answer.json()['error']['message']}")
            for event in _events(answer):
                usage = event.get("usage") or usage
                delta = event["choices"][0]["delta"].get("content") if event.get("choices") else None
                if delta:
                    chunk_ms.append((time.monotonic() - began) * 1e3)
                    text.append(delta)
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise _improper(gateway_url, error) from None
    if usage is None:
        raise PddError("the answer was cut off")
    return Seen("".join(text), chunk_ms, usage["prompt_tokens"], usage["completion_tokens"], usage.get("pdd") or {})


def _improper(gateway_url: str, error: Exception) -> UnreachableError:
    return UnreachableError(f"the gateway at {gateway_url} gave no proper answer: {error!r}")


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Server-sent events of a stream, decoded. Raises `PddError` for an error event."""
    for line in answer.iter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event: dict[str, Any] = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise PddError(f"the answer was cut off: {event['error']['message']}")
        yield event


def milestones(seen: Seen) -> list[tuple[float, str]]:
    """What happened when, in order: (ms since the request reached the gateway, words)."""
    report = seen.report
    relayed = report.get("path") == Path.RELAYED
    wan_bytes, fabric_bytes = report.get("kv_wan_bytes", 0), report.get("kv_fabric_bytes", 0)
    second = "RelayDecode" if report.get("relay_tokens") else "MainDecode"
    crossed = f": {_size(wan_bytes)} over the WAN" if wan_bytes else ""
    if fabric_bytes and not relayed:
        crossed = f": {_size(fabric_bytes)} over the fabric"
    words = {
        "prefill_started_ms": "prefill begins",
        "ttft_ms": "first token, sampled by prefill itself",
        "prefill_done_ms": f"prefill done: {seen.prompt_tokens:,} prompt tokens",
        "kv_relay_ready_ms": f"RelayDecode has the KV: {_size(fabric_bytes)} over the fabric",
        "t2_ms": f"second token, from {second}",
        "kv_ready_ms": f"MainDecode has the KV{crossed}",
        "handoff_ms": f"MainDecode takes over after token {report.get('handoff_position')}"
        + (", from RelayDecode" if relayed else ""),
        "total_ms": f"answer complete: {seen.output_tokens} tokens",
    }
    return sorted((when, words[name]) for name in words if (when := report.get(name)) is not None)


def show(console: Console, seen: Seen) -> None:
    """Print the timeline, the figures that matter, and the answer."""
    report = seen.report
    table = Table(
        title=f"One request, {report.get('path') or 'path unknown'}", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what happened")
    events = milestones(seen)
    end_ms = max((when for when, _ in events), default=1.0)
    for when, words in events:
        table.add_row(f"{when:,.0f} ms", _bar(when, end_ms), words)
    console.print(table)
    console.print(
        f"Tokens: prefill {report.get('prefill_tokens', 0)}, RelayDecode {report.get('relay_tokens', 0)}, "
        f"MainDecode {report.get('main_decode_tokens', 0)}. Why this path: {report.get('reason') or 'not said'}."
    )
    console.print(_gaps(seen))
    console.print(Text("Answer: ", style="bold").append(seen.text.strip(), style="not bold"))


def _gaps(seen: Seen) -> str:
    report = seen.report
    if len(seen.chunk_ms) < 2:
        return "Too short an answer to measure gaps."
    gaps = sorted(late - early for early, late in zip(seen.chunk_ms, seen.chunk_ms[1:], strict=False))
    words = f"Between tokens: median {gaps[len(gaps) // 2]:.0f} ms, largest {gaps[-1]:.0f} ms"
    if (largest_at := report.get("largest_gap_at")) is not None:
        words += f" (before token {largest_at})"
    if (handoff_gap := report.get("handoff_gap_ms")) is not None:
        words += f"; at the handoff {handoff_gap:.0f} ms"
    return words + "."


def _bar(when: float, end: float) -> Text:
    width = 16
    place = min(width - 1, int(when / end * width))
    return Text("·" * place + "●" + "·" * (width - 1 - place), style="cyan")


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
