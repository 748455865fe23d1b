"""Sends a process' spans to an OTLP collector over HTTP, if the environment names one.

All settings are OpenTelemetry's own (`OTEL_*`): endpoint, headers, sampler, queue. Serving never waits for a collector:
spans go through a bounded queue to a thread of their own, and what finds no room there, or no collector, is dropped,
counted and logged.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog

from pdd.telemetry import tracing
from pdd.types import Peer

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FLUSH_S = 3.0
"""How long the end of a process waits for its last spans to leave."""
_ABORT_S = 0.5
"""... and how long it then waits for the export to notice."""
_QUIET_S = 30.0
"""Between two words about lost spans, or two of the same from OpenTelemetry itself."""


def wanted() -> bool:
    """Whether the environment asks for spans."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    return not disabled and exporter != "none" and any(os.environ.get(name) for name in _ENDPOINTS)


@contextmanager
def exporting(me: Peer) -> Generator[None]:
    """Record this process' spans and send them off; on exit wait a little for the last ones.

    Without an endpoint in the environment nothing is imported, started or recorded.
    """
    if not wanted():
        yield
        return
    # The SDK and protobuf: only who wants them pays for them.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Exporter(SpanExporter):
        """OTLP over HTTP, counted."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = otlp.export(spans)
            tally.exported(len(spans), result is SpanExportResult.SUCCESS)
            return result

        def shutdown(self) -> None:
            otlp.shutdown()

    class Processor(BatchSpanProcessor):
        """A bounded queue, counted."""

        def on_end(self, span: ReadableSpan) -> None:
            if span.context is not None and span.context.trace_flags.sampled:
                tally.ended += 1
            super().on_end(span)

    tally = Tally()
    with _heard("opentelemetry"):
        otlp = OTLPSpanExporter()
        processor = Processor(Exporter())
        provider = TracerProvider(resource=_resource(me), shutdown_on_exit=False)
        provider.add_span_processor(processor)
        try:
            with tracing.recording(provider.get_tracer("pdd", version("pdd"))):
                yield
        finally:
            # The SDK would wait half a minute for a collector that hangs.
            flushing = threading.Thread(target=processor.shutdown, name="flush_spans", daemon=True)
            flushing.start()
            flushing.join(_FLUSH_S)
            if flushing.is_alive():
                otlp.shutdown()  # Ends its pause before another try; a request that hangs dies with the process.
                flushing.join(_ABORT_S)
            tally.report(final=True)


class Tally:
    """Counts spans on their way out, and says when some are lost."""

    def __init__(self) -> None:
        self.ended = 0
        self._taken = 0
        self._sent = 0
        self._said = 0
        self._said_at = -_QUIET_S

    def exported(self, spans: int, sent: bool) -> None:
        """A batch has left the queue, for the collector or for nowhere."""
        self._taken += spans
        self._sent += spans if sent else 0
        self.report()

    def report(self, *, final: bool = False) -> None:
        """Log how many spans are lost so far, if more are than was said, not too often.

        What was dropped for want of room is known only at the end: until then it may as well be in the queue.
        """
        lost = (self.ended if final else self._taken) - self._sent
        now = time.monotonic()
        if lost > self._said and (final or now - self._said_at >= _QUIET_S):
            self._said, self._said_at = lost, now
            logger.warning("spans_lost", lost=lost, sent=self._sent)


def _resource(me: Peer) -> Resource:
    """Who this process is; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` have the last word."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    return Resource.create(
        {
            "service.namespace": "pdd",
            "service.name": f"pdd-{me.role}",
            "service.version": version("pdd"),
            "service.instance.id": f"{me.dc}/{me.role}/{me.instance}/{me.epoch}",
            "pdd.dc": me.dc,
            "pdd.role": me.role.value,
            "pdd.instance": me.instance,
        }
    ).merge(OTELResourceDetector().detect())


class _ToStructlog(logging.Handler):
    """Says what a library says, as an event, once in a while for each place that it says it in."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: dict[tuple[str, int], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        place, now = (record.pathname, record.lineno), time.monotonic()
        if now - self._said.get(place, -_QUIET_S) >= _QUIET_S:
            self._said[place] = now
            logger.warning("opentelemetry_warned", message=record.getMessage(), source=record.name)


@contextmanager
def _heard(library: str) -> Generator[None]:
    """Take a library's words into our log, in place of stderr."""
    theirs, handler = logging.getLogger(library), _ToStructlog()
    propagated, theirs.propagate = theirs.propagate, False
    theirs.addHandler(handler)
    try:
        yield
    finally:
        theirs.removeHandler(handler)
        theirs.propagate = propagated
