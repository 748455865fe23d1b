"""What concerns NIXL only: it verifies what was written, survives a killed peer, and waits without burning a core."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection

import msgspec
import pytest

from pdd.errors import IncompatibleError, TransferError
from pdd.kv import NixlEndpoint, StreamEndpoint
from pdd.transfer.fabric import FabricChoice, Senders, make_fabric_receiver, make_fabric_sender
from pdd.transfer.nixl_receiver import NixlReceiver
from pdd.transfer.nixl_sender import NixlSender
from pdd.transfer.stream_receiver import StreamReceiver
from pdd.transfer.stream_sender import StreamSender
from pdd.types import Role
from tests.contract.test_transfer import assert_delivered, eventually, failure, filled, within_deadline
from tests.unit.transfer.pools import IDENTITY, KEY, TINY, NumpyPool, peer

os.environ.setdefault("UCX_TLS", "tcp,self")  # As `nixl_agent` asks for where there is no RDMA.

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="nixl is not installed")
BLOCK = TINY.block_size


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def nixl_sender(stack: AsyncExitStack, pool: NumpyPool, silence_s: float = 3.0) -> NixlSender:
    sender = NixlSender(pool, IDENTITY, peer(Role.PREFILL), silence_s=silence_s)
    await sender.start()
    stack.push_async_callback(sender.stop)
    return sender


async def nixl_receiver(stack: AsyncExitStack, pool: NumpyPool) -> NixlReceiver:
    receiver = NixlReceiver(pool, IDENTITY, peer(Role.RELAY))
    await receiver.start()
    stack.push_async_callback(receiver.stop)
    return receiver


class ForkedPool(NumpyPool):
    """A pool whose registered bytes are not those that it shows: a write that goes wrong on its way."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(TINY, num_blocks)
        self.elsewhere = filled(num_blocks)
        self.elsewhere.bytes[-1] ^= 0xFF

    @property
    def address(self) -> int:
        return self.elsewhere.address


@needs_nixl
async def test_wrong_bytes_fail_both_ends(stack: AsyncExitStack) -> None:
    receiver = await nixl_receiver(stack, NumpyPool(TINY, 4))
    source = ForkedPool(4)
    source.fill(7)  # As `filled`, so only the last byte of the last block differs.
    sender = await nixl_sender(stack, source)
    opened = receiver.open(KEY, [0, 1, 2, 3], 0, 4 * BLOCK)
    export = sender.open(opened.ticket, KEY, [0, 1, 2, 3])
    export.advance(2 * BLOCK)
    await eventually(lambda: opened.received_tokens == 2 * BLOCK)
    export.advance(4 * BLOCK)
    assert "checksum" in str(await failure(export.wait_delivered()))
    assert "checksum" in str(await failure(opened.wait_complete()))
    assert opened.received_tokens == 3 * BLOCK
    assert not opened.complete


@needs_nixl
async def test_pages_must_be_equal(stack: AsyncExitStack) -> None:
    receiver = await nixl_receiver(stack, NumpyPool(msgspec.structs.replace(TINY, block_size=8), 4))
    sender = await nixl_sender(stack, filled(4))
    with pytest.raises(IncompatibleError, match="block_size"):
        sender.open(receiver.open(KEY, [0], 0, BLOCK).ticket, KEY, [0])


@needs_nixl
async def test_what_grows_in_the_last_block_meanwhile_does_not_matter(stack: AsyncExitStack) -> None:
    source, target = filled(4), NumpyPool(TINY, 4)
    receiver, sender = await nixl_receiver(stack, target), await nixl_sender(stack, source)
    opened = receiver.open(KEY, [0, 1], 0, BLOCK + 1)
    export = sender.open(opened.ticket, KEY, [0, 1])
    export.advance(BLOCK + 1)
    source.bytes.reshape(4, TINY.num_layers, 2, BLOCK, -1)[1, :, :, 1:] ^= 0xFF
    await within_deadline(export.wait_delivered())
    assert_delivered(source, [0, 1], target, opened)


def serve_until_killed(pipe: Connection) -> None:
    async def serve() -> None:
        receiver = NixlReceiver(NumpyPool(TINY, 4), IDENTITY, peer(Role.RELAY))
        await receiver.start()
        pipe.send(receiver.open(KEY, [0, 1, 2, 3], 0, 4 * BLOCK).ticket)
        await asyncio.sleep(60)

    asyncio.run(serve())


@needs_nixl
async def test_a_killed_receiver_fails_its_exports_and_nobody_else_s(stack: AsyncExitStack) -> None:
    source, target = filled(4), NumpyPool(TINY, 4)
    sender = await nixl_sender(stack, source, silence_s=1.0)
    survivor = NixlReceiver(target, IDENTITY, msgspec.structs.replace(peer(Role.RELAY), instance="relay-1"))
    await survivor.start()
    stack.push_async_callback(survivor.stop)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_until_killed, args=(theirs,))
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    ticket = await asyncio.to_thread(ours.recv)
    export = sender.open(ticket, KEY, [0, 1, 2, 3])
    export.advance(BLOCK)
    await eventually(lambda: export.acked_bytes > 0)
    process.kill()
    await asyncio.to_thread(process.join)
    export.advance(4 * BLOCK)
    assert isinstance(await failure(export.wait_delivered()), TransferError)
    await within_deadline(export.cancel())
    opened = survivor.open(KEY, [0, 1], 0, 2 * BLOCK)
    export = sender.open(opened.ticket, KEY, [0, 1])
    export.advance(2 * BLOCK)
    await within_deadline(export.wait_delivered())
    assert_delivered(source, [0, 1], target, opened)


@needs_nixl
async def test_waiting_costs_little(stack: AsyncExitStack) -> None:
    receiver, sender = await nixl_receiver(stack, NumpyPool(TINY, 4)), await nixl_sender(stack, filled(4))

    async def cpu_share() -> float:
        began_s = time.process_time()
        await asyncio.sleep(1.0)
        return time.process_time() - began_s

    idle = await cpu_share()
    opened = receiver.open(KEY, [0, 1], 0, 2 * BLOCK)
    export = sender.open(opened.ticket, KEY, [0, 1])
    export.advance(BLOCK)
    await eventually(lambda: export.acked_bytes > 0)
    waiting_for_compute = await cpu_share()
    assert idle < 0.05
    assert waiting_for_compute < 0.25


@pytest.mark.parametrize(("choice", "installed"), [("stream", True), ("auto", False), ("auto", True), ("nixl", True)])
@needs_nixl
async def test_the_fabric_is_chosen_and_serves_either_ticket(
    stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch, choice: FabricChoice, installed: bool
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    source, target = filled(4), NumpyPool(TINY, 4)
    receiver = await make_fabric_receiver(choice, target, IDENTITY, peer(Role.RELAY), host="127.0.0.1", port=0)
    stack.push_async_callback(receiver.stop)
    me = peer(Role.PREFILL)
    senders = await make_fabric_sender(choice, source, IDENTITY, me, stream=StreamSender(source, IDENTITY, me))
    stack.push_async_callback(senders.stop)
    expects_nixl = installed and choice != "stream"
    wan = StreamReceiver(NumpyPool(TINY, 4), IDENTITY, peer(Role.MAIN_DECODE), host="127.0.0.1", port=0)
    await wan.start()
    stack.push_async_callback(wan.stop)
    for end, kind in ((receiver, NixlEndpoint if expects_nixl else StreamEndpoint), (wan, StreamEndpoint)):
        opened = end.open(KEY, [0, 1], 0, 2 * BLOCK)
        assert isinstance(opened.ticket.endpoint, kind)
        export = senders.open(opened.ticket, KEY, [0, 1])
        export.advance(2 * BLOCK)
        await within_deadline(export.wait_delivered())
    assert receiver.fences_itself is not expects_nixl


async def test_without_nixl_asking_for_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    pool, me = NumpyPool(TINY, 1), peer(Role.RELAY)
    with pytest.raises(TransferError, match="nixl_cu12"):
        await make_fabric_receiver("nixl", pool, IDENTITY, me, host="127.0.0.1", port=0)
    stream = StreamSender(pool, IDENTITY, me)
    with pytest.raises(TransferError, match="nixl_cu12"):
        await make_fabric_sender("nixl", pool, IDENTITY, me, stream=stream)


@needs_nixl
async def test_a_nixl_ticket_needs_nixl_here(stack: AsyncExitStack) -> None:
    receiver = await nixl_receiver(stack, NumpyPool(TINY, 4))
    pool = filled(4)
    senders = Senders(StreamSender(pool, IDENTITY, peer(Role.PREFILL)), None)
    with pytest.raises(TransferError, match="by NIXL"):
        senders.open(receiver.open(KEY, [0], 0, BLOCK).ticket, KEY, [0])
