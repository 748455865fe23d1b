"""Server-sent events: one JSON object each, as OpenAI streams them."""

from __future__ import annotations

from typing import Any

import msgspec

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(data: Any) -> bytes:
    """`data` as one event."""
    return b"data: " + _encoder.encode(data) + b"\n\n"
