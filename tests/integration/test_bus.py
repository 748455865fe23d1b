"""The bus over real NATS: what a request may meet, and what its caller is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import nats
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from pdd.errors import CapacityError, DeadlineError, RemoteError, TooLargeError, UnreachableError
from pdd.mesh import subjects
from pdd.mesh.bus import Bus, Endpoint, connect
from pdd.mesh.messages import Hit, Lookup, LookupReply, Ok
from pdd.types import Peer, Role
from tests.integration.conftest import ControlPlane, OwnServer

Handler = Callable[[Lookup], Awaitable[object]]
SPAN = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, TraceFlags(TraceFlags.SAMPLED))


def peer(name: str, dc: str = "a") -> Peer:
    return Peer(dc, Role.CACHE, name, f"epoch-of-{name}")


async def serve(bus: Bus, name: str, handler: Handler, dc: str = "a") -> str:
    """Serve one verb and return its subject."""
    subject = subjects.endpoint(peer(name, dc), "look")
    await bus.serve(peer(name, dc), [Endpoint("look", subject, Lookup, handler)], {"colour": "green"})
    return subject


async def echo(message: Lookup) -> LookupReply:
    """Answer with what was asked."""
    return LookupReply([Hit("a", Role.PREFILL, message.fingerprint, len(message.hashes))])


def echoed(fingerprint: str, blocks: int = 0) -> LookupReply:
    return LookupReply([Hit("a", Role.PREFILL, fingerprint, blocks)])


@asynccontextmanager
async def two(url: str, other: str | None = None) -> AsyncGenerator[tuple[Bus, Bus]]:
    """A server's bus and a caller's."""
    async with connect(url, "server") as server, connect(other or url, "caller") as caller:
        yield server, caller


@asynccontextmanager
async def sampled_span() -> AsyncGenerator[None]:
    """As if the caller were inside a span."""
    token = otel_context.attach(trace.set_span_in_context(NonRecordingSpan(SPAN)))
    try:
        yield
    finally:
        otel_context.detach(token)


async def test_requests_to_one_endpoint_run_at_once(control_plane: ControlPlane, unique: str) -> None:
    everybody_is_in = asyncio.Barrier(50)

    async def meet(message: Lookup) -> LookupReply:
        await everybody_is_in.wait()  # one handler at a time would never get past this
        return await echo(message)

    async with two(control_plane.nats_a) as (server, caller):
        subject = await serve(server, unique, meet)
        asked = [caller.request(subject, Lookup(str(i), 1, [b"h"] * i), LookupReply) for i in range(50)]
        assert await asyncio.gather(*asked) == [echoed(str(i), i) for i in range(50)]


async def test_an_accident_in_a_handler_is_hidden_and_an_error_on_purpose_is_not(
    control_plane: ControlPlane, unique: str
) -> None:
    async def accident(_: Lookup) -> Ok:
        raise KeyError("secret path")

    async def full(_: Lookup) -> Ok:
        raise CapacityError("no room for 7 blocks")

    async with two(control_plane.nats_a) as (server, caller):
        by_accident = await serve(server, f"{unique}-accident", accident)
        on_purpose = await serve(server, f"{unique}-full", full)
        with pytest.raises(RemoteError, match=r"^internal error$") as hidden:
            await caller.request(by_accident, Lookup("", 1, []), Ok)
        with pytest.raises(RemoteError, match=r"^no room for 7 blocks$") as told:
            await caller.request(on_purpose, Lookup("", 1, []), Ok)
        assert (hidden.value.code, told.value.code) == ("internal", "no_capacity")


async def test_nobody_there_is_known_at_once_and_a_frozen_one_at_the_deadline(
    control_plane: ControlPlane, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdd.mesh.bus._DRAIN_TIMEOUT_S", 0.3)
    cancelled = asyncio.Event()

    async def freeze(_: Lookup) -> Ok:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return Ok()

    async with connect(control_plane.nats_a, "caller") as caller:
        began = time.monotonic()
        with pytest.raises(UnreachableError):
            await caller.request(subjects.endpoint(peer(unique), "look"), Lookup("", 1, []), Ok)
        assert time.monotonic() - began < 0.1

        async with connect(control_plane.nats_a, "server") as server:
            subject = await serve(server, unique, freeze)
            began = time.monotonic()
            with pytest.raises(DeadlineError):
                await caller.request(subject, Lookup("", 1, []), Ok, timeout_s=0.3)
            assert 0.3 <= time.monotonic() - began < 0.6
            assert not cancelled.is_set()
        assert cancelled.is_set()  # a frozen handler is given time to end, but does not outlive its bus


async def test_a_cancel_is_never_lost_to_an_answer_that_comes_with_it(control_plane: ControlPlane, unique: str) -> None:
    lost = answered = 0
    async with two(control_plane.nats_a) as (server, caller):
        subject = await serve(server, unique, echo)
        for delay_us in range(0, 12_000, 60):
            asking = [asyncio.create_task(caller.request(subject, Lookup("", 1, []), LookupReply)) for _ in range(10)]
            await asyncio.sleep(delay_us / 1e6)
            cancelled = [task for task in asking if task.cancel()]
            await asyncio.wait(asking)
            lost += sum(not task.cancelled() for task in cancelled)
            answered += len(asking) - len(cancelled)
    assert 20 < answered < 1980, "the delays did not spread over the round trip"
    assert lost == 0


@pytest.mark.parametrize("traced", [False, True], ids=["plain", "traced"])
async def test_a_message_of_any_size_leaves_the_connection_alive(
    control_plane: ControlPlane, unique: str, traced: bool
) -> None:
    """The server closes a connection that sends too much, and it counts headers."""
    async with two(control_plane.nats_a) as (server, caller):
        subject = await serve(server, unique, echo)
        limit = 1 << 20
        outcomes: set[str] = set()
        async with sampled_span() if traced else contextlib.nullcontext():
            for size in (limit - 300, limit - 90, limit - 40, limit, limit + 1, 4 * limit):
                try:
                    await caller.publish(f"pdd.test.{unique}", Lookup("", 1, [b"x" * size]))
                    await caller.request(subject, Lookup("", 1, [b"x" * size]), LookupReply)
                    outcomes.add("fits")
                except TooLargeError:
                    outcomes.add("too large")
                assert await caller.request(subject, Lookup("alive", 1, []), LookupReply) == echoed("alive")
        assert outcomes == {"fits", "too large"}


async def test_an_answer_that_is_too_large_is_an_error_with_a_name(control_plane: ControlPlane, unique: str) -> None:
    async def gossip(_: Lookup) -> Lookup:
        return Lookup("", 1, [b"x" * (2 << 20)])

    async with two(control_plane.nats_a) as (server, caller):
        subject = await serve(server, unique, gossip)
        with pytest.raises(RemoteError) as told:
            await caller.request(subject, Lookup("", 1, []), Lookup)
        assert told.value.code == TooLargeError.code


async def test_malformed_messages_are_refused_by_endpoints_and_dropped_by_subscriptions(
    control_plane: ControlPlane, unique: str
) -> None:
    heard: asyncio.Queue[Lookup] = asyncio.Queue()
    async with two(control_plane.nats_a) as (server, caller):
        subject = await serve(server, unique, echo)
        await server.subscribe(f"pdd.test.{unique}", Lookup, heard.put_nowait)
        with pytest.raises(RemoteError, match="fingerprint") as told:
            await caller.request(subject, Ok(), LookupReply)
        assert told.value.code == "malformed"

        stranger = await nats.connect(control_plane.nats_a)
        for data in (b"", b"\xc1\xff not msgpack", b"\x81\xabfingerprint\xa1\xff"):
            assert (await stranger.request(subject, data)).headers["Nats-Service-Error-Code"] == "malformed"
            await stranger.publish(f"pdd.test.{unique}", data)
        await stranger.drain()
        await caller.publish(f"pdd.test.{unique}", Lookup("well formed", 1, []))
        assert (await asyncio.wait_for(heard.get(), 2)).fingerprint == "well formed"
        assert heard.empty()


async def test_a_subscription_survives_its_handler(control_plane: ControlPlane, unique: str) -> None:
    heard: list[str] = []
    done = asyncio.Event()

    def hear(message: Lookup) -> None:
        heard.append(message.fingerprint)
        if message.fingerprint == "bad":
            raise ValueError("handler")
        if message.fingerprint == "99":
            done.set()

    async with two(control_plane.nats_a) as (server, caller):
        await server.subscribe(f"pdd.test.{unique}", Lookup, hear)
        await caller.request(await serve(server, unique, echo), Lookup("", 1, []), LookupReply)  # subscribed by now
        names = ["bad", *map(str, range(100))]
        for name in names:
            await caller.publish(f"pdd.test.{unique}", Lookup(name, 1, []))
        await asyncio.wait_for(done.wait(), 2)
        assert heard == names  # one publisher: in order


async def test_trace_context_reaches_the_handler_and_no_other(control_plane: ControlPlane, unique: str) -> None:
    async def which(_: Lookup) -> Lookup:
        context = trace.get_current_span().get_span_context()
        await asyncio.sleep(0.02)  # the two handlers run at the same time
        return Lookup(f"{context.trace_id:032x}/{context.span_id:016x}/{context.trace_flags:02x}", 1, [])

    async def traced(caller: Bus, subject: str) -> Lookup:
        async with sampled_span():
            return await caller.request(subject, Lookup("", 1, []), Lookup)

    async with two(control_plane.nats_a, control_plane.nats_b) as (server, caller):
        subject = await serve(server, unique, which)
        await interest_crosses(caller, subject)
        inside, outside = await asyncio.gather(
            traced(caller, subject), caller.request(subject, Lookup("", 1, []), Lookup)
        )
    assert inside.fingerprint == f"{SPAN.trace_id:032x}/{SPAN.span_id:016x}/01"
    assert outside.fingerprint == f"{'0' * 32}/{'0' * 16}/00"


async def test_the_services_api_shows_who_serves(control_plane: ControlPlane, unique: str) -> None:
    async with connect(control_plane.nats_a, "server") as server:
        subject = await serve(server, unique, echo)
        operator = await nats.connect(control_plane.nats_a)
        try:
            info = json.loads((await operator.request("$SRV.INFO.pdd-cache", b"")).data)
            ping = json.loads((await operator.request(f"$SRV.PING.pdd-cache.{info['id']}", b"")).data)
        finally:
            await operator.close()
    assert ping["name"] == info["name"] == "pdd-cache"
    assert info["metadata"] == {
        "dc": "a",
        "instance": unique,
        "epoch": peer(unique).epoch,
        "colour": "green",
    } | {k: v for k, v in info["metadata"].items() if k.startswith("_")}
    assert [one["subject"] for one in info["endpoints"]] == [subject]


async def test_both_ends_come_back_after_the_server_did(own_nats: OwnServer, unique: str) -> None:
    heard: asyncio.Queue[Lookup] = asyncio.Queue()
    url = f"nats://127.0.0.1:{own_nats.port}"
    async with two(url) as (server, caller):
        subject = await serve(server, unique, echo)
        await server.subscribe(f"pdd.test.{unique}", Lookup, heard.put_nowait)
        assert await caller.request(subject, Lookup("before", 1, []), LookupReply) == echoed("before")
        await asyncio.to_thread(own_nats.stop)
        with pytest.raises((UnreachableError, DeadlineError)):
            await caller.request(subject, Lookup("during", 1, []), LookupReply, timeout_s=0.2)
        await asyncio.to_thread(own_nats.start)
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(UnreachableError, DeadlineError):
                    assert await caller.request(subject, Lookup("after", 1, []), LookupReply) == echoed("after")
                    break
                await asyncio.sleep(0.1)
            await caller.publish(f"pdd.test.{unique}", Lookup("after", 1, []))
            assert (await heard.get()).fingerprint == "after"


async def test_a_server_that_answers_no_ping_is_known_to_be_gone(own_nats: OwnServer, unique: str) -> None:
    """Its connections stay open, and whoever took them for good would take everybody else for dead."""
    async with two(f"nats://127.0.0.1:{own_nats.port}") as (server, caller):
        subject = await serve(server, unique, echo)
        own_nats.signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(12):
                while server.connected or caller.connected:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            own_nats.signal(signal.SIGCONT)
        async with asyncio.timeout(15):
            while True:
                with contextlib.suppress(UnreachableError, DeadlineError):
                    assert await caller.request(subject, Lookup("after", 1, []), LookupReply) == echoed("after")
                    break
                await asyncio.sleep(0.1)


async def test_without_a_server_connecting_fails_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.mesh.bus._CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9"):
        async with connect("nats://127.0.0.1:9", "caller"):
            pytest.fail("there is no server")


async def interest_crosses(caller: Bus, subject: str) -> None:
    """Wait until a subscription made on the other side of the leaf link is known on the caller's."""
    async with asyncio.timeout(5):
        while True:
            with contextlib.suppress(UnreachableError):
                await caller.request(subject, Lookup("", 1, []), Ok)
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("direction", ["a to b", "b to a"])
async def test_requests_and_events_cross_the_leaf_link(
    control_plane: ControlPlane, unique: str, direction: str
) -> None:
    heard: asyncio.Queue[Lookup] = asyncio.Queue()
    here, there = control_plane.nats_a, control_plane.nats_b
    if direction == "b to a":
        here, there = there, here
    async with two(there, here) as (server, caller):
        await server.subscribe(f"pdd.test.{unique}", Lookup, heard.put_nowait)
        subject = await serve(server, unique, echo)
        await interest_crosses(caller, subject)
        assert await caller.request(subject, Lookup("there", 1, [b"h"]), LookupReply) == echoed("there", 1)
        await caller.publish(f"pdd.test.{unique}", Lookup("event", 1, []))
        assert (await asyncio.wait_for(heard.get(), 2)).fingerprint == "event"


async def test_a_service_that_left_is_never_replaced_by_the_other_datacenters(
    control_plane: ControlPlane, unique: str
) -> None:
    async def from_b(message: Lookup) -> LookupReply:
        return echoed(f"b answers {message.fingerprint}")

    async with connect(control_plane.nats_b, "b") as b, connect(control_plane.nats_a, "caller") as caller:
        in_b = await serve(b, unique, from_b, dc="b")
        await interest_crosses(caller, in_b)
        async with connect(control_plane.nats_a, "a") as a:
            in_a = await serve(a, unique, echo, dc="a")
            for _ in range(20):
                assert await caller.request(in_a, Lookup("a", 1, []), LookupReply) == echoed("a")
        with pytest.raises(UnreachableError):
            await caller.request(in_a, Lookup("a", 1, []), LookupReply, timeout_s=1)
        assert await caller.request(in_b, Lookup("on purpose", 1, []), LookupReply) == echoed("b answers on purpose")


async def test_a_connection_closed_for_good_ends_the_process(control_plane: ControlPlane) -> None:
    """The server closes the connection of a client that talks nonsense, and nats-py then stays away."""
    lost = asyncio.Event()

    async def talk_nonsense() -> None:
        async with connect(control_plane.nats_a, "nonsense", lost=lost) as bus:
            bus._client._transport.write(b"NONSENSE\r\n")
            async with asyncio.timeout(5):
                await lost.wait()

    with pytest.raises(UnreachableError, match="for good"):
        await talk_nonsense()
