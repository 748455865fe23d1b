"""What the taking side accepts, and when it starts."""

from __future__ import annotations

import msgspec
import pytest

from pdd.handoff.receiver import HandoffReceiver
from pdd.types import AttemptKey, Handoff, Peer, Role, hash_prompt

PROMPT = [1, 2, 3, 4]
PREFILL = Peer("a", Role.PREFILL, "0", "e")


def offer(**changes: object) -> Handoff:
    message = Handoff(
        key=AttemptKey("f" * 32, 1),
        sender=PREFILL,
        seq=1,
        generation=0,
        first_position=len(PROMPT),
        ids=[9],
        final=True,
        covered_tokens=len(PROMPT),
        prompt_hash=hash_prompt(PROMPT),
    )
    return msgspec.structs.replace(message, **changes)


def test_starts_only_with_kv_and_ownership() -> None:
    receiver = HandoffReceiver(PROMPT, [], len(PROMPT))
    assert receiver.take(offer()).accepted
    assert receiver.start() is None
    receiver.kv_complete()
    assert receiver.start() == [9]
    assert receiver.start() is None


def test_a_round_that_is_not_final_gives_no_ownership() -> None:
    receiver = HandoffReceiver(PROMPT, [], len(PROMPT))
    receiver.kv_complete()
    assert receiver.take(offer(final=False)).accepted
    assert not receiver.owned
    assert receiver.start() is None
    assert receiver.take(offer(seq=2, first_position=len(PROMPT) + 1, ids=[10])).accepted
    assert receiver.start() == [9, 10]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_hash": hash_prompt([1, 2, 3])}, "prompt hash"),
        ({"covered_tokens": 3}, "covers 3 tokens"),
        ({"first_position": 6}, "starts at position 6"),
        ({"first_position": 3}, "starts at position 3"),
    ],
)
def test_refuses_what_does_not_fit_and_says_why(change: dict[str, object], reason: str) -> None:
    receiver = HandoffReceiver(PROMPT, [], len(PROMPT))
    reply = receiver.take(offer(**change))
    assert not reply.accepted
    assert reason in reply.reason
    assert not receiver.owned


def test_refuses_ids_that_contradict_what_it_knows() -> None:
    receiver = HandoffReceiver(PROMPT, [7, 8], len(PROMPT) + 2)
    reply = receiver.take(offer(ids=[7, 1, 9], covered_tokens=len(PROMPT) + 2))
    assert not reply.accepted
    assert receiver.ids == [7, 8]


def test_a_refused_seq_is_never_accepted_later() -> None:
    receiver = HandoffReceiver(PROMPT, [], len(PROMPT))
    assert not receiver.take(offer(first_position=5, ids=[10])).accepted
    assert receiver.take(offer(seq=2, final=False)).accepted
    assert not receiver.take(offer(first_position=5, ids=[10])).accepted


def test_the_same_seq_again_changes_nothing() -> None:
    receiver = HandoffReceiver(PROMPT, [], len(PROMPT))
    first = receiver.take(offer())
    assert receiver.take(offer()) == first
    assert receiver.ids == [9]
    assert not receiver.withdraw(PREFILL, 1)
