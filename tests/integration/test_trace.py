"""One request, one trace: spans of the gateway, the cache and whatever the stages add, over real servers."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from opentelemetry import context as otel_context
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from pdd.errors import CapacityError, UnreachableError
from pdd.mesh import subjects
from pdd.mesh.bus import Endpoint, connect
from pdd.mesh.messages import Lookup, LookupReply, Ok
from pdd.mesh.registry import Registry
from pdd.model.source import ensure_default_model
from pdd.model.tokenizer import Tokenizer, load_tokenizer
from pdd.prefix.index import PrefixIndex
from pdd.telemetry import logs, tracing
from pdd.telemetry.tracing import Trace
from pdd.types import Peer, Pipeline, Role
from services.cache.service import CacheService, Limits
from services.cache.wiring import open_redis
from services.gateway.api.app import create_app
from tests.integration.conftest import ControlPlane
from tests.integration.stages import Stages, open_stages
from tests.otlp import collector
from tests.spans import Recorder, is_child, recorded

MODEL = "tiny"
CLIENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture
def recorder() -> Generator[Recorder]:
    with recorded() as recorder:
        yield recorder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ensure_default_model())


@asynccontextmanager
async def open_client(stages: Stages, tokenizer: Tokenizer) -> AsyncGenerator[httpx.AsyncClient]:
    """The HTTP surface over the gateway of `stages`, called without a socket between."""
    app = create_app(
        stages.gateway,
        tokenizer,
        model_name=MODEL,
        created=1,
        max_model_len=512,
        default_max_tokens=64,
        default_pipeline=Pipeline.PDD,
        max_body_bytes=1 << 20,
        mesh=dict,
        ready=lambda: True,
        registry=CollectorRegistry(),
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as client:
        yield client


@asynccontextmanager
async def open_cache(control_plane: ControlPlane, unique: str) -> AsyncGenerator[None]:
    me = Peer("a", Role.CACHE, unique, secrets.token_hex(4))
    async with (
        open_redis(f"redis://127.0.0.1:{control_plane.valkey}/0", 1.0) as redis,
        connect(control_plane.nats_a, "cache") as bus,
    ):
        index = PrefixIndex(redis)
        service = CacheService(
            bus, me, index, index, Registry(time.monotonic), Limits(lookup_s=1.0, write_s=1.0), now=time.monotonic
        )
        await service.start()
        try:
            yield
        finally:
            await service.close()


def digits(count: int = 24) -> str:
    """Text that becomes one small token ID a character, which the tiny model knows."""
    return "".join(secrets.choice("0123456789") for _ in range(count))


async def post(client: httpx.AsyncClient, prompt: str, headers: dict[str, str] | None = None) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return await client.post("/v1/completions", json=body, headers=headers)


async def test_one_request_is_one_trace(
    control_plane: ControlPlane, tiny_model: Path, tokenizer: Tokenizer, recorder: Recorder, unique: str
) -> None:
    prompt = digits()
    with structlog.testing.capture_logs(logs.processors(Peer("a", Role.GATEWAY, "0", "e"))) as events:
        async with (
            open_cache(control_plane, unique),
            open_stages(control_plane, tiny_model) as stages,
            open_client(stages, tokenizer) as client,
        ):
            answer = await post(client, prompt, CLIENT)
            await stages.settle()
    assert answer.status_code == 200, answer.text
    trace_id = answer.headers["x-pdd-trace-id"]
    assert trace_id == CLIENT["traceparent"].split("-")[1]
    assert {f"{span.context.trace_id:032x}" for span in recorder.spans} == {trace_id}
    recorder.check_ended_once()

    top, attempt, lookup = (recorder.one(name) for name in (f"text_completion {MODEL}", "attempt", "prefix_lookup"))
    assert is_child(recorder.one("tokenise"), top)
    assert is_child(attempt, top)
    for name in ("prefix_lookup", "submit", "attach"):
        assert is_child(recorder.one(name), attempt)
    assert {span.attributes["pdd.role"] for span in recorder.named("reserve")} >= {"main_decode"}
    assert all(is_child(span, attempt) for span in recorder.named("reserve"))
    cached = recorder.named("lookup")  # one for each block size among P and MD
    assert [is_child(span, lookup) for span in cached] == [True, True]
    assert [span.attributes["pdd.hit_blocks"] for span in cached] == [0, 0]
    request_id = top.attributes["pdd.request_id"]
    assert {span.attributes["pdd.request_id"] for span in recorder.spans} == {request_id}
    assert attempt.attributes["pdd.outcome"] == "finished"
    assert {"first_token", "prefill_done", "kv_ready"} <= {event.name for event in attempt.events}

    transfers = [event for event in events if event["event"] == "kv_transfer_completed"]
    assert transfers
    assert all((event["request_id"], event["trace_id"]) == (request_id, trace_id) for event in transfers)
    told = json.dumps([events, [span.to_json() for span in recorder.spans]], default=str)
    assert prompt not in told
    assert ", ".join(map(str, tokenizer.encode(prompt))) not in told
    assert prompt not in answer.text


async def test_interleaved_requests_never_mix(
    control_plane: ControlPlane, tiny_model: Path, tokenizer: Tokenizer, recorder: Recorder
) -> None:
    with structlog.testing.capture_logs(logs.processors(Peer("a", Role.GATEWAY, "0", "e"))) as events:
        async with open_stages(control_plane, tiny_model) as stages, open_client(stages, tokenizer) as client:
            answers = await asyncio.gather(*(post(client, digits()) for _ in range(6)))
            await stages.settle()
    traces = {answer.headers["x-pdd-trace-id"] for answer in answers}
    assert len(traces) == 6
    ids: dict[str, set[Any]] = {trace_id: set() for trace_id in traces}
    for span in recorder.spans:
        ids[f"{span.context.trace_id:032x}"].add(span.attributes["pdd.request_id"])
    for event in events:
        if "trace_id" in event:
            ids[event["trace_id"]].add(event["request_id"])
    assert all(len(found) == 1 for found in ids.values())
    assert len({next(iter(found)) for found in ids.values()}) == 6
    recorder.check_ended_once()


async def test_waiting_for_room_is_a_phase(
    control_plane: ControlPlane, tiny_model: Path, tokenizer: Tokenizer, recorder: Recorder
) -> None:
    """Of two requests for one seat the second waits; those who refused it have said why."""
    async with (
        open_stages(control_plane, tiny_model, seats=1, pace_step_ms=20) as stages,
        open_client(stages, tokenizer) as client,
    ):
        answers = await asyncio.gather(*(post(client, digits()) for _ in range(2)))
        await stages.settle()
    assert [answer.status_code for answer in answers] == [200, 200]
    waited = recorder.one("wait_for_room")
    (attempt,) = (span for span in recorder.named("attempt") if is_child(waited, span))
    refused = [span for span in recorder.spans if span.attributes.get("error.type") == "no_capacity"]
    assert refused
    assert all(is_child(span, attempt) for span in refused)
    assert attempt.status.status_code is waited.status.status_code is StatusCode.UNSET
    recorder.check_ended_once()


async def test_a_second_attempt_is_linked_to_the_first(
    control_plane: ControlPlane, tiny_model: Path, tokenizer: Tokenizer, recorder: Recorder
) -> None:
    async with (
        open_stages(control_plane, tiny_model, max_attempts=2) as stages,
        open_client(stages, tokenizer) as client,
    ):
        lost = []

        def lose_first(subject: str, message: Any) -> tuple[Any, Any]:
            if subject.endswith("attach") and not lost:
                lost.append(subject)
                return "lose request", message
            return "deliver", message

        stages.gateway_bus.bend = lose_first
        answer = await post(client, digits())
        await stages.settle()
    assert answer.status_code == 200, answer.text
    first, second = recorder.named("attempt")
    assert [span.attributes["pdd.attempt"] for span in (first, second)] == [1, 2]
    assert (first.status.status_code, first.attributes["error.type"]) == (StatusCode.ERROR, "deadline")
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert second.attributes["pdd.outcome"] == "finished"
    top = recorder.one(f"text_completion {MODEL}")
    assert is_child(first, top)
    assert is_child(second, top)
    assert (top.status.status_code, top.attributes["pdd.attempts"]) == (StatusCode.UNSET, 2)
    recorder.check_ended_once()


async def test_a_client_who_leaves_ends_all_spans(
    control_plane: ControlPlane, tiny_model: Path, tokenizer: Tokenizer, recorder: Recorder
) -> None:
    async with (
        open_stages(control_plane, tiny_model, pace_step_ms=30) as stages,
        open_client(stages, tokenizer) as client,
    ):
        for delay_s in (0.0, 0.02, 0.1, 0.2):
            posting = asyncio.create_task(post(client, digits()))
            await asyncio.sleep(delay_s)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        await stages.settle()
    assert {span.attributes["pdd.outcome"] for span in recorder.named("attempt")} == {"cancelled"}
    recorder.check_ended_once()


async def test_context_arrives_in_handlers_and_their_tasks(
    control_plane: ControlPlane, unique: str, recorder: Recorder
) -> None:
    """A handler's work in the background goes on in the trace of its message, and says so when it asks on."""
    subject, further = f"test.{unique}.first", f"test.{unique}.second"
    heard: list[dict[str, str]] = []
    done = asyncio.Event()

    async def first(_: Ok) -> Ok:
        trace = Trace.here()
        tasks.append(asyncio.create_task(later(trace)))
        return Ok()

    async def later(trace: Trace) -> None:
        with trace.during("later"), trace.active("later"):
            await bus.request(further, Ok(), Ok)

    async def second(_: Ok) -> Ok:
        heard.append(tracing.ids())
        done.set()
        raise CapacityError("full")

    tasks: list[asyncio.Task[None]] = []
    me = Peer("a", Role.RELAY, unique, "e")
    async with connect(control_plane.nats_a, "test") as bus:
        await bus.serve(me, [Endpoint("first", subject, Ok, first), Endpoint("second", further, Ok, second)], {})
        trace = Trace.root("chat m", tracing.from_client({}), "11" * 16, kind=tracing.SpanKind.SERVER, attributes={})
        with trace.active():
            await bus.request(subject, Ok(), Ok)
        await asyncio.wait_for(done.wait(), 5)
        await asyncio.gather(*tasks, return_exceptions=True)
        trace.close()
        await bus.request(subject, Ok(), Ok)
        await asyncio.gather(*tasks, return_exceptions=True)
    later_span = recorder.one("later")
    assert is_child(later_span, recorder.one("chat m"))
    assert later_span.attributes["error.type"] == "no_capacity"
    assert heard == [
        {
            "request_id": "11" * 16,
            "trace_id": f"{later_span.context.trace_id:032x}",
            "span_id": f"{later_span.context.span_id:016x}",
        },
        {},
    ]


async def test_a_process_sends_its_spans_to_the_collector(control_plane: ControlPlane, unique: str) -> None:
    """A real one, ended by a signal before its next export is due: its last spans arrive all the same."""
    with collector() as kept:
        environment = os.environ | {
            "PDD_DC": unique,
            "PDD_NATS_URL": control_plane.nats_a,
            "PDD_REDIS_URL": f"redis://127.0.0.1:{control_plane.valkey}/0",
            "PDD_REDIS_TIMEOUT_MS": "1000",
            "OTEL_EXPORTER_OTLP_ENDPOINT": kept.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "60000",
        }
        cache = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cache", env=environment, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(20), connect(control_plane.nats_a, "test") as bus:
                token = otel_context.attach(tracing.from_client(CLIENT))
                while True:
                    try:
                        await bus.request(subjects.cache_lookup(unique), Lookup("f", 16, [bytes(16)]), LookupReply)
                        break
                    except UnreachableError:
                        await asyncio.sleep(0.1)
                otel_context.detach(token)
            assert not kept.spans
        finally:
            cache.terminate()
            told, _ = await asyncio.wait_for(cache.communicate(), 20)
        assert cache.returncode == 0
    (lookup,) = kept.spans
    assert (lookup.name, lookup.resource["service.name"]) == ("lookup", "pdd-cache")
    assert f"00-{lookup.trace_id}-{lookup.parent_id}-01" == CLIENT["traceparent"]
    assert (lookup.attributes, lookup.failed) == (
        {"pdd.blocks": 1, "pdd.hit_instances": 0, "pdd.hit_blocks": 0},
        False,
    )
    events = [json.loads(line) for line in told.splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("process_started", "process_stopped")
    assert {event["dc"] for event in events} == {unique}
