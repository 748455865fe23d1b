"""The commit rule under loss, duplication, delay and reordering: never two owners, and in the end exactly one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdd.handoff.receiver import HandoffReceiver
from pdd.handoff.sender import Action, AskBack, Freeze, HandoffSender, Offer, Release, Resume, State
from pdd.types import AttemptKey, Handoff, HandoffReply, Peer, Role, hash_prompt

PROMPT = [5, 6, 7]
KEY = AttemptKey("0" * 32, 1)
RELAY = Peer("a", Role.RELAY, "0", "relay-epoch")
MAIN = Peer("b", Role.MAIN_DECODE, "0", "main-epoch")


class HandoffOverABadNetwork(RuleBasedStateMachine):
    """RelayDecode and MainDecode with messages in flight that may be lost, doubled, or overtaken."""

    @initialize()
    def setup(self) -> None:
        self.sender = HandoffSender()
        self.receiver = HandoffReceiver(PROMPT, [], covered_tokens=len(PROMPT))
        self.receiver.kv_complete()
        self.relay_ids = [100]
        self.main_ids: list[int] | None = None
        self.network: list[object] = []
        self.waiting: list[tuple[str, int]] = []
        self.released = False
        self.main_alive = True
        self._do(self.sender.outputs_grew(1))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Freeze():
                    self._do(self.sender.frozen(self.relay_ids))
                case Offer(seq=seq, generation=generation, ids=ids):
                    self.network.append(
                        Handoff(
                            KEY, RELAY, seq, generation, len(PROMPT), list(ids), True, len(PROMPT), hash_prompt(PROMPT)
                        )
                    )
                    self.waiting.append(("offer", seq))
                case AskBack(seq=seq):
                    self.network.append(("withdraw", seq))
                    self.waiting.append(("withdraw", seq))
                case Release(handed_over=count):
                    assert count == len(self.relay_ids)
                    self.released = True
                case Resume(generation=generation):
                    assert generation == self.sender.generation

    @precondition(lambda self: self.sender.state is State.DECODING)
    @rule()
    def relay_samples(self) -> None:
        self.relay_ids.append(100 + len(self.relay_ids))
        self._do(self.sender.outputs_grew(len(self.relay_ids)))

    @precondition(lambda self: self.main_alive)
    @rule()
    def main_says_ready(self) -> None:
        self._do(self.sender.kv_ready(MAIN))

    @precondition(lambda self: self.network)
    @rule(data=st.data(), duplicate=st.booleans())
    def deliver(self, data: st.DataObject, duplicate: bool) -> None:
        index = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[index] if duplicate else self.network.pop(index)
        self._arrive(message)

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        _, seq = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self._do(self.sender.silent(seq))

    @precondition(lambda self: self.main_alive)
    @rule()
    def main_starts(self) -> None:
        started = self.receiver.start()
        if started is not None:
            assert self.main_ids is None
            self.main_ids = started

    @rule(die=st.integers(0, 30))
    def main_dies(self, die: int) -> None:
        if die == 0 and self.main_alive:
            self.main_alive = False
            self._do(self.sender.main_gone(MAIN))

    @invariant()
    def never_two_owners(self) -> None:
        main_owns = self.main_alive and self.receiver.owned
        assert not (main_owns and self.sender.state is State.DECODING)
        if self.released and self.main_alive:
            assert self.receiver.owned

    @invariant()
    def main_continues_exactly_what_relay_had(self) -> None:
        if self.main_ids is not None and self.main_alive:
            assert self.main_ids == self.relay_ids

    def teardown(self) -> None:
        """From here on the network is kind: one side must end up with the stream, whatever happened before."""
        for _ in range(20):
            if self.main_alive:
                self._do(self.sender.kv_ready(MAIN))
            while self.network:
                self._arrive(self.network.pop(0))
            timed_out, self.waiting = self.waiting, []
            for _, seq in timed_out:
                self._do(self.sender.silent(seq))
        relay_owns = self.sender.state is State.DECODING
        main_owns = self.main_alive and self.receiver.owned
        gave_to_the_dead = self.released and not self.main_alive
        assert relay_owns + main_owns + gave_to_the_dead == 1

    def _arrive(self, message: object) -> None:
        match message:
            case Handoff():
                if self.main_alive:
                    self.network.append(self.receiver.take(message))
            case HandoffReply(seq=seq, accepted=accepted):
                self._do(self.sender.accepted(seq) if accepted else self.sender.refused(seq))
            case ("withdraw", int(seq)):
                if self.main_alive:
                    self.network.append(("withdrawn", seq, self.receiver.withdraw(RELAY, seq)))
            case ("withdrawn", int(seq), bool(withdrawn)):
                self._do(self.sender.withdraw_answered(seq, withdrawn))
            case _:
                raise AssertionError(message)


TestHandoffOverABadNetwork = HandoffOverABadNetwork.TestCase
TestHandoffOverABadNetwork.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
