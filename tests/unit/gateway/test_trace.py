"""The root span of an exchange: what it says, whose child it is, and that however an answer ends it is ended once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import Any

import pytest
import structlog
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry
from starlette.types import Message

from pdd.errors import CapacityError, PddError
from pdd.model.tokenizer import Tokenizer
from pdd.types import FinishReason, Pipeline
from services.gateway.api.app import create_app
from services.gateway.generation import Emission, GenerationRequest
from tests.spans import Recorder, is_child, recorded
from tests.unit.gateway.conftest import MAX_MODEL_LEN, MODEL, Script, ScriptedGenerator
from tests.unit.gateway.scripts import emit, endless, fail

SECRET = "zebra quartz 4711"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 8}
LEFT = 499


@pytest.fixture
def recorder() -> Generator[Recorder]:
    with recorded() as recorder:
        yield recorder


class Client:
    """Talks to the application without a socket between: one exchange a call, left when told."""

    def __init__(self, tokenizer: Tokenizer, script: Script) -> None:
        self.generator = ScriptedGenerator(script)
        self._app = create_app(
            self.generator,
            tokenizer,
            model_name=MODEL,
            created=1,
            max_model_len=MAX_MODEL_LEN,
            default_max_tokens=64,
            default_pipeline=Pipeline.PDD,
            max_body_bytes=1 << 20,
            mesh=dict,
            ready=lambda: True,
            registry=CollectorRegistry(),
        )

    async def post(
        self, body: Any, headers: dict[str, str] | None = None, leave_after: int | None = None
    ) -> tuple[int, dict[str, str]]:
        """Status (499 if left before one came) and headers. Leaves after so many pieces of the answer."""
        status, answered, pieces = LEFT, dict[str, str](), 0
        left = asyncio.Event()
        body_sent = False
        if leave_after == 0:
            asyncio.get_running_loop().call_later(0.01, left.set)

        async def receive() -> Message:
            nonlocal body_sent
            if not body_sent:
                body_sent = True
                return {"type": "http.request", "body": json.dumps(body).encode()}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, pieces
            if message["type"] == "http.response.start":
                status = message["status"]
                answered.update((name.decode(), value.decode()) for name, value in message["headers"])
                return
            pieces += 1
            if pieces == leave_after:
                left.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        }
        await self._app(scope, receive, send)
        return status, answered


async def test_an_answer(recorder: Recorder, tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, emit([100, 101, 102], FinishReason.STOP))
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    status, headers = await client.post(CHAT, parent)
    top, tokenise = recorder.one(f"chat {MODEL}"), recorder.one("tokenise")
    assert status == 200
    assert headers["x-pdd-trace-id"] == "0af7651916cd43dd8448eb211c80319c" == f"{top.context.trace_id:032x}"
    assert f"{top.parent.span_id:016x}" == "b7ad6b7169203331"
    assert top.kind is SpanKind.SERVER
    assert is_child(tokenise, top)
    (request,) = client.generator.requests
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pdd",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
        "pdd.request_id": request.request_id,
        "pdd.outcome": "stop",
        "pdd.ttft_ms": 5.0,
    }
    assert expected.items() <= dict(top.attributes).items()
    assert top.status.status_code is StatusCode.UNSET
    recorder.check_ended_once()
    assert SECRET not in "".join(span.to_json() for span in recorder.spans)


async def test_a_client_that_wants_no_trace_gets_none(recorder: Recorder, tokenizer: Tokenizer) -> None:
    client = Client(tokenizer, emit([100]))
    _, headers = await client.post(CHAT, {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"})
    assert "x-pdd-trace-id" not in headers
    assert not recorder.spans


@pytest.mark.parametrize(
    ("script", "body", "leave_after", "status", "failed", "error", "outcome"),
    [
        pytest.param(emit([100]), {**CHAT, "top_p": 2}, None, 400, False, "invalid_value", "error", id="refused"),
        pytest.param(emit([100]), {**CHAT, "model": "x"}, None, 404, False, "model_not_found", "error", id="unknown"),
        pytest.param(fail(CapacityError("full")), CHAT, None, 503, True, "no_capacity", "error", id="no room"),
        pytest.param(fail(ValueError(SECRET)), CHAT, None, 500, True, "internal", "error", id="broken"),
        pytest.param(endless(100), {**CHAT, "stream": True}, 3, 499, False, None, "cancelled", id="left"),
        pytest.param(
            fail(PddError("lost"), [100]), {**CHAT, "stream": True}, None, 200, True, "internal", "error", id="cut off"
        ),
    ],
)
async def test_other_endings(
    recorder: Recorder,
    tokenizer: Tokenizer,
    script: Script,
    body: Any,
    leave_after: int | None,
    status: int,
    failed: bool,
    error: str | None,
    outcome: str,
) -> None:
    await Client(tokenizer, script).post(body, leave_after=leave_after)
    top = recorder.one(f"chat {MODEL}")
    assert top.attributes["http.response.status_code"] == status
    assert top.attributes.get("error.type") == error
    assert top.attributes["pdd.outcome"] == outcome
    assert (top.status.status_code is StatusCode.ERROR) is failed
    assert SECRET not in "".join(span.to_json() for span in recorder.spans)
    recorder.check_ended_once()


async def test_a_thousand_streams_however_they_end(
    recorder: Recorder, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Finished, cut short by a stop string, left at once or in the middle, failed: all at the same time."""

    def script(request: GenerationRequest) -> AsyncIterator[Emission]:
        return scripts[len(client.generator.requests) % len(scripts)](request)

    scripts = [emit(range(100, 108), FinishReason.LENGTH), endless(100), endless(100, first=0), fail(PddError("x"))]
    client = Client(tokenizer, script)
    text = tokenizer.backend.decode([100, 100])

    async def one(number: int) -> None:
        body = {**CHAT, "stream": True} | ({"stop": text} if number % 3 == 0 else {})
        leave_after = None if number % 5 == 0 else number % 4
        work: Awaitable[object] = client.post(body, leave_after=leave_after)
        try:
            await asyncio.wait_for(work, 0.3 + number % 7 / 100)
        except TimeoutError:
            timed_out.append(number)

    timed_out: list[int] = []
    with structlog.testing.capture_logs() as events:
        for start in range(0, 1000, 50):
            await asyncio.gather(*(one(number) for number in range(start, start + 50)))
    tops = recorder.named(f"chat {MODEL}")
    assert len(tops) == 1000
    assert timed_out
    assert {span.attributes["pdd.outcome"] for span in tops} >= {"length", "stop", "cancelled", "error"}
    known = {span.attributes["pdd.request_id"]: span for span in tops}
    assert len(known) == len({span.context.trace_id for span in tops}) == 1000
    assert all(is_child(span, known[span.attributes["pdd.request_id"]]) for span in recorder.named("tokenise"))
    recorder.check_ended_once()
    assert not caplog.records, "nobody complains of a context"
    assert {event["event"] for event in events} <= {"request_failed"}
