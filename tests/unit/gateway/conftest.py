"""The default model's tokenizer, and a real server over a generator that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from pdd.model.source import ensure_default_model
from pdd.model.tokenizer import Tokenizer, load_tokenizer
from pdd.types import Pipeline
from services.gateway.api.app import create_app
from services.gateway.generation import Emission, GenerationRequest, Report

MODEL = "smol"
MAX_MODEL_LEN = 256
MAX_BODY_BYTES = 1 << 20

Script = Callable[[GenerationRequest], AsyncIterator[Emission]]


class ScriptedGeneration:
    """Emissions of a script, with a report."""

    def __init__(self, emissions: AsyncIterator[Emission], report: Report) -> None:
        self.report = report
        self._emissions = emissions

    def __aiter__(self) -> AsyncIterator[Emission]:
        return self._emissions


class ScriptedGenerator:
    """Emits chosen token IDs; remembers what it was asked, and when each generation was left."""

    def __init__(self, script: Script) -> None:
        self.requests: list[GenerationRequest] = []
        self.left = asyncio.Event()
        self._script = script

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ScriptedGeneration]:
        self.requests.append(request)
        report = Report(
            request_id=request.request_id,
            pipeline=request.pipeline,
            reason="wan busy",
            prefill="a/0",
            prefill_started_ms=1.0,
            prefill_done_ms=4.5,
            ttft_ms=5.0,
        )
        try:
            yield ScriptedGeneration(self._script(request), report)
        finally:
            report.total_ms = 9.0
            self.left.set()


class Server:
    """A running server: where it listens, and the generator behind it."""

    def __init__(self, port: int, generator: ScriptedGenerator) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.generator = generator


Serve = Callable[[Script], AbstractAsyncContextManager[Server]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ensure_default_model())


@pytest.fixture
def serve(tokenizer: Tokenizer) -> Serve:
    """Run uvicorn on a free port over a script, for the length of a `with` block."""

    @asynccontextmanager
    async def run(script: Script) -> AsyncGenerator[Server]:
        generator = ScriptedGenerator(script)
        app = create_app(
            generator,
            tokenizer,
            model_name=MODEL,
            created=1_700_000_000,
            max_model_len=MAX_MODEL_LEN,
            default_max_tokens=2048,
            default_pipeline=Pipeline.PDD,
            max_body_bytes=MAX_BODY_BYTES,
            mesh=lambda: {"instances": []},
            ready=lambda: not generator.requests,
            registry=CollectorRegistry(),
        )
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(10):
                while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
                    await asyncio.sleep(0.01)
            yield Server(server.servers[0].sockets[0].getsockname()[1], generator)
        finally:
            server.should_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await running

    return run
