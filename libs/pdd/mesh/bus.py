"""One connection to the datacenter's NATS server: publish, subscribe, request, serve.

Owns the connection, its subscriptions and the tasks that handlers run in. It is the only module that touches NATS:
it encodes messages, carries W3C trace context in headers, maps NATS' errors to `pdd.errors`, and hides from callers
whatever a handler raised by accident (nats.micro would send them its `repr`). It knows no engine and no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import nats
import nats.errors
import nats.micro
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import NoRespondersError, SlowConsumerError
from nats.micro.request import Request as MicroRequest
from nats.micro.service import Service
from opentelemetry import context as otel_context

from pdd.errors import DeadlineError, PddError, RemoteError, TooLargeError, UnreachableError
from pdd.mesh import messages
from pdd.tasks import cancellation_kept
from pdd.telemetry import tracing
from pdd.types import Peer

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

REQUEST_TIMEOUT_S = 5.0
"""Default deadline of a request; nats-py's own is 0.5 s, too short for a line that is full."""

_CONNECT_TIMEOUT_S = 10.0
_DRAIN_TIMEOUT_S = 5.0
_PENDING_MESSAGES = 16_384
_PENDING_BYTES = 32 << 20
_OUTBOUND_BYTES = 8 << 20
_HANDLERS_AT_ONCE = 256
_PING_INTERVAL_S = 2
_UNANSWERED_PINGS = 2
"""A server that answers no ping is as good as gone: with nats-py's own figures it takes six minutes to notice."""
_DROPS_LOGGED_EACH_S = 1.0
_ERROR_HEADER = "Nats-Service-Error"
_CODE_HEADER = "Nats-Service-Error-Code"

Kind = TypeVar("Kind")
Reply = TypeVar("Reply")


class Endpoint:
    """One request/reply verb: the subject, the message it takes and the handler that answers it."""

    def __init__(self, verb: str, subject: str, kind: type[Kind], handler: Callable[[Kind], Awaitable[object]]) -> None:
        self.verb = verb
        self.subject = subject
        self.kind: type[Any] = kind
        self.handler: Callable[[Any], Awaitable[object]] = handler


class Bus:
    """See the module. Obtain one with `connect`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        self._services: list[Service] = []
        self.closing = False
        """Whether `close` was called: what ends from then on was meant to."""
        self.dropped = 0
        """Messages that came faster than this process read them, and were dropped on arrival."""

    @property
    def max_payload(self) -> int:
        """Bytes that the server takes in one message, headers included; more closes the connection."""
        return self._client.max_payload

    @property
    def connected(self) -> bool:
        """Whether there is a connection right now: without one nobody is heard."""
        return self._client.is_connected

    @property
    def client(self) -> Client:
        """The connection itself, for `pdd.mesh` alone."""
        return self._client

    async def publish(self, subject: str, message: object) -> None:
        """Send `message` to whoever listens: at most once, nobody answers.

        Raises `TooLargeError` if it exceeds the server's payload limit, `UnreachableError` if the connection is
        closed or its outbound buffer is full.
        """
        headers = _trace_headers()
        data = self.encode(subject, message, headers)
        try:
            await self._client.publish(subject, data, headers=headers)
        except nats.errors.Error as error:
            raise UnreachableError(f"cannot publish to {subject}: {error}") from None

    async def request(
        self, subject: str, message: object, reply: type[Reply], *, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> Reply:
        """Send `message` and wait for the answer.

        Raises `UnreachableError` at once if nobody serves the subject, `DeadlineError` after `timeout_s`,
        `TooLargeError` as `publish` does, and `RemoteError` with the peer's code if it answers with an error.
        """
        headers = _trace_headers()
        data = self.encode(subject, message, headers)
        try:
            # nats-py's own timeout begins once the request is written, which on a line that is stuck takes 10 s more.
            async with asyncio.timeout(timeout_s):
                with cancellation_kept():
                    answer = await self._client.request(subject, data, timeout=timeout_s, headers=headers)
        except NoRespondersError:
            raise UnreachableError(f"nobody serves {subject}") from None
        except TimeoutError:
            raise DeadlineError(f"no answer from {subject} within {timeout_s:g} s") from None
        except nats.errors.Error as error:
            raise UnreachableError(f"cannot reach {subject}: {error}") from None
        told = answer.headers or {}
        if _ERROR_HEADER in told:
            raise RemoteError(told.get(_CODE_HEADER, "internal"), told[_ERROR_HEADER])
        return messages.decode(answer.data, reply)

    async def subscribe(self, subject: str, kind: type[Kind], handler: Callable[[Kind], None]) -> None:
        """Call `handler` for each message, in order. It must not block; a malformed message is logged and dropped."""

        async def deliver(msg: Msg) -> None:
            try:
                handler(messages.decode(msg.data, kind))
            except RemoteError as error:
                logger.warning("message_malformed", subject=msg.subject, error=str(error))
            except Exception:
                logger.exception("subscription_handler_failed", subject=msg.subject)

        await self._client.subscribe(
            subject, cb=deliver, pending_msgs_limit=_PENDING_MESSAGES, pending_bytes_limit=_PENDING_BYTES
        )

    async def serve(self, peer: Peer, endpoints: list[Endpoint], metadata: Mapping[str, str]) -> None:
        """Serve `endpoints` as one NATS micro service named `pdd-<role>` (`nats micro ls` shows it).

        nats-py runs one handler at a time per subscription, so each request gets a task of its own here; beyond
        256 at once the caller gets `no_capacity`.
        """
        service = await nats.micro.add_service(
            self._client,
            name=f"pdd-{peer.role}",
            version="1.0.0",
            description=f"{peer.role} {peer.instance} in datacenter {peer.dc}",
            metadata={"dc": peer.dc, "instance": peer.instance, "epoch": peer.epoch, **metadata},
        )
        self._services.append(service)
        for endpoint in endpoints:
            await service.add_endpoint(
                name=endpoint.verb, subject=endpoint.subject, handler=self._spawning_handler(endpoint)
            )
        # nats-py writes a flush's PING ahead of what is still pending, so that the first one's answer says nothing of
        # the subscriptions just made; by then they have been written, and the second one's does.
        for _ in range(2):
            await self._client.flush(timeout=int(_CONNECT_TIMEOUT_S))

    async def close(self) -> None:
        """Stop serving, let running handlers end, drain and close."""
        self.closing = True
        connected = self._client.is_connected
        if connected:
            for service in self._services:
                await service.stop()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_DRAIN_TIMEOUT_S if connected else 0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        try:
            async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                # Without a server there is nobody to say goodbye to.
                await (self._client.drain() if connected else self._client.close())
        except (TimeoutError, nats.errors.Error):
            await self._client.close()

    def encode(self, to: str, message: object, headers: dict[str, str] | None) -> bytes:
        """Raises `TooLargeError` in place of the server, which closes the connection for good; headers count there."""
        data = messages.encode(message)
        if len(data) + _wire_bytes(headers) > self.max_payload:
            raise TooLargeError(f"message for {to} exceeds {self.max_payload} bytes")
        return data

    def _spawning_handler(self, endpoint: Endpoint) -> Callable[[MicroRequest], Awaitable[None]]:
        async def accept(request: MicroRequest) -> None:
            if len(self._tasks) >= _HANDLERS_AT_ONCE:
                await request.respond_error("no_capacity", "too many control requests at once")
                return
            task = asyncio.create_task(self._answer(endpoint, request), name=f"serve {endpoint.subject}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accept

    async def _answer(self, endpoint: Endpoint, request: MicroRequest) -> None:
        token = otel_context.attach(tracing.extract(request.headers or {}))
        try:
            reply = await endpoint.handler(messages.decode(request.data, endpoint.kind))
            await request.respond(self.encode(f"the caller of {endpoint.subject}", reply, None))
        except PddError as error:
            await self._respond_error(request, error.code, str(error))
        except Exception:
            logger.exception("endpoint_failed", subject=endpoint.subject)
            await self._respond_error(request, "internal", "internal error")
        finally:
            otel_context.detach(token)

    async def _respond_error(self, request: MicroRequest, code: str, text: str) -> None:
        try:
            await request.respond_error(code, text)
        except nats.errors.Error as error:
            logger.warning("reply_lost", subject=request.subject, error=str(error))


@asynccontextmanager
async def connect(url: str, name: str, *, lost: asyncio.Event | None = None) -> AsyncGenerator[Bus]:
    """Connect to the NATS server at `url` and close on exit.

    Reconnects for ever once connected. Raises `UnreachableError` if the first connection fails. A protocol error closes
    a connection for good, without a reconnect: then `lost` is set, so that the process ends instead of going on deaf,
    and leaving the context raises `UnreachableError`.
    """
    bus: Bus | None = None
    closed_for_good = False
    now = asyncio.get_running_loop().time
    quiet_until: dict[str, float] = {}
    """By subject as subscribed to, so that there are few."""

    async def on_closed() -> None:
        nonlocal closed_for_good
        if bus is not None and not bus.closing:
            closed_for_good = True
            logger.error("nats_connection_lost", url=url)
            if lost is not None:
                lost.set()

    async def on_error(error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            if bus is not None:
                bus.dropped += 1
            # A burst drops thousands, and a line for each would slow the reader down further.
            subject = error.sub.subject
            if now() >= quiet_until.get(subject, 0.0):
                quiet_until[subject] = now() + _DROPS_LOGGED_EACH_S
                logger.error("slow_consumer", subject=subject, dropped=bus.dropped if bus is not None else 1)
        else:
            logger.warning("nats_error", error=str(error) or type(error).__name__)

    async def on_disconnected() -> None:
        if bus is not None and bus.closing:
            return
        logger.warning("nats_disconnected", url=url)

    async def on_reconnected() -> None:
        logger.info("nats_reconnected", url=url)

    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            client = await nats.connect(
                url,
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                pending_size=_OUTBOUND_BYTES,
                ping_interval=_PING_INTERVAL_S,
                max_outstanding_pings=_UNANSWERED_PINGS,
                drain_timeout=int(_DRAIN_TIMEOUT_S),
                error_cb=on_error,
                closed_cb=on_closed,
                disconnected_cb=on_disconnected,
                reconnected_cb=on_reconnected,
            )
    except (OSError, TimeoutError, nats.errors.Error) as error:
        raise UnreachableError(f"no NATS server at {url}: {error or type(error).__name__}") from None
    bus = Bus(client)
    try:
        yield bus
    finally:
        await bus.close()
    if closed_for_good:
        raise UnreachableError(f"the NATS server at {url} closed the connection for good")


def _wire_bytes(headers: dict[str, str] | None) -> int:
    """Size of a NATS header block: a version line, one line for each header, an empty line."""
    if not headers:
        return 0
    return len("NATS/1.0\r\n\r\n") + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())


def _trace_headers() -> dict[str, str] | None:
    headers: dict[str, str] = {}
    tracing.inject(headers)
    return headers or None
