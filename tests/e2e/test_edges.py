"""Where answers end and where they switch: every combination gives the same tokens, the right reason and usage."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from pdd.local.mesh import LocalMesh
from pdd.model.tokenizer import Tokenizer
from tests.e2e.conftest import Client, books_balance
from tests.e2e.prompts import prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

K = 5
TOKENS = 12


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> list[int]:
    return prompts(tokenizer)[5]


async def straight(client: Client, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    """What the answer is without any switch between datacenters."""
    return (await client.complete(prompt, max_tokens=tokens, pipeline="pd-local", ignore_eos=True)).ids


@pytest.mark.parametrize("tokens", [1, 2, K, K + 1])
async def test_token_limits_around_a_handoff(client: Client, prompt: list[int], tokens: int) -> None:
    expected = await straight(client, prompt)
    answer = await client.complete(prompt, max_tokens=tokens, handoff_at=K, ignore_eos=True)
    assert answer.ids == expected[:tokens]
    assert answer.finish == "length"
    assert answer.usage["completion_tokens"] == tokens
    assert answer.usage["prompt_tokens"] == len(prompt)
    assert answer.report["main_decode_tokens"] == max(tokens - K, 0)
    await books_balance(client)


@pytest.mark.parametrize(("last", "by"), [(1, "prefill"), (K, "relay"), (K + 1, "main_decode")])
async def test_an_end_token_at_each_border(
    client: Client, tokenizer: Tokenizer, prompt: list[int], last: int, by: str
) -> None:
    """The end token is Prefill's first, RelayDecode's last, MainDecode's first."""
    expected = await straight(client, prompt)
    end = expected[last - 1]
    assert end not in expected[: last - 1], "the prompt must be one whose answer does not repeat this token earlier"
    answer = await client.complete(prompt, max_tokens=TOKENS, handoff_at=K, stop_token_ids=[end])
    assert answer.ids == expected[:last]
    assert answer.finish == "stop"
    assert answer.text == tokenizer.backend.decode(expected[: last - 1])
    assert answer.usage["completion_tokens"] == last
    assert answer.report[f"{by}_tokens"] >= 1
    if by == "prefill":
        assert answer.report["relay_tokens"] == answer.report["main_decode_tokens"] == 0
    await books_balance(client)


async def test_a_stop_string_across_the_handoff(client: Client, tokenizer: Tokenizer, prompt: list[int]) -> None:
    """A string that begins in RelayDecode's last token and ends in MainDecode's first one stops the answer."""
    expected = await straight(client, prompt)
    before, through = tokenizer.backend.decode(expected[: K - 1]), tokenizer.backend.decode(expected[: K + 1])
    stop = through[len(before) :]
    answer = await client.complete(prompt, max_tokens=TOKENS, handoff_at=K, stop=[stop], ignore_eos=True)
    assert answer.finish == "stop"
    assert answer.text == through[: through.index(stop)]
    await books_balance(client)


async def test_a_client_that_leaves_frees_everything(client: Client, prompt: list[int]) -> None:
    """At once, with Prefill's token, with some of RelayDecode's: long before the end in any case."""
    how = {"max_tokens": 400, "ignore_eos": True, "handoff_at": 200}
    hasty = asyncio.create_task(client.stream(prompt * 4, **how))
    await asyncio.sleep(0.05)
    hasty.cancel()
    for leaving in [hasty, *[await client.streaming(tokens, prompt * 4, **how) for tokens in (1, 2, 20)]]:
        leaving.cancel()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
    await books_balance(client)


def test_openais_client_works_unchanged(mesh: LocalMesh) -> None:
    client = openai.OpenAI(base_url=f"{mesh.gateway_url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hello"}, 400, "messages"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 9000}, 400, "max_tokens"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
    ],
)
async def test_bad_input_is_refused_by_name(client: Client, change: dict[str, object], status: int, param: str) -> None:
    body = {"model": client.model_name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **change}
    response = await client.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}


async def test_malformed_json_and_a_prompt_beyond_the_context(client: Client) -> None:
    broken = await client.http.post("/v1/chat/completions", content=b'{"model": ')
    assert broken.status_code == 400
    for stream in (False, True):
        body = {"model": client.model_name, "prompt": [5] * 8192, "max_tokens": 1, "stream": stream}
        response = await client.http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_more_than_the_pool_holds_at_once_waits(client: Client, prompt: list[int]) -> None:
    """Each may need 6,000 tokens of a pool of 12,288: the third waits until one of the others has ended."""
    expected = await straight(client, prompt)
    answers = await asyncio.gather(
        *(client.complete(prompt, max_tokens=6000, stop_token_ids=[expected[3]], handoff_at=2) for _ in range(3))
    )
    assert [answer.ids for answer in answers] == [expected[: expected.index(expected[3]) + 1]] * 3
    await books_balance(client)


async def test_operational_endpoints(client: Client, mesh: LocalMesh) -> None:
    for path in ("/health", "/ready", "/version", "/v1/models"):
        assert (await client.http.get(path)).status_code == 200
    metrics = (await client.http.get("/metrics")).text
    assert "pdd_" in metrics
    assert {one["role"] for one in await client.instances()} == {"prefill", "relay", "main_decode"}
    async with httpx.AsyncClient(base_url=mesh.gateway_url) as http:
        assert (await http.get("/mesh")).json()["cache"] == "up"
