"""Every event says who said it and, inside a request's work, for which request."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Generator
from contextlib import redirect_stdout
from typing import Any

import pytest
import structlog
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from pdd.telemetry import logs
from pdd.telemetry.tracing import Trace
from pdd.types import Peer, Role
from tests.spans import recorded

ME = Peer("b", Role.MAIN_DECODE, "7", "e" * 16)


@pytest.fixture
def restored() -> Generator[None]:
    yield
    structlog.reset_defaults()


def said(work: Any) -> list[dict[str, Any]]:
    """What is written to stdout meanwhile, as objects."""
    with redirect_stdout(io.StringIO()) as out:
        logs.configure("info", ME)
        work(structlog.get_logger())
    assert sys.stdout is not out
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.mark.usefixtures("restored")
def test_events_carry_process_and_request() -> None:
    def work(logger: Any) -> None:
        logger.info("process_started")
        trace = Trace.root("chat m", Context(), "11" * 16, kind=SpanKind.SERVER, attributes={})
        with trace.active():
            logger.warning("attempt_lost", attempt=1)
            logger.info("about_another", request_id="22" * 16)
        trace.close()
        thread = threading.Thread(target=lambda: logger.info("from_a_thread"))
        thread.start()
        thread.join()

    with recorded() as recorder:
        started, lost, other, threaded = said(work)
    assert all((one["dc"], one["role"], one["instance"]) == ("b", "main_decode", "7") for one in (started, threaded))
    assert not {"request_id", "trace_id"} & (started.keys() | threaded.keys())
    span = recorder.one("chat m").context
    assert (lost["request_id"], lost["trace_id"], lost["span_id"]) == (
        "11" * 16,
        f"{span.trace_id:032x}",
        f"{span.span_id:016x}",
    )
    assert (lost["level"], lost["attempt"]) == ("warning", 1)
    assert other["request_id"] == "22" * 16
