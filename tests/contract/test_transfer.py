"""One contract, two transports: what a stage may rely on whether KV goes by the TCP stream or by NIXL over UCX/TCP."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import numpy as np
import pytest

from pdd.errors import IncompatibleError, PddError, TransferError
from pdd.kv import KvSpec, ModelIdentity
from pdd.transfer.incoming import KvImport
from pdd.transfer.interface import KvReceiver, KvSender
from pdd.transfer.nixl_receiver import NixlReceiver
from pdd.transfer.nixl_sender import NixlSender
from pdd.transfer.outgoing import KvExport
from pdd.transfer.stream_connection import StreamTimeouts
from pdd.transfer.stream_receiver import StreamReceiver
from pdd.transfer.stream_sender import StreamSender
from pdd.types import AttemptKey, Role
from tests.unit.transfer.pools import IDENTITY, KEY, TINY, NumpyPool, peer

os.environ.setdefault("UCX_TLS", "tcp,self")  # As `nixl_agent` asks for where there is no RDMA.

DEADLINE_S = 20.0
BLOCK = TINY.block_size
TIMEOUTS = StreamTimeouts(connect_s=1.0, silence_s=2.0, reconnect_s=2.0)

has_nixl = importlib.util.find_spec("nixl_cu12") is not None
transports = ["stream", pytest.param("nixl", marks=pytest.mark.skipif(not has_nixl, reason="nixl is not installed"))]


class Bench:
    """Starts receivers and senders of one transport and stops them when the test ends."""

    def __init__(self, transport: str, stack: AsyncExitStack) -> None:
        self.transport = transport
        self._stack = stack

    async def receiver(self, pool: NumpyPool, *, identity: ModelIdentity = IDENTITY, epoch: str = "e1") -> KvReceiver:
        me = peer(Role.RELAY, epoch)
        receiver: KvReceiver
        if self.transport == "stream":
            receiver = StreamReceiver(pool, identity, me, host="127.0.0.1", port=0, timeouts=TIMEOUTS)
        else:
            receiver = NixlReceiver(pool, identity, me)
        await receiver.start()
        self._stack.push_async_callback(receiver.stop)
        return receiver

    async def sender(self, pool: NumpyPool) -> KvSender:
        me = peer(Role.PREFILL)
        if self.transport == "stream":
            stream = StreamSender(
                pool, IDENTITY, me, connections=3, window_bytes=8 * pool.spec.block_bytes, timeouts=TIMEOUTS
            )
            self._stack.push_async_callback(stream.stop)
            return stream
        nixl = NixlSender(pool, IDENTITY, me, silence_s=3.0)
        await nixl.start()
        self._stack.push_async_callback(nixl.stop)
        return nixl


@pytest.fixture(params=transports)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(request.param, stack)


async def within_deadline(waiting: Awaitable[None]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await waiting


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - it watches state that only its owner could signal
            await asyncio.sleep(0.01)


async def failure(waiting: Awaitable[None]) -> PddError:
    with pytest.raises((TransferError, IncompatibleError)) as caught:
        await within_deadline(waiting)
    return caught.value


def filled(num_blocks: int, spec: KvSpec = TINY) -> NumpyPool:
    pool = NumpyPool(spec, num_blocks)
    pool.fill(7)
    return pool


def assert_delivered(source: NumpyPool, source_blocks: list[int], target: NumpyPool, opened: KvImport) -> None:
    first, end = opened.ticket.first_token, opened.ticket.end_token
    expected = source.tokens(source_blocks, first, end)
    assert np.array_equal(target.tokens(list(opened.blocks), 0, end - first), expected)


@pytest.mark.parametrize("tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 19 * BLOCK + 2])
async def test_bytes_arrive_equal(bench: Bench, tokens: int) -> None:
    source, target = filled(40), NumpyPool(TINY, 40)
    source_blocks, blocks = list(range(30, 9, -1)), list(range(3, 33, 1))[: TINY.blocks_for(tokens)]
    receiver, sender = await bench.receiver(target), await bench.sender(source)
    ended: list[KvImport] = []
    opened = receiver.open(KEY, blocks, 0, tokens, on_complete=ended.append)
    export = sender.open(opened.ticket, KEY, source_blocks)
    assert export.payload_bytes_total == tokens * TINY.token_bytes
    export.advance(tokens)
    await within_deadline(export.wait_delivered())
    await within_deadline(opened.wait_complete())
    assert_delivered(source, source_blocks, target, opened)
    assert (opened.received_tokens, opened.received_bytes) == (tokens, tokens * TINY.token_bytes)
    assert export.done
    assert export.acked_bytes == export.sent_bytes == export.payload_bytes_total
    await asyncio.sleep(0)
    assert ended == [opened]
    outside = [block for block in range(40) if block not in blocks]
    assert not target.bytes.reshape(40, -1)[outside].any()


async def test_only_what_is_computed_leaves_and_the_hit_is_skipped(bench: Bench) -> None:
    source, target = NumpyPool(TINY, 8), NumpyPool(TINY, 8)
    receiver, sender = await bench.receiver(target), await bench.sender(source)
    first, end = 2 * BLOCK, 6 * BLOCK + 1
    opened = receiver.open(KEY, [7, 6, 5, 4, 3], first, end)
    source_blocks = list(range(8))
    acked: list[int] = []
    export = sender.open(opened.ticket, KEY, source_blocks, on_acked=lambda export: acked.append(export.acked_bytes))
    whole = np.random.default_rng(1).integers(0, 256, source.bytes.size, np.uint8)
    for computed in (3 * BLOCK, 3 * BLOCK + 1, 2, 5 * BLOCK, end):  # One call is late and must change nothing.
        written = computed // BLOCK if computed < end else 8
        source.bytes[: written * TINY.block_bytes] = whole[: written * TINY.block_bytes]
        export.advance(computed)
        full = max(0, computed // BLOCK * BLOCK - first) if computed < end else end - first
        await eventually(lambda full=full: opened.received_tokens >= full)
        await asyncio.sleep(0.02)
        if computed > 2:
            assert opened.received_tokens == full
    await within_deadline(export.wait_delivered())
    assert_delivered(source, source_blocks, target, opened)
    assert acked == sorted(acked)
    assert acked[-1] == export.payload_bytes_total == (end - first) * TINY.token_bytes


async def test_an_empty_range_is_complete_at_once(bench: Bench) -> None:
    receiver, sender = await bench.receiver(NumpyPool(TINY, 4)), await bench.sender(filled(4))
    ended: list[KvImport] = []
    opened = receiver.open(KEY, [], 2 * BLOCK, 2 * BLOCK, on_complete=ended.append)
    export = sender.open(opened.ticket, KEY, [0, 1])
    assert opened.complete
    assert export.done
    await within_deadline(opened.wait_complete())
    await within_deadline(export.wait_delivered())
    await asyncio.sleep(0)
    assert ended == [opened]


async def test_transfers_at_once_do_not_mix(bench: Bench) -> None:
    source, target = filled(60), NumpyPool(TINY, 60)
    receiver, sender = await bench.receiver(target), await bench.sender(source)
    transfers: list[tuple[KvExport, KvImport, list[int]]] = []
    for number in range(3):
        key = AttemptKey(KEY.request_id, number)
        blocks = list(range(number, 60, 3))
        opened = receiver.open(key, blocks, 0, 20 * BLOCK)
        source_blocks = blocks[::-1]
        transfers.append((sender.open(opened.ticket, key, source_blocks), opened, source_blocks))
    for computed in range(0, 20 * BLOCK + 1, 4 * BLOCK):
        for export, _, _ in transfers:
            export.advance(computed)
        await asyncio.sleep(0)
    for export, opened, source_blocks in transfers:
        await within_deadline(export.wait_delivered())
        assert_delivered(source, source_blocks, target, opened)


async def test_a_closed_transfer_is_refused(bench: Bench) -> None:
    target = NumpyPool(TINY, 4)
    receiver, sender = await bench.receiver(target), await bench.sender(filled(4))
    opened = receiver.open(KEY, [0, 1], 0, 2 * BLOCK)
    export = sender.open(opened.ticket, KEY, [0, 1])
    receiver.close(opened.ticket.transfer_id)
    receiver.close(opened.ticket.transfer_id)
    export.advance(2 * BLOCK)
    assert "unknown or closed" in str(await failure(export.wait_delivered()))
    assert "closed" in str(await failure(opened.wait_complete()))
    assert not target.bytes.any()


async def test_cancel_midway_is_quiet_and_others_go_on(bench: Bench) -> None:
    source, target = filled(8), NumpyPool(TINY, 8)
    receiver, sender = await bench.receiver(target), await bench.sender(source)
    opened = receiver.open(KEY, [0, 1, 2, 3], 0, 4 * BLOCK)
    other = receiver.open(AttemptKey(KEY.request_id, 2), [4, 5], 0, 2 * BLOCK)
    export = sender.open(opened.ticket, KEY, [0, 1, 2, 3])
    other_export = sender.open(other.ticket, other.key, [6, 7])
    export.advance(2 * BLOCK)
    await eventually(lambda: opened.received_tokens == 2 * BLOCK)
    await within_deadline(export.cancel())
    await within_deadline(export.cancel())
    receiver.close(opened.ticket.transfer_id)
    before = target.bytes.copy()
    export.advance(4 * BLOCK)
    assert "cancelled" in str(await failure(export.wait_delivered()))
    other_export.advance(2 * BLOCK)
    await within_deadline(other_export.wait_delivered())
    assert_delivered(source, [6, 7], target, other)
    assert np.array_equal(target.bytes[: 4 * TINY.block_bytes], before[: 4 * TINY.block_bytes])
    assert not export.done
    assert not opened.complete


async def test_a_ticket_of_another_epoch_is_refused(bench: Bench) -> None:
    target = NumpyPool(TINY, 4)
    receiver, sender = await bench.receiver(target), await bench.sender(filled(4))
    opened = receiver.open(KEY, [0], 0, BLOCK)
    old = msgspec.structs.replace(opened.ticket, holder=peer(Role.RELAY, epoch="e0"))
    export = sender.open(old, KEY, [0])
    export.advance(BLOCK)
    assert "epoch" in str(await failure(export.wait_delivered()))
    assert not target.bytes.any()
    export = sender.open(opened.ticket, KEY, [0])
    export.advance(BLOCK)
    await within_deadline(export.wait_delivered())


async def test_another_model_is_refused_by_name(bench: Bench) -> None:
    target = NumpyPool(TINY, 4)
    other = msgspec.structs.replace(IDENTITY, rope="theta=500000")
    receiver, sender = await bench.receiver(target, identity=other), await bench.sender(filled(4))
    opened = receiver.open(KEY, [0], 0, BLOCK)
    export = sender.open(opened.ticket, KEY, [0])
    export.advance(BLOCK)
    error = await failure(export.wait_delivered())
    assert isinstance(error, IncompatibleError)
    assert error.field == "rope"
    assert not target.bytes.any()


async def test_another_dtype_is_refused_by_name(bench: Bench) -> None:
    receiver = await bench.receiver(NumpyPool(msgspec.structs.replace(TINY, dtype="bfloat16"), 4))
    sender = await bench.sender(filled(4))
    opened = receiver.open(KEY, [0], 0, BLOCK)
    with pytest.raises(IncompatibleError, match="dtype"):
        sender.open(opened.ticket, KEY, [0])


async def test_a_restarted_receiver_fails_old_exports_and_serves_new_ones(bench: Bench) -> None:
    source = filled(4)
    receiver, sender = await bench.receiver(NumpyPool(TINY, 4)), await bench.sender(source)
    opened = receiver.open(KEY, [0, 1], 0, 2 * BLOCK)
    export = sender.open(opened.ticket, KEY, [0, 1])
    export.advance(BLOCK)
    await eventually(lambda: export.acked_bytes > 0)
    await within_deadline(receiver.stop())
    assert isinstance(await failure(opened.wait_complete()), TransferError)
    target = NumpyPool(TINY, 4)
    successor = await bench.receiver(target, epoch="e2")
    reopened = successor.open(KEY, [2, 3], 0, 2 * BLOCK)
    again = sender.open(reopened.ticket, KEY, [0, 1])
    export.advance(2 * BLOCK)
    again.advance(2 * BLOCK)
    await within_deadline(again.wait_delivered())
    assert_delivered(source, [0, 1], target, reopened)
    assert isinstance(await failure(export.wait_delivered()), TransferError)


async def test_stop_fails_what_is_open(bench: Bench) -> None:
    receiver, sender = await bench.receiver(NumpyPool(TINY, 4)), await bench.sender(filled(4))
    opened = receiver.open(KEY, [0], 0, BLOCK)
    export = sender.open(opened.ticket, KEY, [0])
    await within_deadline(sender.stop())
    assert "stopped" in str(await failure(export.wait_delivered()))
    with pytest.raises(TransferError):
        sender.open(opened.ticket, KEY, [0])
    await within_deadline(receiver.stop())
    assert isinstance(await failure(opened.wait_complete()), TransferError)


async def test_nothing_is_left_behind(bench: Bench) -> None:
    async def once() -> None:
        source = filled(4)
        receiver, sender = await bench.receiver(NumpyPool(TINY, 4)), await bench.sender(source)
        opened = receiver.open(KEY, [0, 1], 0, 2 * BLOCK)
        unfinished = receiver.open(AttemptKey(KEY.request_id, 2), [2, 3], 0, 2 * BLOCK)
        export = sender.open(opened.ticket, KEY, [0, 1])
        sender.open(unfinished.ticket, unfinished.key, [2, 3]).advance(BLOCK)
        export.advance(2 * BLOCK)
        await within_deadline(export.wait_delivered())
        await within_deadline(sender.stop())
        await within_deadline(receiver.stop())

    def held() -> tuple[int, int, int]:
        return len(asyncio.all_tasks()), threading.active_count(), len(os.listdir("/proc/self/fd"))

    await once()  # What the libraries keep for good after their first use is not ours.
    await asyncio.sleep(0.1)
    before = held()
    await once()
    await eventually(lambda: held() == before)


async def test_a_link_whose_receiver_left_ends_by_itself() -> None:
    receiver = StreamReceiver(NumpyPool(TINY, 4), IDENTITY, peer(Role.RELAY), host="127.0.0.1", port=0)
    await receiver.start()
    before = len(asyncio.all_tasks())
    sender = StreamSender(filled(4), IDENTITY, peer(Role.PREFILL), timeouts=TIMEOUTS)
    opened = receiver.open(KEY, [0], 0, BLOCK)
    export = sender.open(opened.ticket, KEY, [0])
    export.advance(BLOCK)
    await within_deadline(export.wait_delivered())
    assert len(asyncio.all_tasks()) > before
    await within_deadline(receiver.stop())
    await eventually(lambda: len(asyncio.all_tasks()) == before)
    await within_deadline(sender.stop())


async def test_room_must_hold_the_range(bench: Bench) -> None:
    receiver = await bench.receiver(NumpyPool(TINY, 4))
    with pytest.raises(ValueError, match="do not hold"):
        receiver.open(KEY, [0], 0, BLOCK + 1)
    with pytest.raises(ValueError, match="do not begin at a block"):
        receiver.open(KEY, [0], 1, BLOCK)
