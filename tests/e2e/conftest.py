"""A whole mesh of real processes, and what it must reproduce: one engine, and transformers, on the same weights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
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
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": traces.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "300"}
    options = msgspec.structs.replace(OPTIONS, env=env)
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

    async def complete(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        pipeline: str | None = None,
        handoff_at: int | None = None,
        **fields: Any,
    ) -> Answer:
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
        response = await self.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer = response.json()
        choice = answer["choices"][0]
        return Answer(choice["token_ids"], choice["text"], choice["finish_reason"], answer["usage"], response.headers)

    async def stream(self, prompt: list[int], *, max_tokens: int, **fields: Any) -> list[int]:
        """The IDs of a streamed completion, chunk by chunk; it must end once, and well."""
        body = {
            "model": self.model_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": True,
            **fields,
        }
        ids: list[int] = []
        finishes: list[str] = []
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    ids += choice.get("token_ids") or []
                    finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert finishes == ["length"]
        return ids

    async def instances(self) -> list[dict[str, Any]]:
        """What `/mesh` says."""
        return (await self.http.get("/mesh")).json()["instances"]


@pytest_asyncio.fixture
async def client(mesh: LocalMesh) -> AsyncIterator[Client]:
    """A client of the mesh."""
    async with httpx.AsyncClient(base_url=mesh.gateway_url, timeout=240) as http:
        models = (await http.get("/v1/models")).json()
        yield Client(http, models["data"][0]["id"])


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
