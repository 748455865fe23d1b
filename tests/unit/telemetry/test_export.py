"""Spans leave for a collector if one is named, and a dead one, or one that hangs, holds up nobody."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator

import pytest
import structlog
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from pdd.telemetry import export
from pdd.telemetry.tracing import Trace
from pdd.types import Peer, Role
from tests.otlp import collector

ME = Peer("a", Role.PREFILL, "3", "e" * 16)


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")


def one_trace(name: str = "chat m") -> None:
    trace = Trace.root(name, Context(), "11" * 16, kind=SpanKind.SERVER, attributes={})
    trace.begin("tokenise", tokens=3, role=Role.PREFILL)
    trace.close("finished")


def test_spans_arrive_with_who_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=k")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    with collector() as kept:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", kept.endpoint)
        with export.exporting(ME):
            one_trace()
        child, top = kept.spans
        one_trace("after")
    assert (top.name, top.parent_id, child.name, child.parent_id) == ("chat m", "", "tokenise", top.span_id)
    assert child.trace_id == top.trace_id
    assert child.attributes == {
        "pdd.tokens": 3,
        "pdd.role": "prefill",
        "pdd.request_id": "11" * 16,
        "pdd.outcome": "finished",
    }
    assert {key.lower(): value for key, value in kept.headers[0].items()}["x-key"] == "k"
    wanted = {"service.name": "pdd-prefill", "pdd.dc": "a", "deployment.environment.name": "lab"}
    assert wanted.items() <= top.resource.items()
    assert top.resource["service.instance.id"] == f"a/prefill/3/{'e' * 16}"


def test_the_standard_variables_have_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with collector() as kept:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{kept.endpoint}/v1/traces")
        with export.exporting(ME):
            one_trace()
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        with export.exporting(ME):
            one_trace("unsampled")
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        with export.exporting(ME):
            one_trace("disabled")
        assert [span.name for span in kept.spans] == ["tokenise", "chat m"]
        assert kept.spans[0].resource["service.name"] == "mine"


def test_without_an_endpoint_the_sdk_is_not_even_imported() -> None:
    program = (
        "import sys, threading\n"
        "from pdd.telemetry import export, tracing\n"
        "from pdd.types import Peer, Role\n"
        "with export.exporting(Peer('a', Role.PREFILL, '0', 'e')):\n"
        "    assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
        "    assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.fixture
def hanging() -> Generator[str]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []
        stop = threading.Event()
        listener.settimeout(0.05)

        def accept() -> None:
            while not stop.is_set():
                try:
                    held.append(listener.accept()[0])
                except TimeoutError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        thread.join()
        for one in held:
            one.close()


@pytest.fixture
def dead() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["dead", "hanging"])
def test_a_collector_in_trouble_holds_up_nobody(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """More spans than the queue holds: they are dropped at once, counted, and the end waits only a little."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", request.getfixturevalue(kind))
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setattr(export, "_FLUSH_S", 0.5)
    with structlog.testing.capture_logs() as events:
        begun = time.perf_counter()
        with export.exporting(ME):
            slowest = 0.0
            for _ in range(500):
                one = time.perf_counter()
                one_trace()
                slowest = max(slowest, time.perf_counter() - one)
            serving = time.perf_counter() - begun
        ending = time.perf_counter() - begun - serving
    assert slowest < 0.5
    assert serving < 3
    assert ending < 2
    lost = [event for event in events if event["event"] == "spans_lost"]
    assert lost[-1]["lost"] == 1000
    assert lost[-1]["sent"] == 0
    assert len(events) < 20, "a flood"
    assert capfd.readouterr().err == ""
