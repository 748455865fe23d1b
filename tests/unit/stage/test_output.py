"""Output IDs on their way: what a stage says fits together, however the IDs came to it."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from pdd.errors import UnreachableError
from pdd.mesh.messages import Replayed, TokenBatch
from pdd.stage.output import OutputStream, TokenPublisher
from pdd.types import EMPTY_OUTPUT_HASH, AttemptKey, FinishReason, Peer, Role, TokenEvent, hash_output
from services.gateway.assembler import Assembler

KEY = AttemptKey("c" * 32, 2)
PROMPT_TOKENS = 5
ME, ONE, TWO = Peer("a", Role.RELAY, "0", "e"), Peer("a", Role.GATEWAY, "1", "e"), Peer("a", Role.GATEWAY, "2", "e")

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=12)


@given(earlier=token_ids, handed=token_ids, sampled=st.lists(token_ids, max_size=4), data=st.data())
def test_events_and_replays_of_a_stream_agree(
    earlier: list[int], handed: list[int], sampled: list[list[int]], data: st.DataObject
) -> None:
    """IDs of earlier attempts, IDs handed over and IDs sampled here make one history with one hash."""
    stream = OutputStream(KEY, PROMPT_TOKENS, earlier)
    stream.learn([*earlier, *handed])
    events = [event for step in sampled for event in stream.emit(step, 4)]
    ids = [*earlier, *handed, *(token for step in sampled for token in step)]
    assert stream.ids == ids
    assert stream.end_position == PROMPT_TOKENS + len(ids)
    known = len(earlier) + len(handed)
    assert events == [
        TokenEvent(KEY, 4, PROMPT_TOKENS + at, ids[at], hash_output(EMPTY_OUTPUT_HASH, ids[:at]))
        for at in range(known, len(ids))
    ]
    at = data.draw(st.integers(0, len(ids)))
    replay = stream.replay(PROMPT_TOKENS + at, 4)
    assert replay == Replayed(4, PROMPT_TOKENS + at, hash_output(EMPTY_OUTPUT_HASH, ids[:at]), ids[at:], None)
    assembler = Assembler(PROMPT_TOKENS)
    assert assembler.accept_replay(stream.replay(PROMPT_TOKENS, 4)) == ids


def test_a_replay_tells_how_the_answer_ended_and_begins_with_the_output() -> None:
    stream = OutputStream(KEY, PROMPT_TOKENS, [])
    stream.emit([8, 9], 0)
    stream.finish = FinishReason.STOP
    assert stream.replay(0, 0) == Replayed(0, PROMPT_TOKENS, EMPTY_OUTPUT_HASH, [8, 9], FinishReason.STOP)
    assert stream.replay(PROMPT_TOKENS + 2, 0).ids == []


def test_learning_what_is_known_changes_nothing() -> None:
    stream = OutputStream(KEY, PROMPT_TOKENS, [1, 2])
    stream.learn([1, 2])
    assert stream.emit([3], 0)[0].prefix_hash == hash_output(EMPTY_OUTPUT_HASH, [1, 2])


class Wire:
    """Where a publisher's messages go; it fails while `down`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, TokenBatch]] = []
        self.down = False

    async def publish(self, subject: str, message: TokenBatch) -> None:
        await asyncio.sleep(0)
        if self.down:
            raise UnreachableError("no server")
        self.sent.append((subject, message))


def batch(number: int) -> list[TokenEvent]:
    return [TokenEvent(KEY, 0, number, number, 0)]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_batches_leave_in_order_one_message_each() -> None:
    wire = Wire()
    publisher = TokenPublisher(wire, ME)
    running = asyncio.create_task(publisher.run())
    for number, gateway in enumerate([ONE, TWO, ONE]):
        publisher.publish(gateway, batch(number))
    await settle()
    running.cancel()
    assert wire.sent == [
        ("pdd.v1.a.tokens.1", TokenBatch(ME, batch(0))),
        ("pdd.v1.a.tokens.2", TokenBatch(ME, batch(1))),
        ("pdd.v1.a.tokens.1", TokenBatch(ME, batch(2))),
    ]


async def test_an_outage_costs_batches_not_the_publisher() -> None:
    wire = Wire()
    publisher = TokenPublisher(wire, ME)
    running = asyncio.create_task(publisher.run())
    wire.down = True
    publisher.publish(ONE, batch(0))
    await settle()
    wire.down = False
    publisher.publish(ONE, batch(1))
    await settle()
    running.cancel()
    assert [message.events for _, message in wire.sent] == [batch(1)]


async def test_a_queue_that_is_full_drops_and_says_so() -> None:
    publisher = TokenPublisher(Wire(), ME)
    with capture_logs() as logs:
        for number in range(1030):  # nobody sends
            publisher.publish(ONE, batch(number))
    assert [entry["event"] for entry in logs] == ["token_batch_dropped"] * 6
