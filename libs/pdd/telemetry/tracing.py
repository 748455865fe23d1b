"""One trace per request: spans for phases, and the context that joins them across processes.

The gateway opens a trace (`Trace.root`); everybody else adds to one that arrived with a message (`Trace.here`) and adds
nothing where none did. A span's parent is always named, never taken from what happens to be current: work goes on in
tasks and step callbacks that serve many requests. What is current (`Trace.active`) matters to the bus, which sends it
along, and to logs; it carries the request's ID too (as W3C baggage), so both work while nothing is recorded.

Recording begins with `recording`, for a process in `pdd.telemetry.export`; without it no call here does any work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from types import TracebackType

from opentelemetry import baggage, propagate
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pdd.errors import PddError

Value = str | bool | int | float | Sequence[str]
"""What an attribute may be."""

_PREFIX = "pdd."
_REQUEST_ID = "pdd.request_id"
_MESH = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
"""Peers of one mesh speak one format, whatever `OTEL_PROPAGATORS` says to the world outside."""

_tracer: Tracer | None = None


@contextmanager
def recording(tracer: Tracer) -> Generator[None]:
    """Let traces that are begun inside record their spans with `tracer`."""
    global _tracer
    before, _tracer = _tracer, tracer
    try:
        yield
    finally:
        _tracer = before


def inject(headers: MutableMapping[str, str]) -> None:
    """Add what is current to the headers of a message to a peer."""
    _MESH.inject(headers)


def extract(headers: Mapping[str, str]) -> Context:
    """The context that came with a peer's message."""
    return _MESH.extract(headers)


def from_client(headers: Mapping[str, str]) -> Context:
    """The context that a client sent: its trace, not its baggage. `OTEL_PROPAGATORS` names the formats it may have."""
    return baggage.clear(propagate.extract(headers, Context()))


def ids() -> dict[str, str]:
    """`request_id`, `trace_id` and `span_id` of what is current, as far as there are any."""
    context = otel_context.get_current()
    if not context:
        return {}
    found = {key.removeprefix(_PREFIX): value for key, value in _request_id(context).items()}
    span = get_current_span(context).get_span_context()
    if span.is_valid:
        found["trace_id"] = f"{span.trace_id:032x}"
        found["span_id"] = f"{span.span_id:016x}"
    return found


def outside() -> _Active:
    """Make nothing current for a `with` block: what is begun inside, in the course of one request, serves them all."""
    return _Active(Context())


class Trace:
    """The spans of one piece of work (a request, an attempt at it, an attempt on one stage), all with one parent.

    Phases are begun and ended by name from wherever the work goes on; two of one name that run at once are told apart
    by `of`. Each span is ended once: what was ended, or never begun, is not ended again, and after `close` nothing
    begins. Keywords become attributes: `tokens=3` is `pdd.tokens`; those that are None are left out.
    """

    __slots__ = ("_common", "_open", "_own", "_tracer", "context")

    def __init__(self, context: Context, own: Span | None = None, common: Mapping[str, Value] | None = None) -> None:
        """Spans will be children of the span in `context`, which is `own` if this object is to end it."""
        self.context = context
        self._own = own
        self._open: dict[tuple[str, str], Span] = {}
        self._tracer = _tracer if _tracer is not None and _has_span(context) else None
        self._common: dict[str, Value] = {}
        if self._tracer is not None:
            self._common = {**_request_id(context), **(common or {})}

    @classmethod
    def root(
        cls, name: str, context: Context, request_id: str, *, kind: SpanKind, attributes: Mapping[str, Value]
    ) -> Trace:
        """Begin a request's trace, or go on with that in `context`."""
        context = baggage.set_baggage(_REQUEST_ID, request_id, context)
        if _tracer is None:
            return cls(context)
        span = _tracer.start_span(name, context, kind, {**attributes, _REQUEST_ID: request_id})
        return cls(set_span_in_context(span, context), span)

    @classmethod
    def here(cls, **common: Value | None) -> Trace:
        """Go on with the trace that is current: that of the message which is being handled. `common` is on all spans.

        Where there is none, as for a message that serves no request, nothing is recorded.
        """
        context = otel_context.get_current()
        return cls(context, common=_named(common) if _tracer is not None else None)

    def child(self, name: str, /, *links: Link, **attributes: Value | None) -> Trace:
        """Begin a span that has phases of its own, which its owner closes."""
        if self._tracer is None:
            return Trace(self.context)
        common = self._common | _named(attributes)
        span = self._tracer.start_span(name, self.context, attributes=common, links=links)
        return Trace(set_span_in_context(span, self.context), span, self._common)

    @property
    def trace_id(self) -> str:
        """32 hex digits if the trace is recorded here, else nothing."""
        return f"{self._own.get_span_context().trace_id:032x}" if self._own and self._own.is_recording() else ""

    def link(self) -> list[Link]:
        """A link to the span that this object owns, if there is one."""
        return [] if self._own is None else [Link(self._own.get_span_context())]

    def active(self, name: str = "", of: str = "", /) -> _Active:
        """Make this trace current for a `with` block, so that requests, new tasks and logs inside carry it.

        With `name`, what is sent becomes a child of that open phase. Never keep the block open over a `yield`.
        """
        span = self._open.get((name, of)) if name else None
        return _Active(self.context if span is None else set_span_in_context(span, self.context))

    def begin(self, name: str, of: str = "", /, *, ago_s: float = 0.0, **attributes: Value | None) -> None:
        """A phase begins, or began `ago_s` before; nothing happens if it is running."""
        self._begin((name, of), attributes, _before(ago_s))

    def end(self, name: str, of: str = "", /, *, ago_s: float = 0.0, **attributes: Value | None) -> None:
        """A phase has come to its end, now or `ago_s` before, if it is running."""
        span = self._open.pop((name, of), None)
        if span is not None:
            span.set_attributes(_named(attributes))
            span.end(_before(ago_s))

    def fail(self, name: str, error: BaseException, of: str = "", /) -> None:
        """A phase was ended by `error`, if it is running; a cancellation is no failure."""
        span = self._open.pop((name, of), None)
        if span is not None:
            _broken(span, error)
            span.end()

    def event(self, name: str, event: str, of: str = "", /, **attributes: Value | None) -> None:
        """Something happened in a phase, if it is running."""
        span = self._open.get((name, of))
        if span is not None:
            span.add_event(event, _named(attributes))

    @contextmanager
    def during(self, name: str, of: str = "", /, **attributes: Value | None) -> Generator[None]:
        """A phase that lasts as long as a `with` block, in straight-line code."""
        self._begin((name, of), attributes, None)
        try:
            yield
        except BaseException as error:
            self.fail(name, error, of)
            raise
        finally:
            self.end(name, of)

    def note(self, event: str, /, **attributes: Value | None) -> None:
        """Something happened in the span that this object owns."""
        if self._own is not None:
            self._own.add_event(event, _named(attributes))

    def describe(self, attributes: Mapping[str, Value]) -> None:
        """Attributes, by their full names, of the span that this object owns."""
        if self._own is not None:
            self._own.set_attributes(attributes)

    def close(self, outcome: str = "", error: BaseException | None = None, /, **attributes: Value | None) -> None:
        """The work is over: end whatever is open, and the span that this object owns.

        `outcome` says in a word how it went (`pdd.outcome`); with `error`, the spans have failed. May be called again.
        """
        self._tracer = None
        spans = list(self._open.values())
        self._open.clear()
        if self._own is not None:
            self._own.set_attributes(_named(attributes))
            spans.append(self._own)
            self._own = None
        for span in spans:
            if outcome:
                span.set_attribute("pdd.outcome", outcome)
            if error is not None:
                _broken(span, error)
            span.end()

    def _begin(self, phase: tuple[str, str], attributes: Mapping[str, Value | None], started_ns: int | None) -> None:
        if self._tracer is None or phase in self._open:
            return
        together = self._common | _named(attributes)
        self._open[phase] = self._tracer.start_span(phase[0], self.context, attributes=together, start_time=started_ns)


class _Active:
    """Attaches a context for a `with` block."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = otel_context.attach(self._context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)


def _has_span(context: Context) -> bool:
    return get_current_span(context).get_span_context().is_valid


def _request_id(context: Context) -> dict[str, str]:
    value = baggage.get_baggage(_REQUEST_ID, context)
    return {_REQUEST_ID: value} if isinstance(value, str) else {}


def _named(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {_PREFIX + name: value for name, value in attributes.items() if value is not None}


def _before(ago_s: float) -> int | None:
    """Unix ns; None is now."""
    return time.time_ns() - round(ago_s * 1e9) if ago_s else None


def _broken(span: Span, error: BaseException) -> None:
    """Say what ended a span. Only our own errors may speak: others' texts may quote what a client wrote."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute("pdd.outcome", "cancelled")
        return
    code = getattr(error, "code", None)
    kind = code if isinstance(code, str) else type(error).__name__
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, str(error) if isinstance(error, PddError) else kind)
