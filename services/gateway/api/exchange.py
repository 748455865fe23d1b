"""One request to a generating endpoint, from its first byte to the end of its answer.

The flow is the same for chat and completions, streamed or not: read, prepare, generate, write. Exactly one ending
reaches the client: the finished answer or one error; and whatever ends the exchange also ends the generation.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdd.telemetry.tracing import Trace
from services.gateway.api import headers, sse, tracing
from services.gateway.api.connection import ClientLeftError, Outlet, read_body, unless_client_leaves
from services.gateway.api.errors import ApiError, shutting_down, translate
from services.gateway.api.prepare import Call, prepare
from services.gateway.api.shape import Shape
from services.gateway.api.surface import Surface
from services.gateway.api.writers import Envelope, Extras, StreamWriter, WholeWriter, Writer, write_json
from services.gateway.generation import Report
from services.gateway.text.answer import AnswerText

_CLIENT_LEFT = 499
"""Status under which a request is counted whose client did not wait (nginx' number)."""


class Exchange(Response):
    """Answers one request when it is called as an ASGI application."""

    def __init__(self, surface: Surface, shape: Shape[Any], request_headers: Headers) -> None:
        super().__init__()
        self._arrived_s = time.perf_counter()
        self._surface = surface
        self._shape = shape
        self._request_headers = request_headers
        self._request_id = secrets.token_hex(16)
        self._response_headers = {"x-request-id": headers.echoed_request_id(request_headers, self._request_id)}
        self._finish = "error"
        self._error: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request. Every error becomes an answer; a client who left gets none."""
        metrics = self._surface.metrics
        outlet = Outlet(send)
        trace = tracing.begin(
            self._shape.operation, self._surface.model_name, scope["path"], self._request_headers, self._request_id
        )
        if trace.trace_id:
            self._response_headers[tracing.TRACE_ID_HEADER] = trace.trace_id
        with metrics.in_flight.track_inprogress(), trace.active():
            try:
                raw = await read_body(receive, self._surface.max_body_bytes)
                await unless_client_leaves(receive, self._answer(raw, outlet, trace))
            except ClientLeftError:
                outlet.status, self._finish = _CLIENT_LEFT, "cancelled"
            except asyncio.CancelledError:
                await self._fail(outlet, shutting_down())
                raise
            except Exception as error:
                await self._fail(outlet, translate(error, self._request_id))
            finally:
                status = outlet.status or _CLIENT_LEFT
                metrics.observe_request(self._shape.endpoint, status, self._finish)
                tracing.end(trace, status, self._finish, self._error)

    async def _answer(self, raw: bytes, outlet: Outlet, trace: Trace) -> None:
        """Prepare, generate and write. Raises whatever prevents an answer, with the generation ended."""
        surface = self._surface
        call = await prepare(surface, self._shape, raw, self._request_headers, self._request_id, trace)
        tracing.prepared(trace, call)
        text = AnswerText(surface.tokenizer.backend, call.stops)
        writer = self._writer(call, outlet)
        clock = surface.metrics.clock(self._arrived_s)
        waited_s = time.perf_counter() - self._arrived_s
        request = msgspec.structs.replace(call.request, waited_s=waited_s)
        async with surface.generator.generate(request) as generation:
            try:
                async for emission in generation:
                    clock.tick(len(emission.tokens), time.perf_counter())
                    known = len(text.ids)
                    await writer.push(text.push(emission), text.ids[known:], generation.report)
                    if text.finish is not None:
                        break
            finally:
                seconds = time.perf_counter() - self._arrived_s
                surface.metrics.observe_answer(generation.report, len(call.request.prompt), len(text.ids), seconds)
                tracing.generated(trace, len(text.ids), text.finish, generation.report)
        if text.finish is None:
            raise RuntimeError("the generation ended without a reason")
        self._finish = text.finish
        await writer.end(text.finish, _usage(call, text, generation.report), generation.report)

    def _writer(self, call: Call, outlet: Outlet) -> Writer:
        envelope = Envelope(self._shape, self._request_id, self._surface.model_name)
        extras = Extras(include_usage=call.include_usage, token_ids=call.return_token_ids)
        kind = StreamWriter if call.stream else WholeWriter
        return kind(outlet, self._shape, envelope, self._response_headers, extras)

    async def _fail(self, outlet: Outlet, error: ApiError) -> None:
        """End with `error`: a status while that is possible, else an event that is the last of the stream."""
        self._finish = "error"
        if outlet.ended:
            return
        self._error = error
        try:
            if outlet.status is None:
                await write_json(outlet, error.status, error.body(), {**self._response_headers, **error.headers})
            else:
                body = error.body()
                body["error"]["request_id"] = self._request_id
                await outlet.write(sse.event(body), last=True)
        except ClientLeftError:
            outlet.status = _CLIENT_LEFT


def _usage(call: Call, text: AnswerText, report: Report) -> dict[str, Any]:
    """Token counts as OpenAI names them; `pdd` tells how the request went.

    Cached tokens are those that Prefill did not compute. KV that a stage received from another is no cache hit.
    """
    prompt_tokens, output_tokens = len(call.request.prompt), len(text.ids)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": report.prefill_hit_tokens},
        "pdd": msgspec.to_builtins(report),
    }
