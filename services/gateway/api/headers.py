"""HTTP headers: what a client may ask for, and how a request went."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

from pdd.types import Pipeline
from services.gateway.api.errors import invalid
from services.gateway.generation import Report

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def echoed_request_id(headers: Headers, own: str) -> str:
    """The client's `x-request-id` if it is fit to be a header, else our own."""
    theirs = headers.get("x-request-id", "")
    return theirs if _REQUEST_ID.fullmatch(theirs) else own


def wanted_pipeline(headers: Headers, default: Pipeline) -> Pipeline:
    """`x-pdd-pipeline`. Raises `ApiError` (400) if it names none."""
    value = headers.get("x-pdd-pipeline", default)
    try:
        return Pipeline(value)
    except ValueError:
        choices = ", ".join(Pipeline)
        raise invalid(f"x-pdd-pipeline must be one of {choices}, not {value!r}.", "x-pdd-pipeline") from None


def wanted_handoff(headers: Headers) -> int | None:
    """`x-pdd-handoff-at`: how many output tokens exist at the hand-over. Raises `ApiError` (400) if it is no number."""
    value = headers.get("x-pdd-handoff-at")
    if value is None:
        return None
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
        raise invalid(f"x-pdd-handoff-at must be an integer >= 1, not {value!r}.", "x-pdd-handoff-at")
    return int(value)


def of_report(report: Report) -> dict[str, str]:
    """What is known of the request when the headers are sent: `x-pdd-*`, and all times as `Server-Timing`."""
    prefill_ms = None
    if report.prefill_started_ms is not None and report.prefill_done_ms is not None:
        prefill_ms = report.prefill_done_ms - report.prefill_started_ms
    timings = ", ".join(
        f"{name.removesuffix('_ms')};dur={value:.1f}"
        for name in report.__struct_fields__
        if name.endswith("_ms") and (value := getattr(report, name)) is not None
    )
    values = {
        "x-pdd-pipeline": report.pipeline,
        "x-pdd-path": report.path,
        "x-pdd-reason": report.reason,
        "x-pdd-attempts": str(report.attempts),
        "x-pdd-prefill": report.prefill,
        "x-pdd-relay": report.relay,
        "x-pdd-main-decode": report.main_decode,
        "x-pdd-ttft-ms": _milliseconds(report.ttft_ms),
        "x-pdd-prefill-ms": _milliseconds(prefill_ms),
        "x-pdd-timings": timings,
        "server-timing": timings,
    }
    return {name: _printable(value) for name, value in values.items() if value}


def _milliseconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _printable(value: str) -> str:
    return re.sub(r"[^\x20-\x7e]", "?", value)
