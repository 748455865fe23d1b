"""One HTTP exchange at ASGI's level: the body in, bytes out, and whether the client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.types import Receive, Send

from services.gateway.api.errors import ApiError

_BODY_TIMEOUT_S = 30.0
"""Longest wait for the whole request body."""
_SEND_TIMEOUT_S = 60.0
"""A client that takes in nothing for so long has left."""


class ClientLeftError(Exception):
    """The client closed the connection, or does not read."""


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises `ApiError` (413, 408) if it is too large or too slow, `ClientLeftError`."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeftError
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="body_too_large")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"The request body did not come within {_BODY_TIMEOUT_S:g} s.") from None


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, but cancel it as soon as the client leaves; then raise `ClientLeftError`.

    The request body must have been read. `work` may await nothing after it has sent the end of the response, which
    ASGI reports to `receive` as a disconnect too.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        await task
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Outlet:
    """The response, in order: `start`, then `write` until `last`. Each call waits for a slow reader, but not for ever.

    `status` is None until started; `ended` is true once the last byte was handed over.
    """

    def __init__(self, send: Send) -> None:
        self._asgi_send = send
        self.status: int | None = None
        self.ended = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece of the body."""
        self.ended = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await self._asgi_send(message)
        except (TimeoutError, OSError) as error:
            raise ClientLeftError from error
