"""Phases: parents by name, each span ended once whatever happens, nothing where nothing is recorded."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator

import pytest
from opentelemetry import baggage
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from pdd.errors import CapacityError
from pdd.telemetry import tracing
from pdd.telemetry.tracing import Trace
from tests.spans import Recorder, is_child, recorded

CLIENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
REQUEST_ID = "11" * 16


@pytest.fixture
def recorder() -> Generator[Recorder]:
    with recorded() as recorder:
        yield recorder


def root(context: Context | None = None, request_id: str = REQUEST_ID) -> Trace:
    return Trace.root("chat m", context or Context(), request_id, kind=SpanKind.SERVER, attributes={})


def carried(trace: Trace) -> dict[str, str]:
    """Headers of a message that is sent while the trace is active."""
    headers: dict[str, str] = {}
    with trace.active():
        tracing.inject(headers)
    return headers


def arrived(headers: dict[str, str]) -> Trace:
    """What the handler of a message with these headers makes of it."""
    token = otel_context.attach(tracing.extract(headers))
    try:
        return Trace.here(attempt=1)
    finally:
        otel_context.detach(token)


def test_a_phase_on_another_process_is_a_child_of_the_attempt(recorder: Recorder) -> None:
    request = root(tracing.from_client(CLIENT))
    attempt = request.child("attempt", attempt=1)
    stage = arrived(carried(attempt))
    stage.begin("prefill", tokens=7, hits=None)
    stage.event("prefill", "chunk", tokens=5)
    stage.end("prefill", computed=7)
    for trace in (stage, attempt, request):
        trace.close("finished")

    prefill, middle, top = recorder.one("prefill"), recorder.one("attempt"), recorder.one("chat m")
    assert is_child(prefill, middle)
    assert is_child(middle, top)
    assert f"{top.context.trace_id:032x}" == CLIENT["traceparent"].split("-")[1]
    assert f"{top.parent.span_id:016x}" == CLIENT["traceparent"].split("-")[2]
    expected = {"pdd.request_id": REQUEST_ID, "pdd.attempt": 1, "pdd.tokens": 7, "pdd.computed": 7}
    assert dict(prefill.attributes) == expected
    assert all(span.attributes["pdd.request_id"] == REQUEST_ID for span in recorder.spans)
    assert [(event.name, dict(event.attributes)) for event in prefill.events] == [("chunk", {"pdd.tokens": 5})]
    recorder.check_ended_once()


def test_a_clients_baggage_stays_outside(recorder: Recorder) -> None:
    context = tracing.from_client({**CLIENT, "baggage": "pdd.request_id=forged,other=1"})
    assert not baggage.get_all(context)


def test_what_is_ended_is_not_ended_again(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    trace = root()
    trace.begin("one")
    trace.begin("one")
    trace.end("one")
    trace.end("one")
    trace.fail("one", CapacityError("full"))
    trace.event("one", "late")
    trace.end("never begun")
    trace.begin("two", "a")
    trace.begin("two", "b")
    trace.end("two", "b")
    trace.close("finished")
    trace.close("failed", CapacityError("full"))
    trace.begin("after the end")
    assert sorted(span.name for span in recorder.spans) == ["chat m", "one", "two", "two"]
    assert recorder.one("chat m").attributes["pdd.outcome"] == "finished"
    recorder.check_ended_once()
    assert not caplog.records


def test_status_by_reason(recorder: Recorder) -> None:
    trace = root()
    with pytest.raises(CapacityError), trace.during("refused"):
        raise CapacityError("no seat")
    with pytest.raises(ValueError, match="secret"), trace.during("broken"):
        raise ValueError("secret")
    with pytest.raises(asyncio.CancelledError), trace.during("left"):
        raise asyncio.CancelledError
    trace.begin("open")
    trace.close("failed", CapacityError("no seat"))

    refused, broken, left = recorder.one("refused"), recorder.one("broken"), recorder.one("left")
    assert (refused.status.status_code, refused.status.description) == (StatusCode.ERROR, "no seat")
    assert refused.attributes["error.type"] == "no_capacity"
    assert (broken.attributes["error.type"], broken.status.description) == ("ValueError", "ValueError")
    assert "secret" not in broken.to_json()
    assert (left.status.status_code, left.attributes["pdd.outcome"]) == (StatusCode.UNSET, "cancelled")
    assert recorder.one("open").status.status_code is recorder.one("chat m").status.status_code is StatusCode.ERROR


def test_a_second_attempt_is_linked_to_the_first(recorder: Recorder) -> None:
    request = root()
    first = request.child("attempt", attempt=1)
    link = first.link()
    first.close("failed", CapacityError("full"))
    request.child("attempt", *link, attempt=2).close("finished")
    earlier, later = recorder.named("attempt")
    assert not earlier.links
    assert [link.context.span_id for link in later.links] == [earlier.context.span_id]


async def test_interleaved_work_never_mixes(recorder: Recorder) -> None:
    async def work(number: int) -> None:
        request = root(request_id=f"{number:032x}")
        with request.active():
            await asyncio.sleep(0)
            attempt = request.child("attempt")
            with attempt.active():
                stage = arrived(carried(attempt))
                await asyncio.create_task(later(stage))
            await asyncio.sleep(0)
            assert tracing.ids()["request_id"] == f"{number:032x}"
        attempt.close("finished")
        request.close("finished")

    async def later(stage: Trace) -> None:
        with stage.during("prefill"):
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(20)))
    tops = {span.attributes["pdd.request_id"]: span for span in recorder.named("chat m")}
    attempts = {span.attributes["pdd.request_id"]: span for span in recorder.named("attempt")}
    assert len(tops) == len(attempts) == len({span.context.trace_id for span in tops.values()}) == 20
    assert all(is_child(attempts[one], tops[one]) for one in tops)
    assert all(is_child(span, attempts[span.attributes["pdd.request_id"]]) for span in recorder.named("prefill"))
    recorder.check_ended_once()
    assert not tracing.ids()


def test_a_message_that_serves_no_request_adds_nothing(recorder: Recorder) -> None:
    trace = arrived({})
    with trace.during("lookup"):
        pass
    trace.close()
    assert recorder.begun == 0


def test_a_phase_may_have_begun_and_ended_before(recorder: Recorder) -> None:
    """What an engine's step tells is told at its end."""
    trace = root()
    trace.begin("queue")
    trace.end("queue", ago_s=0.25)
    trace.begin("prefill", ago_s=0.25, tokens=3)
    trace.end("prefill")
    trace.close()
    queue, prefill = recorder.one("queue"), recorder.one("prefill")
    assert abs(queue.end_time - prefill.start_time) < 50e6
    assert 0.25e9 <= prefill.end_time - prefill.start_time < 0.5e9
    assert dict(prefill.attributes) == {"pdd.request_id": REQUEST_ID, "pdd.tokens": 3}


def test_what_outlives_a_request_is_begun_outside(recorder: Recorder) -> None:
    trace = root()
    with trace.active():
        with tracing.outside():
            assert not tracing.ids()
        assert tracing.ids()["request_id"] == REQUEST_ID
    trace.close()


def test_an_unsampled_trace_shows_no_id() -> None:
    with recorded(ALWAYS_OFF) as recorder:
        trace = root()
        stage = arrived(carried(trace))
        stage.begin("prefill")
        stage.close()
        assert trace.trace_id == ""
        trace.close("finished")
    assert recorder.begun == 0


def test_without_a_recorder_context_still_travels() -> None:
    trace = root(tracing.from_client(CLIENT))
    attempt = trace.child("attempt")
    headers = carried(attempt)
    assert headers["traceparent"] == CLIENT["traceparent"]
    assert trace.trace_id == ""
    token = otel_context.attach(tracing.extract(headers))
    try:
        assert tracing.ids() == {
            "request_id": REQUEST_ID,
            "trace_id": "0af7651916cd43dd8448eb211c80319c",
            "span_id": "b7ad6b7169203331",
        }
    finally:
        otel_context.detach(token)


def test_phases_cost_nothing_when_nothing_is_recorded() -> None:
    """Less than 2 us a call on a quiet machine; the bound leaves room for a busy one."""
    trace = root(tracing.from_client(CLIENT))
    rounds, best = 2000, float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(rounds):
            trace.begin("prefill", tokens=1)
            trace.event("prefill", "chunk", tokens=1)
            trace.end("prefill", tokens=1)
        best = min(best, (time.perf_counter() - begun) / rounds / 3)
    logging.getLogger(__name__).info("%.2f us", best * 1e6)
    assert best < 5e-6
