"""Records spans inside a test's own process."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler

from pdd.telemetry import tracing


class Recorder(SpanProcessor):
    """Keeps each span that was ended, and counts those begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.spans: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: object = None) -> None:
        self.begun += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of one name, in the order in which they were begun."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time or 0)

    def one(self, name: str) -> ReadableSpan:
        """The only span of its name."""
        (span,) = self.named(name)
        return span

    def check_ended_once(self) -> None:
        """Every span that was begun was ended, and none twice."""
        assert len({span.context.span_id for span in self.spans}) == len(self.spans) == self.begun


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether `parent` is what the span names as such."""
    return (
        span.parent is not None
        and span.parent.span_id == parent.context.span_id
        and span.context.trace_id == parent.context.trace_id
    )


@contextmanager
def recorded(sampler: Sampler = DEFAULT_ON) -> Generator[Recorder]:
    """Record what is traced inside the block."""
    recorder = Recorder()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(recorder)
    with tracing.recording(provider.get_tracer("test")):
        yield recorder
