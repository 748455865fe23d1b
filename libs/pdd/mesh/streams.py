"""KV events, kept: a JetStream stream per datacenter, and in the cache's datacenter a copy of each of the others.

Each datacenter's server is a JetStream domain of its own. An instance publishes to the stream of its domain, over the
local network only. The cache's datacenter has one stream per other datacenter that *sources* the original through that
domain's API, so that events cross the WAN once, and a link that was cut catches up by itself.

A stream is bounded by age and size. What it has lost is seen by the gap in the events' own numbers; nothing here
promises completeness. Readers are push consumers without acknowledgements. The server says each second that it is
still there; after some seconds without a word the reader builds its consumer anew and goes on where it stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import NoReturn, TypeVar

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import BadRequestError, NotFoundError

from pdd.errors import DeadlineError, PddError, RemoteError, UnreachableError
from pdd.mesh import messages, subjects
from pdd.mesh.bus import Bus
from pdd.tasks import cancellation_kept

logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_AGE_S = 600
"""How long an event is kept: longer than any cut of the line that is worth bridging without a snapshot."""

MAX_BYTES = 32 << 20
"""How much of one datacenter's events is kept."""

HEARTBEAT_S = 1.0
SILENCE_S = 3 * HEARTBEAT_S
"""After so long without a word of the server a reader builds its consumer anew."""

_API_TIMEOUT_S = 5.0
_PENDING_MESSAGES = 4096
_PENDING_BYTES = 64 << 20
_NAME_IN_USE = 10058

Kind = TypeVar("Kind")


def domain(dc: str) -> str:
    """Name of a datacenter's JetStream domain."""
    return f"dc{dc}"


class EventLog:
    """The KV events of datacenter `dc` as they are kept in datacenter `home`, to whose server `bus` is connected."""

    def __init__(self, bus: Bus, dc: str, home: str) -> None:
        self._bus = bus
        self._name = f"pdd-v1-{dc}-kv-events"
        self._config = _config(self._name, dc, None if dc == home else domain(dc))
        self._reader = _Reader(bus.client, self._name)

    async def ensure(self) -> None:
        """Create the stream unless it is there. Raises `UnreachableError` or `DeadlineError`."""
        with _translated(self._name):
            try:
                await self._js.add_stream(self._config)
            except BadRequestError as error:
                if error.err_code != _NAME_IN_USE:
                    raise
                await self._js.update_stream(self._config)  # It is there, with other limits.

    async def append(self, subject: str, message: object, *, timeout_s: float) -> None:
        """Store `message`; returns once the server has it.

        Raises `TooLargeError` if it can never be stored, `UnreachableError` or `DeadlineError` if it may or may not
        have been.
        """
        data = self._bus.encode(subject, message, None)
        with _translated(self._name):
            await self._js.publish(subject, data, timeout=timeout_s)

    async def rebuild(self) -> None:
        """Drop what is kept here and begin anew.

        A source goes on from the number it has seen last. If the original was deleted and begins at 1 again, the copy
        would stay silent, without an error, until the original has got there.
        """
        logger.warning("stream_rebuilt", stream=self._name)
        with _translated(self._name), suppress(NotFoundError):
            await self._js.delete_stream(self._name)
        await self.ensure()

    async def follow(self, kind: type[Kind], handler: Callable[[Kind], None]) -> NoReturn:
        """Call `handler` for each message that is stored from now on, in order, until cancelled.

        It must not block. Messages that were stored while the server was away follow when it is back; some may come
        again. Malformed ones are logged and dropped.
        """

        def deliver(data: bytes) -> None:
            try:
                handler(messages.decode(data, kind))
            except RemoteError as error:
                logger.warning("message_malformed", stream=self._name, error=str(error))
            except Exception:
                logger.exception("stream_handler_failed", stream=self._name)

        while True:
            try:
                await self.ensure()
                with _translated(self._name):
                    await self._reader.read(deliver)
            except PddError as error:
                logger.warning("stream_reader_lost", stream=self._name, error=str(error))
            await asyncio.sleep(HEARTBEAT_S)

    @property
    def _js(self) -> JetStreamContext:
        return self._bus.client.jetstream(timeout=_API_TIMEOUT_S)


class _Reader:
    """One consumer after another of one stream; remembers where to go on."""

    def __init__(self, client: Client, stream: str) -> None:
        self._client = client
        self._stream = stream
        self._created: datetime | None = None
        self._seen = 0
        self._heard = asyncio.Event()

    async def read(self, deliver: Callable[[bytes], None]) -> None:
        """Deliver until the server falls silent."""
        js = self._client.jetstream(timeout=_API_TIMEOUT_S)
        inbox = self._client.new_inbox()

        async def accept(msg: Msg) -> None:
            self._heard.set()
            if (msg.headers or {}).get(api.Header.STATUS):
                if msg.reply:  # Flow control: the server waits to hear how far we are.
                    await self._client.publish(msg.reply)
                return
            self._seen = msg.metadata.sequence.stream
            deliver(msg.data)

        subscription = await self._client.subscribe(
            inbox, cb=accept, pending_msgs_limit=_PENDING_MESSAGES, pending_bytes_limit=_PENDING_BYTES
        )
        try:
            with cancellation_kept():
                await js.add_consumer(self._stream, await self._consumer_config(js, inbox))
            while True:
                self._heard.clear()
                async with asyncio.timeout(SILENCE_S):
                    await self._heard.wait()
        except TimeoutError:
            logger.warning("stream_silent", stream=self._stream)
        finally:
            await subscription.unsubscribe()  # Without a listener the server drops the consumer.

    async def _consumer_config(self, js: JetStreamContext, inbox: str) -> api.ConsumerConfig:
        info = await js.stream_info(self._stream)
        known, self._created = self._created, info.created
        policy, start = api.DeliverPolicy.NEW, None
        if known is not None:
            if info.created == known and info.state.last_seq >= self._seen:
                policy, start = api.DeliverPolicy.BY_START_SEQUENCE, self._seen + 1
            else:  # It lost its memory, and counts from 1 again.
                policy = api.DeliverPolicy.ALL
        else:
            self._seen = info.state.last_seq
        return api.ConsumerConfig(
            deliver_subject=inbox,
            deliver_policy=policy,
            opt_start_seq=start,
            ack_policy=api.AckPolicy.NONE,
            idle_heartbeat=HEARTBEAT_S,
            flow_control=True,
            mem_storage=True,
            inactive_threshold=2 * SILENCE_S,
        )


def _config(name: str, dc: str, origin: str | None) -> api.StreamConfig:
    """Of the original, which takes what is published, or, if `origin` is its domain, of a copy."""
    sources = None
    if origin is not None:
        sources = [api.StreamSource(name=name, external=api.ExternalStream(api=f"$JS.{origin}.API", deliver=""))]
    return api.StreamConfig(
        name=name,
        subjects=None if sources else [subjects.kv_events_of(dc)],
        sources=sources,
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD,
        max_age=MAX_AGE_S,
        max_bytes=MAX_BYTES,
        num_replicas=1,
    )


@contextmanager
def _translated(what: str) -> Generator[None]:
    """NATS' errors as ours; a cancellation is never lost on the way."""
    try:
        with cancellation_kept():
            yield
    except TimeoutError:
        raise DeadlineError(f"no answer about stream {what} in time") from None
    except nats.errors.Error as error:
        raise UnreachableError(f"stream {what}: {error}") from None
