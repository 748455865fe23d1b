"""Live attempts of a stage, and tombstones of those that are over.

A message for an attempt that is over, or older than one already known for the same request, is stale: it is refused
and counted. Tombstones live 60 s, as a cancel may overtake the submit that it cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pdd.errors import StaleError, UnknownRequestError
from pdd.types import AttemptKey

TOMBSTONE_S = 60.0

State = TypeVar("State")


class Attempts(Generic[State]):
    """Table of live attempts. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._live: dict[AttemptKey, State] = {}
        self._tombstones: dict[AttemptKey, float] = {}
        self.stale_messages = 0

    def open(self, key: AttemptKey, state: State) -> None:
        """Enter a new attempt. Raises `StaleError` if it is over already or a newer one is live."""
        self.require_fresh(key)
        self._live[key] = state

    def require_fresh(self, key: AttemptKey) -> None:
        """Raise `StaleError` if `open` would."""
        self._prune()
        if key in self._tombstones or any(
            other.request_id == key.request_id and other.attempt >= key.attempt for other in self._live
        ):
            self._refuse(key)

    def get(self, key: AttemptKey) -> State:
        """State of a live attempt. Raises `StaleError` if it is over, `UnknownRequestError` if it never was."""
        state = self._live.get(key)
        if state is not None:
            return state
        if key in self._tombstones:
            self._refuse(key)
        raise UnknownRequestError(f"attempt {key} is not known here")

    def find(self, key: AttemptKey) -> State | None:
        """State of a live attempt, or None."""
        return self._live.get(key)

    def close(self, key: AttemptKey) -> State | None:
        """End an attempt, known or not, and bury it. Returns its state if it was live."""
        self._prune()
        self._tombstones.pop(key, None)
        self._tombstones[key] = self._now() + TOMBSTONE_S
        return self._live.pop(key, None)

    def __iter__(self) -> Iterator[tuple[AttemptKey, State]]:
        return iter(list(self._live.items()))

    def __len__(self) -> int:
        return len(self._live)

    def _refuse(self, key: AttemptKey) -> None:
        self.stale_messages += 1
        raise StaleError(f"attempt {key} is over")

    def _prune(self) -> None:
        now = self._now()
        while self._tombstones:
            key, expiry = next(iter(self._tombstones.items()))
            if expiry > now:
                return
            del self._tombstones[key]
