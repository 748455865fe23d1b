"""Attempts and their tombstones."""

from __future__ import annotations

import pytest

from pdd.errors import StaleError, UnknownRequestError
from pdd.stage.attempts import TOMBSTONE_S, Attempts
from pdd.types import AttemptKey

ONE, TWO = AttemptKey("a" * 32, 1), AttemptKey("a" * 32, 2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_cancel_that_overtakes_its_submit_wins() -> None:
    attempts: Attempts[str] = Attempts(Clock())
    assert attempts.close(ONE) is None
    with pytest.raises(StaleError):
        attempts.open(ONE, "late submit")
    assert attempts.stale_messages == 1


def test_an_older_attempt_is_refused_while_a_newer_one_lives() -> None:
    attempts: Attempts[str] = Attempts(Clock())
    attempts.open(TWO, "two")
    with pytest.raises(StaleError):
        attempts.open(ONE, "one")
    assert attempts.get(TWO) == "two"


def test_unknown_is_not_stale() -> None:
    attempts: Attempts[str] = Attempts(Clock())
    with pytest.raises(UnknownRequestError):
        attempts.get(ONE)
    assert attempts.stale_messages == 0


def test_tombstones_expire() -> None:
    clock = Clock()
    attempts: Attempts[str] = Attempts(clock)
    attempts.open(ONE, "x")
    assert attempts.close(ONE) == "x"
    with pytest.raises(StaleError):
        attempts.get(ONE)
    clock.now += TOMBSTONE_S + 1
    attempts.open(ONE, "again")
    assert attempts.get(ONE) == "again"
