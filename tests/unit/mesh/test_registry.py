"""Life and death by beats, on a clock that the test moves."""

from __future__ import annotations

import pytest

from pdd.mesh.registry import BEAT_INTERVAL_S, MISSED_BEATS, Registry
from pdd.types import Peer, Role
from tests.unit.mesh.beats import beat, peer

P, M = peer(Role.PREFILL), peer(Role.MAIN_DECODE, dc="b")


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A registry, its clock, and whom it said to be gone."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.gone: list[Peer] = []
        self.registry = Registry(self.clock)
        self.registry.on_gone = self.gone.append

    def live(self, role: Role | None = None) -> list[Peer]:
        return [one.peer for one in self.registry.live(role)]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_an_instance_lives_until_it_has_been_silent_for_three_beats(watched: Watched) -> None:
    registry, clock = watched.registry, watched.clock
    registry.hear(beat(P))
    registry.hear(beat(M))
    for _ in range(MISSED_BEATS):
        clock.now += BEAT_INTERVAL_S
        registry.hear(beat(M))
        registry.expire()
    assert (watched.live(), watched.gone) == ([P, M], [])
    clock.now += 0.01
    registry.expire()
    registry.expire()
    assert (watched.live(), watched.gone) == ([M], [P])
    assert not registry.is_live(P)
    registry.hear(beat(P))  # only the line was down
    assert registry.is_live(P)


def test_a_new_epoch_replaces_the_old_which_is_gone_at_once(watched: Watched) -> None:
    registry = watched.registry
    reborn = peer(Role.PREFILL, epoch="second")
    registry.hear(beat(P))
    registry.hear(beat(P, running=3))
    assert watched.gone == []
    registry.hear(beat(reborn))
    assert watched.gone == [P]
    assert (registry.is_live(P), registry.is_live(reborn)) == (False, True)
    assert watched.live() == [reborn]


def test_forgetting_takes_the_meant_epoch_only(watched: Watched) -> None:
    registry = watched.registry
    reborn = peer(Role.PREFILL, epoch="second")
    registry.hear(beat(reborn))
    registry.forget(P)
    registry.forget(M)
    assert (watched.live(), watched.gone) == ([reborn], [])
    registry.forget(reborn)
    registry.forget(reborn)
    assert (watched.live(), watched.gone) == ([], [reborn])


def test_the_latest_beat_counts_and_the_order_is_stable(watched: Watched) -> None:
    registry = watched.registry
    others = [peer(Role.PREFILL, name) for name in ("2", "1")]
    for one in [M, *others, P]:
        registry.hear(beat(one))
    registry.hear(beat(others[1], running=2))
    assert watched.live() == [P, others[1], others[0], M]
    assert watched.live(Role.MAIN_DECODE) == [M]
    assert [one.load.running for one in registry.live(Role.PREFILL)] == [0, 2, 0]


def test_the_same_name_elsewhere_is_somebody_else(watched: Watched) -> None:
    registry = watched.registry
    here, there = peer(Role.MAIN_DECODE, dc="a", epoch="one"), peer(Role.MAIN_DECODE, dc="b", epoch="two")
    for one in (here, there, peer(Role.RELAY, epoch="three")):
        registry.hear(beat(one))
    assert watched.gone == []
    assert registry.is_live(here)
    assert registry.is_live(there)


def test_who_hears_nobody_takes_nobody_for_dead(watched: Watched) -> None:
    """A reader that has lost its own connection: silence counts from its return."""
    registry, clock = watched.registry, watched.clock
    connected = True
    registry._hears = lambda: connected
    registry.hear(beat(P))
    connected = False
    for _ in range(10):
        clock.now += BEAT_INTERVAL_S
        registry.expire()
    connected = True
    assert watched.live() == [P]
    for _ in range(MISSED_BEATS):
        clock.now += BEAT_INTERVAL_S
        registry.expire()
    assert watched.live() == [P]
    clock.now += BEAT_INTERVAL_S
    registry.expire()
    assert watched.gone == [P]


def test_who_was_stopped_reads_its_inbox_before_it_judges(watched: Watched) -> None:
    """A process that slept finds everybody silent for as long: what they said meanwhile is still to be read."""
    registry, clock = watched.registry, watched.clock
    registry.hear(beat(P))
    registry.hear(beat(M))
    asked_at = clock.now
    clock.now += 10 * BEAT_INTERVAL_S
    assert registry.silence_s(asked_at) == 0
    registry.expire()
    registry.hear(beat(M))
    for _ in range(MISSED_BEATS):
        clock.now += BEAT_INTERVAL_S
        registry.hear(beat(M))
        registry.expire()
    assert (watched.live(), registry.silence_s(asked_at)) == ([P, M], MISSED_BEATS * BEAT_INTERVAL_S)
    clock.now += BEAT_INTERVAL_S
    registry.expire()
    assert (watched.live(), watched.gone) == ([M], [P])
