"""The official client against a real server: both endpoints, streamed and not, and its error classes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from pdd.errors import CapacityError, DeadlineError, ModelError, TooLargeError, UnreachableError
from pdd.model.tokenizer import Tokenizer
from pdd.types import FinishReason, Pipeline
from tests.unit.gateway.conftest import MAX_MODEL_LEN, MODEL, Serve
from tests.unit.gateway.scripts import emit, fail

TEXT = "Hello 안녕 👩\u200d👧 done"
CHAT = [{"role": "user", "content": "hi"}]


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)


async def test_chat_whole(serve: Serve, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(TEXT), 2]
    async with serve(emit(ids, each=3)) as server, client(server.url) as openai_client:
        answer = await openai_client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=50, temperature=0.5, top_p=0.9, seed=7, extra_body={"top_k": 5}
        )
        request = server.generator.requests[0]
    assert answer.object == "chat.completion"
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", TEXT)
    assert answer.choices[0].finish_reason == "stop"
    prompt_tokens = len(tokenizer.render_chat(CHAT))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, len(ids))
    assert answer.usage.total_tokens == prompt_tokens + len(ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.pdd["request_id"] == request.request_id == answer.id.removeprefix("chatcmpl-")
    assert answer.usage.pdd["total_ms"] == 9.0
    assert request.prompt == tokenizer.render_chat(CHAT)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 7)
    assert (request.stop.max_tokens, request.stop.stop_token_ids) == (50, tokenizer.stop_token_ids)
    assert request.pipeline is Pipeline.PDD


async def test_chat_stream_equals_whole(serve: Serve, tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(TEXT), 2]
    async with serve(emit(ids)) as server, client(server.url) as openai_client:
        whole = await openai_client.chat.completions.create(model=MODEL, messages=CHAT)
        stream = await openai_client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
    assert [getattr(chunks[-1].usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]


@pytest.mark.parametrize("prompt_kind", ["text", "ids", "list of one text", "list of one list"])
async def test_completions(serve: Serve, tokenizer: Tokenizer, prompt_kind: str) -> None:
    ids = tokenizer.encode("Once upon")
    prompt = {"text": "Once upon", "ids": ids, "list of one text": ["Once upon"], "list of one list": [ids]}
    output = tokenizer.encode(" a time there")
    async with serve(emit(output, FinishReason.LENGTH)) as server, client(server.url) as openai_client:
        whole = await openai_client.completions.create(model=MODEL, prompt=prompt[prompt_kind])
        stream = await openai_client.completions.create(model=MODEL, prompt=prompt[prompt_kind], stream=True)
        chunks = [chunk async for chunk in stream]
        assert [request.prompt for request in server.generator.requests] == [ids, ids]
        assert server.generator.requests[0].stop.max_tokens == 16
    assert (whole.object, whole.choices[0].text) == ("text_completion", " a time there")
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", len(output))
    assert "".join(chunk.choices[0].text for chunk in chunks) == " a time there"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("each", [1, 2, 7])
async def test_stop_string_ends_the_generation(serve: Serve, tokenizer: Tokenizer, each: int) -> None:
    ids = tokenizer.encode("one two three four five six")
    async with serve(emit(ids, each=each)) as server, client(server.url) as openai_client:
        request = {"model": MODEL, "messages": CHAT, "stop": ["e fo", "zzz"]}
        whole = await openai_client.chat.completions.create(**request)
        assert server.generator.left.is_set()
        options = {"include_usage": True}
        stream = await openai_client.chat.completions.create(**request, stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert whole.choices[0].message.content == text == "one two thre"
    assert whole.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 4


async def test_stop_ids_are_the_models_unless_ignored(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(emit([40])) as server, client(server.url) as openai_client:
        for extra in ({"stop_token_ids": [77]}, {"stop_token_ids": [77], "ignore_eos": True}):
            await openai_client.completions.create(model=MODEL, prompt="x", extra_body=extra)
        stops = [request.stop.stop_token_ids for request in server.generator.requests]
        seeds = {request.sampling.seed for request in server.generator.requests}
    assert stops == [tokenizer.stop_token_ids | {77}, {77}]
    assert len(seeds) == 2
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_window_bounds_the_answer(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve(emit([40], FinishReason.LENGTH)) as server, client(server.url) as openai_client:
        await openai_client.chat.completions.create(model=MODEL, messages=CHAT)
        await openai_client.completions.create(model=MODEL, prompt=[40] * (MAX_MODEL_LEN - 1))
        limits = [request.stop.max_tokens for request in server.generator.requests]
    assert limits == [MAX_MODEL_LEN - len(tokenizer.render_chat(CHAT)), 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (CapacityError("no prefill with room"), openai.InternalServerError, "no_capacity"),
        (UnreachableError("nobody at B"), openai.InternalServerError, "unreachable"),
        (DeadlineError("waited 30 s"), openai.InternalServerError, "deadline"),
        (TooLargeError("needs 9000 tokens"), openai.BadRequestError, "too_large"),
    ],
)
async def test_errors_before_the_first_token_are_statuses(
    serve: Serve, error: Exception, expected: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    async with serve(fail(error)) as server, client(server.url) as openai_client:
        with pytest.raises(expected) as caught:
            await openai_client.chat.completions.create(model=MODEL, messages=CHAT, stream=stream)
        assert server.generator.left.is_set()
    assert caught.value.code == code
    inside = code in ("unreachable", "deadline")
    assert (str(error) in caught.value.body["message"]) is not inside
    unavailable = caught.value.status_code == 503
    assert unavailable is (code != "too_large")
    assert (caught.value.response.headers.get("retry-after") is not None) is unavailable


@pytest.mark.parametrize("error", [ModelError("weights at /secret"), RuntimeError("secret")])
async def test_other_errors_tell_nothing(serve: Serve, error: Exception) -> None:
    async with serve(fail(error)) as server, client(server.url) as openai_client:
        with pytest.raises(openai.InternalServerError) as caught:
            await openai_client.chat.completions.create(model=MODEL, messages=CHAT)
    assert caught.value.status_code == 500
    assert "secret" not in caught.value.response.text


async def test_error_in_a_stream_is_its_only_ending(serve: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    chunks: list[Any] = []

    async def read(stream: AsyncIterator[Any]) -> None:
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 (what came before the error counts)

    script = fail(UnreachableError("main decode is gone"), after=ids)
    async with serve(script) as server, client(server.url) as openai_client:
        stream = await openai_client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
        with pytest.raises(openai.APIError, match="cannot be reached"):
            await read(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)


async def test_unknown_model(serve: Serve) -> None:
    async with serve(emit([40])) as server, client(server.url) as openai_client:
        with pytest.raises(openai.NotFoundError) as caught:
            await openai_client.chat.completions.create(model="gpt-4o", messages=CHAT)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert [model.id async for model in await openai_client.models.list()] == [MODEL]
        assert (await openai_client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await openai_client.models.retrieve("gpt-4o")
        assert server.generator.requests == []
