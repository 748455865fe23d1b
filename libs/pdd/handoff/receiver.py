"""The taking side of a hand-over, as a plain object: messages in, answers out, no I/O and no clock.

RelayDecode takes from Prefill; MainDecode takes from Prefill or from RelayDecode. The rule it keeps: a stage starts
only when it owns the stream (a `final` hand-over was accepted) *and* holds the KV of exactly the tokens that the
hand-over says are covered.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdd.types import Handoff, HandoffReply, Peer, hash_prompt


class HandoffReceiver:
    """State of one attempt on the taking side.

    `prompt` and `outputs` (IDs emitted by earlier attempts) come with the reservation; `covered_tokens` is how many
    leading tokens' KV the reservation's ticket brings.
    """

    def __init__(self, prompt: Sequence[int], outputs: Sequence[int], covered_tokens: int) -> None:
        self._prompt_tokens = len(prompt)
        self._prompt_hash = hash_prompt(prompt)
        self._covered_tokens = covered_tokens
        self._ids = list(outputs)
        self._answers: dict[tuple[Peer, int], HandoffReply] = {}
        self._kv_complete = False
        self._final = False
        self._started = False
        self.generation = 0

    @property
    def ids(self) -> list[int]:
        """All output IDs known so far."""
        return list(self._ids)

    @property
    def owned(self) -> bool:
        """Whether a final hand-over was accepted: this stage alone may sample now."""
        return self._final

    def kv_complete(self) -> None:
        """All covered KV has arrived and was verified."""
        self._kv_complete = True

    def take(self, message: Handoff) -> HandoffReply:
        """Accept or refuse one hand-over. The same `seq` again gets the same answer and changes nothing: what was
        refused or withdrawn once is never accepted later, when its sender has long gone on."""
        name = (message.sender, message.seq)
        known = self._answers.get(name)
        if known is not None:
            return known
        reason = self._objection(message)
        if not reason:
            overlap = self._next_position - message.first_position
            self._ids.extend(message.ids[overlap:])
            self._final = message.final
            self.generation = max(self.generation, message.generation)
        reply = HandoffReply(message.seq, not reason, reason)
        self._answers[name] = reply
        return reply

    def withdraw(self, sender: Peer, seq: int) -> bool:
        """`sender` asks to forget `seq`. True: it was not accepted, and never will be. False: we own the stream."""
        return not self._answers.setdefault((sender, seq), HandoffReply(seq, False, "withdrawn")).accepted

    def start(self) -> list[int] | None:
        """The output IDs to extend over, once, when both conditions hold; None before and afterwards."""
        if self._started or not (self._final and self._kv_complete):
            return None
        self._started = True
        return list(self._ids)

    @property
    def _next_position(self) -> int:
        return self._prompt_tokens + len(self._ids)

    def _objection(self, message: Handoff) -> str:
        if self._final:
            return "already owned"
        if message.generation < self.generation:
            return "stale generation"
        if message.prompt_hash != self._prompt_hash:
            return "prompt hash differs"
        if message.covered_tokens != self._covered_tokens:
            return f"covers {message.covered_tokens} tokens, ticket covers {self._covered_tokens}"
        if not self._prompt_tokens <= message.first_position <= self._next_position:
            return f"starts at position {message.first_position}, expected {self._next_position}"
        known = self._ids[message.first_position - self._prompt_tokens :]
        if message.ids[: len(known)] != known:
            return "ids differ from those already known"
        return ""
