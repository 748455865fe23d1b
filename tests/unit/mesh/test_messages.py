"""What is on the wire: whole in, whole out; and what does not fit is named."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.errors import RemoteError
from pdd.kv import NixlEndpoint, StreamEndpoint, Ticket
from pdd.mesh import messages
from pdd.mesh.messages import Attach, Beat, Reserve, Submit, TokenBatch
from pdd.types import AttemptKey, Path, Role, Sampling, StopRule, TokenEvent
from tests.unit.mesh.beats import SPEC, beat, peer

P, RLD, MD, GATEWAY = (peer(role) for role in (Role.PREFILL, Role.RELAY, Role.MAIN_DECODE, Role.GATEWAY))
KEY = AttemptKey("ab" * 16, 3)
STREAM = Ticket("cd" * 16, MD, 0, 0, 9, SPEC, StreamEndpoint("127.0.0.1", 4711))
NIXL = Ticket("ef" * 16, RLD, 4, 4, 9, SPEC, NixlEndpoint("agent", b"\x00\xff", 1 << 63, [5, 2]))
STOP = StopRule(9, frozenset({2, 0}))
SUBMIT = Submit(KEY, GATEWAY, [1, 2, 3], [7], Sampling(0.5, 0.9, 40, (1 << 63) - 1), STOP)
RESERVE = Reserve(KEY, GATEWAY, P, [1, 2, 3], [7], Sampling(), STOP, 5, relay=RLD, handoff_at=4)


@pytest.mark.parametrize(
    "message",
    [
        SUBMIT,
        RESERVE,
        Attach(KEY, Path.RELAYED, STREAM, NIXL, True),
        Attach(KEY, Path.DIRECT, STREAM, None, False),
        beat(P, wan_goodput_bytes_per_s=1.5e6),
        TokenBatch(MD, [TokenEvent(KEY, 1, 12, 511, (1 << 64) - 1)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    assert messages.decode(messages.encode(message), type(message)) == message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": "text"}, "prompt"),
        ({"key": {"request_id": "x"}}, "attempt"),
        ({"gateway": {"dc": "a", "role": "cook", "instance": "0", "epoch": "e"}}, "role"),
        ({"sampling": None}, "sampling"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], named: str) -> None:
    raw = {**msgspec.msgpack.decode(messages.encode(SUBMIT)), **change}
    with pytest.raises(RemoteError, match=rf"^Submit: .*{named}") as told:
        messages.decode(messages.encode(raw), Submit)
    assert told.value.code == "malformed"


@given(st.data())
def test_damaged_bytes_do_no_more_than_fail(data: st.DataObject) -> None:
    damaged = bytearray(messages.encode(SUBMIT))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteError):
        assert isinstance(messages.decode(bytes(damaged), Submit), Submit)


def test_a_newer_peer_may_say_more() -> None:
    raw = {**msgspec.msgpack.decode(messages.encode(beat(P))), "mood": "fine"}
    assert messages.decode(messages.encode(raw), Beat) == beat(P)
