"""The gateway's HTTP application: which paths there are, and who answers them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException as StarletteHTTPException

from pdd.model.tokenizer import Tokenizer
from pdd.types import Pipeline
from services.gateway.api.chat import Chat
from services.gateway.api.completions import Completions
from services.gateway.api.errors import ApiError
from services.gateway.api.exchange import Exchange
from services.gateway.api.metrics import Metrics
from services.gateway.api.prepare import require_model
from services.gateway.api.shape import Shape
from services.gateway.api.surface import Surface
from services.gateway.api.workers import TextWorkers
from services.gateway.generation import Generator


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    created: int,
    max_model_len: int,
    default_max_tokens: int,
    default_pipeline: Pipeline,
    max_body_bytes: int,
    mesh: Callable[[], dict[str, Any]],
    ready: Callable[[], bool],
    registry: CollectorRegistry,
) -> FastAPI:
    """Build the application.

    `created` is when the model became available (Unix seconds), `max_model_len` the longest prompt + output (tokens),
    `mesh` what `GET /mesh` shows (plain JSON types or msgspec structs), `ready` whether `GET /ready` answers 200.
    """
    workers = TextWorkers()
    surface = Surface(
        generator=generator,
        tokenizer=tokenizer,
        workers=workers,
        metrics=Metrics(registry),
        model_name=model_name,
        max_model_len=max_model_len,
        default_max_tokens=default_max_tokens,
        default_pipeline=default_pipeline,
        max_body_bytes=max_body_bytes,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        workers.close()

    app = FastAPI(title="PDD", lifespan=lifespan, openapi_url=None)
    _add_generating(app, "/v1/chat/completions", surface, Chat())
    _add_generating(app, "/v1/completions", surface, Completions())
    _add_models(app, surface, created)
    _add_operations(app, mesh, ready, registry)
    _add_error_shapes(app)
    return app


def _add_generating(app: FastAPI, path: str, surface: Surface, shape: Shape[Any]) -> None:
    async def answer(request: Request) -> Response:
        return Exchange(surface, shape, request.headers)

    app.add_api_route(path, answer, methods=["POST"], response_class=Response)


def _add_models(app: FastAPI, surface: Surface, created: int) -> None:
    model = {
        "id": surface.model_name,
        "object": "model",
        "created": created,
        "owned_by": "pdd",
        "max_model_len": surface.max_model_len,
    }

    async def models() -> Response:
        return _json({"object": "list", "data": [model]})

    async def one_model(name: str) -> Response:
        require_model(surface, name)
        return _json(model)

    app.add_api_route("/v1/models", models)
    app.add_api_route("/v1/models/{name:path}", one_model)


def _add_operations(
    app: FastAPI, mesh: Callable[[], dict[str, Any]], ready: Callable[[], bool], registry: CollectorRegistry
) -> None:
    async def health() -> Response:
        return _json({"status": "ok"})

    async def readiness() -> Response:
        return _json({"status": "ready"}) if ready() else _json({"status": "not ready"}, 503)

    async def version_of() -> Response:
        return _json({"version": version("pdd")})

    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def show_mesh() -> Response:
        return _json(mesh())

    app.add_api_route("/health", health)
    app.add_api_route("/ready", readiness)
    app.add_api_route("/version", version_of)
    app.add_api_route("/metrics", metrics)
    app.add_api_route("/mesh", show_mesh)


def _add_error_shapes(app: FastAPI) -> None:
    """Errors of the paths above, and of paths that do not exist, in OpenAI's shape too."""

    async def api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _json(error.body(), error.status)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException | StarletteHTTPException)
        shown = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
        response = _json(shown.body(), error.status_code)
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(StarletteHTTPException, http_error)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
