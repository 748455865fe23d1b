"""Subjects as the protocol writes them; every wildcard catches what it is for, and nothing else."""

from __future__ import annotations

from itertools import product

from pdd.mesh import subjects
from pdd.types import Role
from tests.unit.mesh.beats import peer

MAIN = peer(Role.MAIN_DECODE, "7", dc="b")
GATEWAY = peer(Role.GATEWAY, "g")


def test_subjects_are_those_of_the_protocol() -> None:
    assert subjects.endpoint(MAIN, "reserve") == "pdd.v1.b.main_decode.7.reserve"
    assert subjects.tokens(GATEWAY) == "pdd.v1.a.tokens.g"
    assert subjects.progress(GATEWAY) == "pdd.v1.a.progress.g"
    assert subjects.beat(MAIN) == "pdd.v1.b.beat.main_decode.7"
    assert subjects.kv_events(MAIN) == "pdd.v1.b.kv_events.main_decode.7"
    assert subjects.cache_lookup("a") == "pdd.v1.a.cache.lookup"


def test_wildcards_catch_their_kind_only() -> None:
    peers = [peer(role, name, dc=dc) for role, name, dc in product(Role, ("0", "1"), ("a", "b"))]
    beats = {subjects.beat(one): one for one in peers}
    events = {subjects.kv_events(one): one for one in peers}
    others = [subjects.endpoint(one, "cancel") for one in peers] + [subjects.tokens(one) for one in peers]
    assert len(beats) == len(events) == len(peers)
    names = [*beats, *events, *others]
    assert caught(subjects.beats(), names) == list(beats)
    assert caught(subjects.beats(dc="b"), names) == [name for name, one in beats.items() if one.dc == "b"]
    assert caught(subjects.beats(role=Role.RELAY), names) == [n for n, one in beats.items() if one.role is Role.RELAY]
    assert caught(subjects.kv_events_of("b"), names) == [name for name, one in events.items() if one.dc == "b"]


def caught(pattern: str, names: list[str]) -> list[str]:
    """NATS' rule: `*` stands for exactly one token."""
    wanted = pattern.split(".")
    return [
        name
        for name in names
        if len(name.split(".")) == len(wanted)
        and all(one in ("*", part) for one, part in zip(wanted, name.split("."), strict=True))
    ]
