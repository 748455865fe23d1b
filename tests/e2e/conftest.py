"""A whole mesh of real processes, and what it must reproduce: one engine, and transformers, on the same weights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from pdd.local.mesh import LocalMesh
from pdd.local.plan import MeshOptions
from pdd.model.source import ensure_default_model
from pdd.model.tokenizer import Tokenizer, load_tokenizer
from tests.otlp import Collector, collector

SETTLE_S = 5.0
OPTIONS = MeshOptions(
    main_decode=2,
    dtype="float32",
    pool_tokens=12_288,
    wan_mbps=500.0,
    wan_delay_ms=5.0,
    wan_jitter_ms=0.5,
    gateway_port=0,
)
PATIENT = {"PDD_CACHE_TIMEOUT_MS": "2000", "PDD_REDIS_TIMEOUT_MS": "2000", "OTEL_BSP_SCHEDULE_DELAY": "100"}
"""On a busy machine look-ups take longer than the default lets them, and then say nothing of what is cached."""


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model's file."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    """Its tokenizer."""
    return load_tokenizer(model)


@pytest.fixture(scope="session")
def traces() -> Iterator[Collector]:
    """Takes the spans of the mesh."""
    with collector() as running:
        yield running


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[LocalMesh]:
    """All services, two NATS servers, Valkey and a shaped WAN, in fp32."""
    options = msgspec.structs.replace(OPTIONS, env=PATIENT | {"OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint})
    with LocalMesh(options, tmp_path_factory.mktemp("mesh")) as running:
        yield running


@dataclass
class Answer:
    """A completion through the mesh."""

    ids: list[int]
    text: str
    finish: str
    usage: dict[str, Any]
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    @property
    def report(self) -> dict[str, Any]:
        """The usage extension."""
        return self.usage["pdd"]


class Client:
    """Completions by token IDs, for comparison with an engine's."""

    def __init__(self, http: httpx.AsyncClient, model_name: str) -> None:
        self.http = http
        self.model_name = model_name

    async def complete(self, prompt: list[int], *, max_tokens: int, **how: Any) -> Answer:
        """A completion in one piece. For `how` see `_request`."""
        body, headers = self._request(prompt, max_tokens, **how)
        response = await self.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        choice = answer["choices"][0]
        return Answer(choice["token_ids"], choice["text"], choice["finish_reason"], answer["usage"], response.headers)

    async def stream(
        self, prompt: list[int], *, max_tokens: int, saw: Callable[[int], None] = lambda tokens: None, **how: Any
    ) -> Answer:
        """A streamed completion; it must end once, and well. `saw` hears of each piece how many tokens there are."""
        body, headers = self._request(prompt, max_tokens, stream=True, stream_options={"include_usage": True}, **how)
        answer = Answer([], "", "", {})
        finishes: list[str] = []
        async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            answer.headers = response.headers
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    answer.ids += choice.get("token_ids") or []
                    answer.text += choice["text"]
                    finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
                answer.usage = chunk.get("usage") or answer.usage
                saw(len(answer.ids))
        (answer.finish,) = finishes
        return answer

    async def streaming(
        self, tokens: int, prompt: list[int], *, max_tokens: int, within_s: float = 60.0, **how: Any
    ) -> asyncio.Task[Answer]:
        """A streamed completion that goes on, and of which the client has `tokens` tokens already."""
        seen = asyncio.Event()

        def saw(count: int) -> None:
            if count >= tokens:
                seen.set()

        running = asyncio.create_task(self.stream(prompt, max_tokens=max_tokens, saw=saw, **how))
        waiting = asyncio.create_task(seen.wait())
        await asyncio.wait({running, waiting}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            await running  # what went wrong, if anything did
        assert seen.is_set(), f"no {tokens} tokens within {within_s:g} s"
        return running

    def _request(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        pipeline: str | None = None,
        handoff_at: int | None = None,
        **fields: Any,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Body and headers of a greedy completion; `fields` are added to the body."""
        headers = {} if pipeline is None else {"x-pdd-pipeline": pipeline}
        if handoff_at is not None:
            headers["x-pdd-handoff-at"] = str(handoff_at)
        body = {
            "model": self.model_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        return body, headers

    async def instances(self) -> list[dict[str, Any]]:
        """What `/mesh` says."""
        return (await self.http.get("/mesh")).json()["instances"]


@pytest_asyncio.fixture
async def client(mesh: LocalMesh) -> AsyncIterator[Client]:
    """A client of the mesh."""
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=240) as http:
        models = (await http.get("/v1/models")).json()
        yield Client(http, models["data"][0]["id"])


@asynccontextmanager
async def killed(mesh: LocalMesh, name: str) -> AsyncGenerator[None]:
    """A process is killed and started again. Whatever the test finds meanwhile, the mesh, which all tests share, is
    whole again afterwards."""
    await asyncio.to_thread(mesh.kill, name)
    mesh.restart(name)
    try:
        yield
    finally:
        await asyncio.to_thread(mesh.wait_ready)


async def books_balance(client: Client) -> None:
    """Once nothing runs, nobody uses a block anywhere, and no decode stage ever computed a prompt token."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        loads = [(one["role"], one["load"]) for one in await client.instances()]
        used = {role: load["total_blocks"] - load["free_blocks"] - load["evictable_blocks"] for role, load in loads}
        held = [role for role, load in loads if used[role] or load["running"]]
        if not held:
            break
        assert time.monotonic() < deadline, f"blocks are still held by {held}"
        await asyncio.sleep(0.2)
    assert all(load["recomputed_prompt_tokens"] == 0 for _, load in loads)
