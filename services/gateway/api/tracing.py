"""The root span of a request's trace, in OpenTelemetry's terms for generative AI and HTTP."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers

from pdd.telemetry.tracing import Trace, Value, from_client
from pdd.types import FinishReason
from services.gateway.api.errors import ApiError
from services.gateway.api.prepare import Call
from services.gateway.generation import Report

TRACE_ID_HEADER = "x-pdd-trace-id"


def begin(operation: str, model: str, path: str, headers: Headers, request_id: str) -> Trace:
    """Begin a request's trace, or go on with the client's. `operation` and `model` name the span."""
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "pdd",
        "gen_ai.request.model": model,
        "http.request.method": "POST",
        "url.path": path,
    }
    return Trace.root(
        f"{operation} {model}", from_client(headers), request_id, kind=SpanKind.SERVER, attributes=attributes
    )


def prepared(trace: Trace, call: Call) -> None:
    """The request has passed every check."""
    request = call.request
    trace.describe(
        {
            "gen_ai.request.max_tokens": request.stop.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.request.top_k": request.sampling.top_k,
            "gen_ai.request.stream": call.stream,
            "gen_ai.usage.input_tokens": len(request.prompt),
        }
    )


def generated(trace: Trace, output_tokens: int, finish: FinishReason | None, report: Report) -> None:
    """The generation is over, for whatever reason; `report` as `usage.pdd` has it, under `pdd.*`."""
    attributes: dict[str, Value] = {"gen_ai.usage.output_tokens": output_tokens}
    if finish is not None:
        attributes["gen_ai.response.finish_reasons"] = [finish.value]
    known: Mapping[str, Value | None] = msgspec.to_builtins(report)
    trace.describe(attributes | {f"pdd.{name}": value for name, value in known.items() if value not in (None, "")})


def end(trace: Trace, status: int, outcome: str, error: ApiError | None) -> None:
    """The exchange is over. A refusal (4xx) and a client who left are no failures of ours."""
    trace.describe({"http.response.status_code": status})
    if error is None or error.status >= 500:
        trace.close(outcome, error)
        return
    trace.describe({"error.type": error.code or str(error.status)})
    trace.close(outcome)
