"""Puts token events into one text, as a plain object: what it has emitted is the sole authority.

Events of two stages come over NATS in any order, twice, late, or not at all. Position p is emitted once, and only if
the event's `prefix_hash` equals the hash of what was emitted before it: two stages that round differently can never be
spliced into one answer. Early positions are kept (bounded); a gap is repaired by a replay.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdd.mesh.messages import Replayed
from pdd.types import EMPTY_OUTPUT_HASH, TokenEvent, hash_output

_EARLY_EVENTS = 4096


class Assembler:
    """Emitted output IDs of one request, across its attempts."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._emitted: list[int] = []
        self._hash = EMPTY_OUTPUT_HASH
        self._early: dict[int, TokenEvent] = {}
        self._generation = 0
        self._end_position: int | None = None
        self.dropped = 0

    @property
    def emitted(self) -> list[int]:
        """All output IDs emitted so far."""
        return self._emitted

    @property
    def next_position(self) -> int:
        """Position (in prompt + output) of the next token to emit."""
        return self._prompt_tokens + len(self._emitted)

    @property
    def has_gap(self) -> bool:
        """Whether something is known to be missing: a later token or the end of the answer has been heard of."""
        return bool(self._early) or (self._end_position is not None and self._end_position > self.next_position)

    def new_attempt(self) -> None:
        """What earlier attempts said and was not emitted is void."""
        self._early.clear()
        self._generation = 0
        self._end_position = None

    def is_news(self, event: TokenEvent) -> bool:
        """Whether the event is of the newest generation known and ahead of what was emitted."""
        return event.generation >= self._generation and event.position >= self.next_position

    def accept(self, event: TokenEvent) -> list[int]:
        """Take in one event; returns the tokens that it allows to emit, in order."""
        if not self.is_news(event):
            self.dropped += 1
            return []
        self._generation = event.generation
        if len(self._early) >= _EARLY_EVENTS and event.position != self.next_position:
            self.dropped += 1
            return []
        self._early[event.position] = event
        return self._drain()

    def accept_replay(self, replay: Replayed) -> list[int]:
        """Take in what the owner of the stream repeats from exactly `next_position` on.

        Position and hash decide, not generation: whoever said last that it ended the answer may never have heard of a
        later one.
        """
        if replay.first_position != self.next_position or replay.prefix_hash != self._hash:
            self.dropped += len(replay.ids)
            return []
        self._emit(replay.ids)
        return [*replay.ids, *self._drain()]

    def expect_end(self, end_position: int) -> None:
        """The answer ends just before `end_position`."""
        self._end_position = end_position

    def _drain(self) -> list[int]:
        fresh: list[int] = []
        while (event := self._early.pop(self.next_position, None)) is not None:
            if event.prefix_hash != self._hash:
                self.dropped += 1
                break
            self._emit([event.token])
            fresh.append(event.token)
        for position in [p for p in self._early if p < self.next_position]:
            del self._early[position]
        return fresh

    def _emit(self, ids: Sequence[int]) -> None:
        self._emitted.extend(ids)
        self._hash = hash_output(self._hash, ids)
