"""RelayDecode's side of the hand-over to MainDecode, as a plain object: events in, actions out.

The commit rule: RelayDecode keeps its KV until MainDecode has acknowledged a `final` hand-over. On refusal it goes
on decoding; on silence it goes on only after MainDecode has acknowledged `withdraw` or its epoch is gone. Each time
it goes on, `generation` grows, so that whatever the other side might still say of the old one is fenced.

    DECODING --kv_ready--> FREEZING --frozen--> OFFERED --accepted--> RELEASED
        ^                                        |  |
        |<---------------- refused --------------+  +--silence--> WITHDRAWING --not withdrawn--> RELEASED
        |<--------- withdrawn (offered again), or MainDecode gone ------+
        +--ended--> ENDED            cancel, from anywhere --> ENDED
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from pdd.types import Peer


class State(Enum):
    """Where a hand-over stands; see the module's picture."""

    DECODING = auto()
    FREEZING = auto()
    OFFERED = auto()
    WITHDRAWING = auto()
    RELEASED = auto()
    ENDED = auto()


@dataclass(frozen=True)
class Freeze:
    """Stop the sequence at the next step boundary and report `frozen` with its output IDs."""


@dataclass(frozen=True)
class Offer:
    """Send a final hand-over of all output IDs to `main`."""

    main: Peer
    seq: int
    generation: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class AskBack:
    """Send `withdraw{seq}` to `main` and report its answer; keep asking while it is silent."""

    main: Peer
    seq: int


@dataclass(frozen=True)
class Resume:
    """Go on decoding under this generation."""

    generation: int


@dataclass(frozen=True)
class Release:
    """MainDecode owns the stream: free everything. `handed_over` output IDs went with it."""

    handed_over: int


Action = Freeze | Offer | AskBack | Resume | Release


class HandoffSender:
    """State of one attempt on RelayDecode. Every method returns the actions that its event calls for.

    `hold_until` is how many output IDs must exist before the hand-over may begin (experiments fix it).
    """

    def __init__(self, *, hold_until: int = 1) -> None:
        self._hold_until = hold_until
        self._outputs = 0
        self._main: Peer | None = None
        self._seq = 0
        self._ids: tuple[int, ...] = ()
        self.generation = 0
        self.state = State.DECODING
        self.rejected = False
        """Whether MainDecode refused, and has not said since that it is ready: it will not take this stream over."""

    def outputs_grew(self, outputs: int) -> list[Action]:
        """The stage now has this many output IDs."""
        self._outputs = outputs
        return self._begin_if_due()

    def kv_ready(self, main: Peer) -> list[Action]:
        """MainDecode has all KV, a seat and blocks. Heard again, it changes nothing unless an offer was refused."""
        self._main = main
        self.rejected = False
        return self._begin_if_due()

    def frozen(self, ids: Sequence[int]) -> list[Action]:
        """The sequence stands still with these output IDs (all of them, from the prompt's end)."""
        if self.state is not State.FREEZING:
            return []
        if self._main is None:
            return self._resume()
        self._ids = tuple(ids)
        self.state = State.OFFERED
        self._seq += 1
        return [Offer(self._main, self._seq, self.generation, self._ids)]

    def accepted(self, seq: int) -> list[Action]:
        """MainDecode acknowledged hand-over `seq`."""
        if seq != self._seq or self.state not in (State.OFFERED, State.WITHDRAWING):
            return []
        self.state = State.RELEASED
        return [Release(len(self._ids))]

    def refused(self, seq: int) -> list[Action]:
        """MainDecode refused hand-over `seq`: go on, until it says again that it is ready."""
        if seq != self._seq or self.state is not State.OFFERED:
            return []
        self._main = None
        self.rejected = True
        return self._resume()

    def silent(self, seq: int) -> list[Action]:
        """No answer to hand-over `seq`, or to the question whether it is withdrawn: ask (again)."""
        if seq != self._seq or self.state not in (State.OFFERED, State.WITHDRAWING) or self._main is None:
            return []
        self.state = State.WITHDRAWING
        return [AskBack(self._main, seq)]

    def withdraw_answered(self, seq: int, withdrawn: bool) -> list[Action]:
        """MainDecode said whether hand-over `seq` is withdrawn. If so it is as ready as before and will not say so
        again: go on, and offer anew."""
        if not withdrawn:
            return self.accepted(seq)
        if seq != self._seq or self.state is not State.WITHDRAWING:
            return []
        return [*self._resume(), *self._begin_if_due()]

    def main_gone(self, main: Peer) -> list[Action]:
        """That epoch of MainDecode is dead: nothing it was offered will ever be taken."""
        if self._main != main:
            return []
        self._main = None
        if self.state in (State.OFFERED, State.WITHDRAWING):
            return self._resume()
        return []

    def ended(self) -> None:
        """The answer ended here, or the attempt was cancelled."""
        self.state = State.ENDED

    def _begin_if_due(self) -> list[Action]:
        due = self._main is not None and self._outputs >= self._hold_until
        if self.state is not State.DECODING or not due:
            return []
        self.state = State.FREEZING
        return [Freeze()]

    def _resume(self) -> list[Action]:
        self.generation += 1
        self.state = State.DECODING
        return [Resume(self.generation)]
