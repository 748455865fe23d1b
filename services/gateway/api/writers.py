"""How an answer is written to the client: as a stream of events, or whole."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from pdd.types import FinishReason
from services.gateway.api import headers, sse
from services.gateway.api.connection import Outlet
from services.gateway.api.shape import Shape
from services.gateway.generation import Report


class Writer(Protocol):
    """Takes the answer as it grows; nothing is sent before the first `push`, so that errors can still be statuses."""

    async def push(self, text: str, ids: Sequence[int], report: Report) -> None:
        """More text (may be empty), and the output tokens that it came with."""
        ...

    async def end(self, finish: FinishReason, usage: dict[str, Any], report: Report) -> None:
        """The answer is complete. Awaits nothing after the last byte."""
        ...


class Extras(NamedTuple):
    """What the client asked for beside the text: usage at a stream's end, token IDs beside each piece (vLLM's)."""

    include_usage: bool
    token_ids: bool


class Envelope:
    """What all objects of one answer have in common."""

    def __init__(self, shape: Shape[Any], request_id: str, model: str) -> None:
        self._shape = shape
        self._id = shape.id_prefix + request_id
        self._model = model
        self._created = int(time.time())

    def whole(self, choice: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one object."""
        return self._wrap(self._shape.whole_object, [choice]) | {"usage": usage}

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        """One object of a stream."""
        return self._wrap(self._shape.chunk_object, list(choices))

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


class StreamWriter:
    """Server-sent events: role, text, reason, usage if it was asked for, `[DONE]`."""

    def __init__(
        self,
        outlet: Outlet,
        shape: Shape[Any],
        envelope: Envelope,
        response_headers: Mapping[str, str],
        extras: Extras,
    ) -> None:
        self._outlet = outlet
        self._shape = shape
        self._envelope = envelope
        self._headers = response_headers
        self._extras = extras

    async def push(self, text: str, ids: Sequence[int], report: Report) -> None:
        events = b""
        if self._outlet.status is None:
            await self._outlet.start(200, {**self._headers, **sse.HEADERS, **headers.of_report(report)})
            opening = self._shape.opening_choice()
            events += b"" if opening is None else self._event(opening)
        if text or (ids and self._extras.token_ids):
            choice = self._shape.delta_choice(text, None)
            events += self._event(choice | {"token_ids": list(ids)} if self._extras.token_ids else choice)
        if events:
            await self._outlet.write(events)

    async def end(self, finish: FinishReason, usage: dict[str, Any], report: Report) -> None:
        events = self._event(self._shape.delta_choice("", finish))
        if self._extras.include_usage:
            events += sse.event(self._envelope.chunk() | {"usage": usage})
        await self._outlet.write(events + sse.DONE, last=True)

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk = self._envelope.chunk(choice)
        return sse.event(chunk | {"usage": None} if self._extras.include_usage else chunk)


class WholeWriter:
    """One JSON object at the end."""

    def __init__(
        self,
        outlet: Outlet,
        shape: Shape[Any],
        envelope: Envelope,
        response_headers: Mapping[str, str],
        extras: Extras,
    ) -> None:
        self._outlet = outlet
        self._shape = shape
        self._envelope = envelope
        self._headers = response_headers
        self._extras = extras
        self._pieces: list[str] = []
        self._ids: list[int] = []

    async def push(self, text: str, ids: Sequence[int], report: Report) -> None:
        self._pieces.append(text)
        self._ids.extend(ids)

    async def end(self, finish: FinishReason, usage: dict[str, Any], report: Report) -> None:
        choice = self._shape.whole_choice("".join(self._pieces), finish)
        if self._extras.token_ids:
            choice["token_ids"] = self._ids
        extra = {**self._headers, **headers.of_report(report)}
        await write_json(self._outlet, 200, self._envelope.whole(choice, usage), extra)


async def write_json(outlet: Outlet, status: int, body: Any, extra_headers: Mapping[str, str]) -> None:
    """A whole JSON response."""
    data = msgspec.json.encode(body)
    framing = {"content-type": "application/json", "content-length": str(len(data))}
    await outlet.start(status, {**extra_headers, **framing})
    await outlet.write(data, last=True)
