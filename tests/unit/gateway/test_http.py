"""The surface byte by byte: refusals, headers, events, operations, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.middleware.base import BaseHTTPMiddleware

from pdd.errors import UnreachableError
from pdd.model.tokenizer import Tokenizer
from pdd.types import FinishReason, Pipeline
from services.gateway.api.app import create_app
from services.gateway.generation import Emission, GenerationRequest
from tests.unit.gateway.conftest import MAX_BODY_BYTES, MAX_MODEL_LEN, MODEL, ScriptedGenerator, Serve, Server
from tests.unit.gateway.scripts import emit, endless, fail

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "hi"}


async def post(server: Server, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        return await client.post(path, content=content, headers=headers)


REFUSED = [
    ("/v1/chat/completions", {**CHAT, **change}, param)
    for change, param in [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "messages[0].name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"model": None}, "model"),
    ]
] + [
    ("/v1/completions", {**TEXT, **change}, param)
    for change, param in [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "b"]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 0}, "logprobs"),
    ]
]


async def test_refusals_name_the_field(serve: Serve) -> None:
    async with serve(emit([40])) as server:
        for path, body, param in REFUSED:
            response = await post(server, path, body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), body
            assert error["type"] == "invalid_request_error"
            assert set(error) == {"message", "type", "param", "code"}
        assert server.generator.requests == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"model": ', 400),
        (b"[]", 400),
        (b"", 400),
        (b"\xff\xfe", 400),
        (b'{"model": "smol", "prompt": "\\ud800"}', 400),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
    ids=["truncated", "array", "empty", "not utf-8", "lone surrogate", "deep", "large"],
)
async def test_bodies_that_are_no_request(serve: Serve, body: bytes, status: int) -> None:
    async with serve(emit([40])) as server:
        response = await post(server, "/v1/completions", body)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert (await post(server, "/v1/completions", TEXT)).status_code == 200


async def test_what_asks_for_nothing_is_accepted(serve: Serve) -> None:
    nothing = {
        "n": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "tools": [],
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "stop": None,
        "max_tokens": None,
        "no_such_field": None,
        "top_k": -1,
        "stream_options": None,
    }
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "c"}, {"role": "user", "content": parts, "name": None}]
    async with serve(emit([40])) as server:
        response = await post(server, "/v1/chat/completions", {**CHAT, **nothing, "messages": messages})
        assert response.status_code == 200, response.text
        assert server.generator.requests[0].sampling.top_k == 0
        assert server.generator.requests[0].sampling.temperature == 1.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("excess", [-1, 0, 1, 9 * MAX_MODEL_LEN])
async def test_context_window(serve: Serve, stream: bool, excess: int) -> None:
    prompt = [40] * (MAX_MODEL_LEN + excess)
    async with serve(emit([40], FinishReason.LENGTH)) as server:
        response = await post(server, "/v1/completions", {**TEXT, "prompt": prompt, "stream": stream})
        if excess < 0:
            assert response.status_code == 200
            assert server.generator.requests[0].stop.max_tokens == 1
            return
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
        assert str(MAX_MODEL_LEN) in error["message"]
        assert str(len(prompt)) in error["message"]
        assert server.generator.requests == []


async def test_limit_over_the_window_says_both_counts(serve: Serve) -> None:
    async with serve(emit([40])) as server:
        body = {**TEXT, "prompt": [40] * 200, "max_tokens": 57}
        error = (await post(server, "/v1/completions", body)).json()["error"]
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
        assert all(count in error["message"] for count in ("200", "57", str(MAX_MODEL_LEN)))
        assert (await post(server, "/v1/completions", {**body, "max_tokens": 56})).status_code == 200


@pytest.mark.parametrize(("options", "asked"), [({}, False), ({"include_usage": False}, False), (None, False)])
async def test_usage_only_if_asked_for(serve: Serve, options: Any, asked: bool) -> None:
    async with serve(emit([40, 41])) as server:
        response = await post(server, "/v1/completions", {**TEXT, "stream": True, "stream_options": options})
    assert ("usage" in response.text) is asked


async def test_events(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(emit([*tokenizer.encode("a b"), 2])) as server:
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        response = await post(server, "/v1/chat/completions", body, {"x-request-id": "mine"})
        own = server.generator.requests[0].request_id
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == "mine"
    events = response.text.split("\n\n")
    assert (events[-2], events[-1]) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    choices = [chunk["choices"] for chunk in chunks]
    assert [choice[0]["delta"] for choice in choices[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": " b"},
        {},
    ]
    assert [choice[0]["finish_reason"] for choice in choices[:-1]] == [None, None, None, "stop"]
    assert choices[-1] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{own}"}


async def test_error_event_names_the_request_and_ends_the_stream(serve: Serve) -> None:
    async with serve(fail(UnreachableError("gone"), after=[40])) as server:
        response = await post(server, "/v1/completions", {**TEXT, "stream": True})
        own = server.generator.requests[0].request_id
    events = response.text.strip().split("\n\n")
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert (error["type"], error["code"], error["request_id"]) == ("server_error", "unreachable", own)
    assert sum("error" in event for event in events) == 1
    assert "[DONE]" not in response.text
    assert not any(json.loads(event.removeprefix("data: "))["choices"][0]["finish_reason"] for event in events[:-1])


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_tell_how_the_request_went(serve: Serve, stream: bool) -> None:
    wishes = {"x-pdd-pipeline": "pdd", "x-pdd-handoff-at": "12", "x-request-id": "not one word"}
    async with serve(emit([40])) as server:
        response = await post(server, "/v1/completions", {**TEXT, "stream": stream}, wishes)
        request = server.generator.requests[0]
    assert (request.pipeline, request.handoff_at) == (Pipeline.PDD, 12)
    assert response.headers["x-request-id"] == request.request_id
    assert int(request.request_id, 16) < 2**128
    assert len(request.request_id) == 32
    expected = {
        "x-pdd-pipeline": "pdd",
        "x-pdd-reason": "wan busy",
        "x-pdd-attempts": "1",
        "x-pdd-prefill": "a/0",
        "x-pdd-ttft-ms": "5.0",
        "x-pdd-prefill-ms": "3.5",
    }
    assert {name: response.headers[name] for name in expected} == expected
    assert "ttft;dur=5.0" in response.headers["server-timing"]
    assert ("total;dur=9.0" in response.headers["x-pdd-timings"]) is not stream
    assert "x-pdd-relay" not in response.headers


@pytest.mark.parametrize(
    ("header", "value"),
    [("x-pdd-pipeline", "fast"), ("x-pdd-handoff-at", "0"), ("x-pdd-handoff-at", "-3"), ("x-pdd-handoff-at", "1.5")],
)
async def test_header_wishes_that_make_no_sense(serve: Serve, header: str, value: str) -> None:
    async with serve(emit([40])) as server:
        response = await post(server, "/v1/completions", TEXT, {header: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, header)


async def test_generation_without_an_end_is_an_error(serve: Serve) -> None:
    async def script(_: GenerationRequest) -> AsyncIterator[Emission]:
        yield Emission([40])

    async with serve(script) as server:
        assert (await post(server, "/v1/completions", TEXT)).status_code == 500


async def request_by_hand(server: Server, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a bare socket and leave the answer unread."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("abrupt", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize(
    ("stream", "tokens"), [(False, 0), (False, 5), (True, 0), (True, 5)], ids=["whole-0", "whole-5", "sse-0", "sse-5"]
)
async def test_client_that_leaves_ends_the_generation(serve: Serve, stream: bool, tokens: int, abrupt: bool) -> None:
    async with serve(endless(40, first=tokens)) as server:
        reader, writer = await request_by_hand(server, {**TEXT, "stream": stream, "max_tokens": 100})
        if stream and tokens:
            await asyncio.wait_for(reader.readuntil(b"\n\n"), 5)
        else:
            async with asyncio.timeout(5):
                while not server.generator.requests:  # noqa: ASYNC110 (the other side of a socket)
                    await asyncio.sleep(0.005)
        assert not server.generator.left.is_set()
        if abrupt:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await asyncio.wait_for(server.generator.left.wait(), 0.5)
        async with httpx.AsyncClient(base_url=server.url) as client:
            metrics = (await client.get("/metrics")).text
    assert 'pdd_gateway_requests_total{endpoint="completions",finish="cancelled",status="499"} 1.0' in metrics
    assert "pdd_gateway_requests_in_flight 0.0" in metrics


async def test_slow_reader_holds_the_generation_back(serve: Serve, tokenizer: Tokenizer) -> None:
    """What the client does not read is not produced without bound."""
    longest = max(range(tokenizer.vocab_size), key=lambda id_: len(tokenizer.backend.decode([id_])))
    emitted = 0

    async def flood(_: GenerationRequest) -> AsyncIterator[Emission]:
        nonlocal emitted
        while True:
            emitted += 1
            yield Emission([longest] * 100)
            await asyncio.sleep(0)

    async with serve(flood) as server:
        _, writer = await request_by_hand(server, {**TEXT, "stream": True, "max_tokens": 100})
        seen = -1
        async with asyncio.timeout(20):
            while seen != emitted or seen <= 0:
                seen = emitted
                await asyncio.sleep(0.3)
        writer.transport.abort()
        await asyncio.wait_for(server.generator.left.wait(), 0.5)


@pytest.mark.parametrize("stream", [False, True])
async def test_shutdown_ends_what_still_runs_with_one_error(serve: Serve, stream: bool) -> None:
    async with serve(endless(40, first=3)) as server:
        reader, _ = await request_by_hand(server, {**TEXT, "stream": stream, "max_tokens": 100})
        async with asyncio.timeout(5):
            while not server.generator.requests:  # noqa: ASYNC110 (the other side of a socket)
                await asyncio.sleep(0.005)
        generator = server.generator
    answer = (await asyncio.wait_for(reader.read(), 5)).decode()
    assert generator.left.is_set()
    assert answer.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
    assert answer.count("shutting_down") == 1
    assert "[DONE]" not in answer


async def test_long_prompt_does_not_hold_up_others(serve: Serve) -> None:
    async with serve(emit([40])) as server:
        long = asyncio.create_task(post(server, "/v1/completions", {**TEXT, "prompt": "some words 12 안녕 " * 25_000}))
        loop, worst = asyncio.get_running_loop(), 0.0
        while not long.done():
            start = loop.time()
            await asyncio.sleep(0.001)
            worst = max(worst, loop.time() - start)
        response = await long
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert worst < 0.2


async def test_operations(serve: Serve) -> None:
    async with serve(emit([40, 41, 2])) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        await post(server, "/v1/completions", TEXT)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/mesh")).json() == {"instances": []}
        assert (await client.get("/version")).json()["version"]
        metrics = (await client.get("/metrics")).text
        missing = await client.get("/v1/embeddings")
        wrong = await client.get("/v1/completions")
    assert 'pdd_gateway_requests_total{endpoint="completions",finish="stop",status="200"} 1.0' in metrics
    assert 'pdd_gateway_routes_total{path="",pipeline="pdd",reason="wan busy"} 1.0' in metrics
    assert "pdd_gateway_generation_tokens_total 3.0" in metrics
    assert "pdd_gateway_prompt_tokens_total 1.0" in metrics
    assert "pdd_gateway_time_to_first_token_seconds_count 1.0" in metrics
    assert "pdd_gateway_time_to_second_token_seconds_count 1.0" in metrics
    assert "pdd_gateway_inter_token_latency_seconds_count 2.0" in metrics
    assert "pdd_gateway_e2e_request_latency_seconds_count 1.0" in metrics
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_no_middleware_reads_behind_our_back(tokenizer: Tokenizer) -> None:
    """`BaseHTTPMiddleware` has a reader of its own on the receive channel, which hides disconnects."""
    app = create_app(
        ScriptedGenerator(emit([40])),
        tokenizer,
        model_name=MODEL,
        created=0,
        max_model_len=16,
        default_max_tokens=2048,
        default_pipeline=Pipeline.PDD,
        max_body_bytes=1,
        mesh=dict,
        ready=bool,
        registry=CollectorRegistry(),
    )
    layer: Any = app.build_middleware_stack()
    while layer is not None:
        assert not isinstance(layer, BaseHTTPMiddleware)
        layer = getattr(layer, "app", None)
