"""A collector: takes spans over OTLP/HTTP, as any backend does, and keeps them for a test to look at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True)
class Event:
    """Something that happened in a span."""

    name: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came over the wire. IDs are hex; no parent is an empty one. Times are Unix ns."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    started_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: list[Event]
    links: list[str]
    """IDs of the spans it is linked to."""
    failed: bool
    resource: dict[str, Any]


class Collector:
    """What has come so far. Set the endpoint as `OTEL_EXPORTER_OTLP_ENDPOINT`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.headers: list[dict[str, str]] = []
        self._spans: list[CollectedSpan] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[CollectedSpan]:
        """All spans, in the order in which they came."""
        with self._lock:
            return list(self._spans)

    def wait(self, enough: Callable[[list[CollectedSpan]], bool], within_s: float = 10.0) -> list[CollectedSpan]:
        """Block until the spans satisfy `enough`. Fails after `within_s`, saying what is there."""
        deadline = time.monotonic() + within_s
        while not enough(spans := self.spans):
            assert time.monotonic() < deadline, f"after {within_s:g} s: {[span.name for span in spans]}"
            time.sleep(0.02)
        return spans

    def take(self, body: bytes, headers: dict[str, str]) -> None:
        """An export request has come."""
        request = ExportTraceServiceRequest.FromString(body)
        spans = [
            CollectedSpan(
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                name=span.name,
                kind=span.kind,
                started_ns=span.start_time_unix_nano,
                ended_ns=span.end_time_unix_nano,
                attributes=_plain(span.attributes),
                events=[Event(event.name, _plain(event.attributes)) for event in span.events],
                links=[link.span_id.hex() for link in span.links],
                failed=span.status.code == span.status.STATUS_CODE_ERROR,
                resource=_plain(resource.resource.attributes),
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self.headers.append(headers)
            self._spans.extend(spans)


@contextmanager
def collector() -> Generator[Collector]:
    """Run one on a free port of the loopback interface."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            known = self.path == "/v1/traces"
            if known:
                kept.take(body, dict(self.headers))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes if isinstance(pair, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
