"""What only the TCP stream promises: it survives cuts, fences, bounds its memory, converts pages, finds dead lines."""

from __future__ import annotations

import asyncio
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np
import pytest

from pdd.errors import ConfigError, TransferError
from pdd.kv import KvSpec, StreamEndpoint, Ticket
from pdd.transfer import slices, wire
from pdd.transfer.slices import Piece
from pdd.transfer.stream_connection import StreamTimeouts
from pdd.transfer.stream_receiver import StreamReceiver
from pdd.transfer.stream_sender import StreamSender
from pdd.types import AttemptKey, Role
from tests.contract.test_transfer import assert_delivered, eventually, failure, filled, within_deadline
from tests.unit.transfer.pools import IDENTITY, KEY, TINY, NumpyPool, peer
from tests.unit.transfer.proxy import TcpProxy

BIG = KvSpec(num_layers=3, num_kv_heads=2, head_dim=256, block_size=8, dtype="float32")
BIG_IDENTITY = msgspec.structs.replace(IDENTITY, head_dim=256)
FAST = StreamTimeouts(connect_s=0.5, silence_s=0.6, reconnect_s=1.5, longest_retry_s=0.2)
LANES = 3
WINDOW_BYTES = 10 * BIG.block_bytes
NUM_BLOCKS = 192
NUM_TOKENS = NUM_BLOCKS * BIG.block_size


class Line:
    """A sender and a receiver with big blocks, and a proxy between them."""

    def __init__(self, receiver: StreamReceiver, target: NumpyPool, sender: StreamSender, proxy: TcpProxy) -> None:
        self.receiver = receiver
        self.target = target
        self.sender = sender
        self.proxy = proxy
        self.source = filled(NUM_BLOCKS, BIG)
        self.source_blocks = list(range(NUM_BLOCKS))

    def through_proxy(self, ticket: Ticket) -> Ticket:
        return msgspec.structs.replace(ticket, endpoint=StreamEndpoint("127.0.0.1", self.proxy.port))


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    async with AsyncExitStack() as stack:
        target, source = NumpyPool(BIG, NUM_BLOCKS), filled(NUM_BLOCKS, BIG)
        me = peer(Role.MAIN_DECODE)
        receiver = StreamReceiver(target, BIG_IDENTITY, me, host="127.0.0.1", port=0, timeouts=FAST)
        await receiver.start()
        stack.push_async_callback(receiver.stop)
        proxy = await stack.enter_async_context(TcpProxy(receiver.endpoint.port))
        sender = StreamSender(
            source,
            BIG_IDENTITY,
            peer(Role.PREFILL),
            connections=LANES,
            window_bytes=WINDOW_BYTES,
            max_slice_bytes=BIG.block_bytes,
            timeouts=FAST,
        )
        stack.push_async_callback(sender.stop)
        yield Line(receiver, target, sender, proxy)


async def test_after_a_cut_only_the_unacknowledged_is_sent_again(line: Line) -> None:
    opened = line.receiver.open(KEY, line.source_blocks[::-1], 0, NUM_TOKENS)
    export = line.sender.open(line.through_proxy(opened.ticket), KEY, line.source_blocks)
    export.advance(20 * BIG.block_size)
    await eventually(lambda: export.acked_bytes == 20 * BIG.block_bytes)
    line.proxy.pause()
    await asyncio.sleep(0.1)
    export.advance(NUM_TOKENS)
    await asyncio.sleep(0.1)  # Until the window, or what the kernel holds for a stalled line, is full.
    unacknowledged = export.sent_bytes - export.acked_bytes
    assert 0 < unacknowledged <= WINDOW_BYTES
    line.proxy.cut()
    line.proxy.resume()
    await within_deadline(export.wait_delivered())
    assert export.sent_bytes == export.payload_bytes_total + unacknowledged
    assert opened.received_bytes == export.acked_bytes == export.payload_bytes_total
    assert_delivered(line.source, line.source_blocks, line.target, opened)
    assert line.proxy.connections >= 2 * LANES


async def test_close_fences_late_bytes(line: Line) -> None:
    """Blocks of a closed transfer go to another one while bytes for the old one are still on the line (KV-04)."""
    line.proxy.pause()
    opened = line.receiver.open(KEY, line.source_blocks, 0, NUM_TOKENS)
    export = line.sender.open(line.through_proxy(opened.ticket), KEY, line.source_blocks)
    line.proxy.resume()
    export.advance(4 * BIG.block_size)
    await eventually(lambda: opened.received_tokens == 4 * BIG.block_size)
    line.proxy.pause()
    export.advance(NUM_TOKENS)
    await asyncio.sleep(0.1)
    assert export.sent_bytes > export.acked_bytes
    line.receiver.close(opened.ticket.transfer_id)
    line.target.bytes[:] = 0x55  # They belong to another now.
    line.proxy.resume()
    assert "unknown or closed" in str(await failure(export.wait_delivered()))
    await asyncio.sleep(0.1)
    assert (line.target.bytes == 0x55).all()


async def test_a_slow_receiver_costs_the_sender_no_memory(line: Line) -> None:
    opened = line.receiver.open(KEY, line.source_blocks, 0, NUM_TOKENS)
    line.proxy.bytes_per_s = 8e6
    tracemalloc.start()
    try:
        export = line.sender.open(line.through_proxy(opened.ticket), KEY, line.source_blocks)
        export.advance(NUM_TOKENS)
        most_unacknowledged = 0
        while not export.done:
            most_unacknowledged = max(most_unacknowledged, export.sent_bytes - export.acked_bytes)
            await asyncio.sleep(0.005)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_unacknowledged <= WINDOW_BYTES
    # Two slices a lane at the sender, one a connection at the receiver, read buffers at both ends and in the proxy.
    assert peak_bytes < LANES * (3 * BIG.block_bytes + 4 * 512 * 1024) < NUM_BLOCKS * BIG.block_bytes
    assert_delivered(line.source, line.source_blocks, line.target, opened)


async def test_backlog_goodput_and_round_trip(line: Line) -> None:
    rate = line.proxy.bytes_per_s = 2e6
    opened = line.receiver.open(KEY, line.source_blocks, 0, NUM_TOKENS)
    ticket = line.through_proxy(opened.ticket)
    endpoint = StreamEndpoint("127.0.0.1", line.proxy.port)
    assert (line.sender.backlog_bytes(endpoint), line.sender.goodput_bytes_per_s(endpoint)) == (0, None)
    export = line.sender.open(ticket, KEY, line.source_blocks)
    assert line.sender.backlog_bytes(endpoint) == NUM_BLOCKS * BIG.block_bytes  # Nothing is computed yet.
    assert line.sender.backlog_bytes(StreamEndpoint("127.0.0.1", 1)) == 0
    export.advance(32 * BIG.block_size)
    await eventually(lambda: export.acked_bytes == 32 * BIG.block_bytes)
    assert line.sender.backlog_bytes(endpoint) == (NUM_BLOCKS - 32) * BIG.block_bytes
    measured = line.sender.goodput_bytes_per_s(endpoint)
    assert measured is not None
    assert 0.2 * LANES * rate < measured < 1.5 * LANES * rate  # The proxy slows each lane.
    round_trip_s = line.sender.round_trip_s(endpoint)
    assert round_trip_s is not None
    assert 0 < round_trip_s < 1
    assert 0 < opened.elapsed_s < 10
    await export.cancel()
    assert line.sender.backlog_bytes(endpoint) == 0


async def test_a_black_hole_fails_the_export_within_the_deadline_and_frees_the_receiver(line: Line) -> None:
    opened = line.receiver.open(KEY, line.source_blocks, 0, NUM_TOKENS)
    export = line.sender.open(line.through_proxy(opened.ticket), KEY, line.source_blocks)
    export.advance(BIG.block_size)
    await eventually(lambda: export.acked_bytes > 0)
    line.proxy.pause()
    export.advance(NUM_TOKENS)
    began_s = time.monotonic()
    assert "out of reach" in str(await failure(export.wait_delivered()))
    assert time.monotonic() - began_s < FAST.reconnect_s + 2 * FAST.connect_s + 2.0
    line.proxy.resume()
    await eventually(lambda: line.proxy.closed_by_receiver >= LANES)  # It gave up by itself, before the line healed.
    again = line.sender.open(line.through_proxy(opened.ticket), KEY, line.source_blocks)
    again.advance(NUM_TOKENS)
    await within_deadline(again.wait_delivered())
    assert_delivered(line.source, line.source_blocks, line.target, opened)


async def test_a_line_that_dies_while_idle_does_not_hurt_the_next_transfer(line: Line) -> None:
    first = line.receiver.open(KEY, [0], 0, BIG.block_size)
    export = line.sender.open(line.through_proxy(first.ticket), KEY, line.source_blocks)
    export.advance(BIG.block_size)
    await within_deadline(export.wait_delivered())
    line.proxy.pause()
    await asyncio.sleep(2 * FAST.silence_s)
    line.proxy.resume()
    opened = line.receiver.open(KEY, line.source_blocks, 0, NUM_TOKENS)
    export = line.sender.open(line.through_proxy(opened.ticket), KEY, line.source_blocks)
    export.advance(NUM_TOKENS)
    await within_deadline(export.wait_delivered())
    assert_delivered(line.source, line.source_blocks, line.target, opened)


class Corrupter:
    """Flips one byte in the first `times` payloads that it sees. The source pool is filled with `MARK`."""

    MARK = b"\xa7" * 64

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, data: bytearray) -> None:
        where = data.find(self.MARK)
        if self.left and where >= 0:
            self.left -= 1
            data[where] ^= 0xFF


@pytest.mark.parametrize("times", [1, 1000])
async def test_a_corrupted_slice_is_sent_again_but_not_for_ever(line: Line, times: int) -> None:
    source = NumpyPool(BIG, 4)
    source.bytes[:] = Corrupter.MARK[0]
    async with AsyncExitStack() as stack:
        sender = StreamSender(source, BIG_IDENTITY, peer(Role.PREFILL), connections=1, timeouts=FAST)
        stack.push_async_callback(sender.stop)
        line.proxy.alter = Corrupter(times)
        opened = line.receiver.open(KEY, [9, 8, 7, 6], 0, 4 * BIG.block_size)
        export = sender.open(line.through_proxy(opened.ticket), KEY, [0, 1, 2, 3])
        export.advance(4 * BIG.block_size)
        if times == 1:
            await within_deadline(export.wait_delivered())
            assert_delivered(source, [0, 1, 2, 3], line.target, opened)
            assert export.sent_bytes == export.payload_bytes_total + BIG.block_bytes
        else:
            assert "checksum" in str(await failure(export.wait_delivered()))
            assert opened.received_tokens == 0
            assert not line.target.bytes.any()


async def test_pages_may_differ_at_the_two_ends() -> None:
    source = filled(40)
    target = NumpyPool(msgspec.structs.replace(TINY, block_size=16), 12)
    async with AsyncExitStack() as stack:
        receiver = StreamReceiver(target, IDENTITY, peer(Role.MAIN_DECODE), host="127.0.0.1", port=0)
        await receiver.start()
        stack.push_async_callback(receiver.stop)
        sender = StreamSender(source, IDENTITY, peer(Role.PREFILL), max_slice_bytes=slices.layer_token_bytes(TINY) * 3)
        stack.push_async_callback(sender.stop)
        blocks = list(range(39, -1, -1))
        opened = receiver.open(KEY, list(range(2, 12)), 16, 157)
        export = sender.open(opened.ticket, KEY, blocks)
        for computed in (16, 50, 51, 157):
            export.advance(computed)
            await asyncio.sleep(0)
        await within_deadline(export.wait_delivered())
        assert_delivered(source, blocks, target, opened)


async def test_a_successor_on_the_same_port_is_another_peer() -> None:
    """KV-13: the address is not the identity."""
    source, target = filled(4), NumpyPool(TINY, 4)
    async with AsyncExitStack() as stack:
        old = StreamReceiver(NumpyPool(TINY, 4), IDENTITY, peer(Role.RELAY, "e1"), host="127.0.0.1", port=0)
        await old.start()
        sender = StreamSender(source, IDENTITY, peer(Role.PREFILL), timeouts=FAST)
        stack.push_async_callback(sender.stop)
        export = sender.open(old.open(KEY, [0, 1], 0, 8).ticket, KEY, [0, 1])
        export.advance(4)
        await eventually(lambda: export.acked_bytes > 0)
        await old.stop()
        new = StreamReceiver(
            target, IDENTITY, peer(Role.RELAY, "e2"), host="127.0.0.1", port=old.endpoint.port, timeouts=FAST
        )
        await new.start()
        stack.push_async_callback(new.stop)
        opened = new.open(KEY, [2, 3], 0, 8)
        again = sender.open(opened.ticket, KEY, [0, 1])
        export.advance(8)
        again.advance(8)
        await within_deadline(again.wait_delivered())
        assert "epoch" in str(await failure(export.wait_delivered()))
        assert_delivered(source, [0, 1], target, opened)


@asynccontextmanager
async def talk(line: Line, *frames: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", line.receiver.endpoint.port)
    hello = wire.Hello(wire.VERSION, BIG_IDENTITY, BIG.dtype, peer(Role.PREFILL))
    writer.write(b"".join([wire.encode(hello), *frames]))
    async with asyncio.timeout(5):
        yield reader
    writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<II", 1 << 30, 0),
        struct.pack("<II", 10, 1 << 31),
        struct.pack("<II", 4, 0) + b"\xff\xff\xff\xff",
        wire.encode(wire.Welcome(peer(Role.RELAY))),
    ],
)
async def test_garbage_ends_its_own_connection_only(line: Line, garbage: bytes) -> None:
    opened = line.receiver.open(KEY, line.source_blocks, 0, NUM_TOKENS)
    export = line.sender.open(line.through_proxy(opened.ticket), KEY, line.source_blocks)
    export.advance(BIG.block_size)
    async with talk(line, garbage) as reader:
        while await reader.read(4096):
            pass
    export.advance(NUM_TOKENS)
    await within_deadline(export.wait_delivered())
    assert export.sent_bytes == export.payload_bytes_total


async def answer(reader: asyncio.StreamReader) -> wire.Frame:
    while True:
        header_bytes, _ = wire.decode_prefix(await reader.readexactly(wire.PREFIX_BYTES))
        frame = wire.decode_header(await reader.readexactly(header_bytes), 0)
        if not isinstance(frame, wire.Ping | wire.Welcome):
            return frame


async def test_slices_that_do_not_fit_their_transfer_are_refused_one_by_one(line: Line) -> None:
    opened = line.receiver.open(KEY, [3], BIG.block_size, 2 * BIG.block_size)
    piece = Piece(BIG.block_size, 2 * BIG.block_size, 0, BIG.num_layers)
    payload = bytes(slices.gather(line.source, line.source_blocks, 0, piece))
    good = wire.Slice(
        seq=0,
        transfer_id=opened.ticket.transfer_id,
        key=KEY,
        first_token=piece.first_token,
        num_tokens=BIG.block_size,
        first_layer=0,
        num_layers=BIG.num_layers,
        first_head=0,
        num_heads=BIG.num_kv_heads,
        dtype=BIG.dtype,
        checksum=slices.checksum(memoryview(payload)),
    )
    bad = {
        "first_token": BIG.block_size - 1,
        "num_tokens": BIG.block_size - 1,
        "num_layers": BIG.num_layers + 1,
        "first_head": 1,
        "num_heads": 1,
        "dtype": "bfloat16",
        "key": AttemptKey(KEY.request_id, 2),
    }
    frames = [
        wire.encode(msgspec.structs.replace(good, seq=seq, **{field: value}), len(payload)) + payload
        for seq, (field, value) in enumerate(bad.items())
    ]
    other = wire.encode(msgspec.structs.replace(good, seq=50, transfer_id="0" * 32), len(payload)) + payload
    wrong = wire.encode(msgspec.structs.replace(good, seq=51, checksum=1), len(payload)) + payload
    async with talk(line, *frames, other, wrong) as reader:
        for seq in range(len(bad)):
            assert await answer(reader) == wire.Nack(seq, wire.NackReason.RANGE)
        assert await answer(reader) == wire.Nack(50, wire.NackReason.UNKNOWN)
        assert await answer(reader) == wire.Nack(51, wire.NackReason.CHECKSUM)
    assert not line.target.bytes.any()
    twice = [wire.encode(msgspec.structs.replace(good, seq=seq), len(payload)) + payload for seq in (60, 61)]
    async with talk(line, *twice) as reader:
        assert [await answer(reader), await answer(reader)] == [wire.Ack(60), wire.Ack(61)]
    assert opened.complete
    assert opened.received_bytes == BIG.block_bytes
    assert np.array_equal(line.target.tokens([3], 0, BIG.block_size), line.source.tokens([1], 0, BIG.block_size))


async def test_a_slice_must_hold_a_token_and_fit_a_frame() -> None:
    pool = NumpyPool(TINY, 1)
    for size in (slices.layer_token_bytes(TINY) - 1, wire.MAX_PAYLOAD_BYTES + 1):
        with pytest.raises(ConfigError):
            StreamSender(pool, IDENTITY, peer(Role.PREFILL), max_slice_bytes=size)


async def test_no_endpoint_before_start() -> None:
    receiver = StreamReceiver(NumpyPool(TINY, 1), IDENTITY, peer(Role.RELAY), host="127.0.0.1", port=0)
    with pytest.raises(TransferError, match="not started"):
        receiver.open(KEY, [0], 0, 1)
