"""Whatever happens to events on the way: each position is emitted once, in order, of one history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdd.mesh.messages import Replayed
from pdd.types import EMPTY_OUTPUT_HASH, AttemptKey, FinishReason, TokenEvent, hash_output
from services.gateway.assembler import Assembler

KEY = AttemptKey("a" * 32, 1)
PROMPT_TOKENS = 11


def events_of(ids: list[int], generation: int = 0) -> list[TokenEvent]:
    return [
        TokenEvent(KEY, generation, PROMPT_TOKENS + i, token, hash_output(EMPTY_OUTPUT_HASH, ids[:i]))
        for i, token in enumerate(ids)
    ]


@given(ids=st.lists(st.integers(0, 50_000), min_size=1, max_size=30), data=st.data())
def test_reordered_and_doubled_events_give_the_text_once(ids: list[int], data: st.DataObject) -> None:
    events = events_of(ids)
    arriving = data.draw(st.permutations(events + data.draw(st.lists(st.sampled_from(events), max_size=10))))
    assembler = Assembler(PROMPT_TOKENS)
    emitted = [token for event in arriving for token in assembler.accept(event)]
    assert emitted == ids == assembler.emitted
    assert not assembler.has_gap


def test_a_lost_token_is_a_gap_until_replayed() -> None:
    ids = [4, 5, 6, 7]
    first, _, third, fourth = events_of(ids)
    assembler = Assembler(PROMPT_TOKENS)
    assert assembler.accept(first) == [4]
    assert assembler.accept(third) == []
    assert assembler.accept(fourth) == []
    assert assembler.has_gap
    prefix_hash = hash_output(EMPTY_OUTPUT_HASH, ids[:1])
    assert assembler.accept_replay(Replayed(0, PROMPT_TOKENS + 1, prefix_hash, [5], None)) == [5, 6, 7]
    assert not assembler.has_gap


def test_a_lost_last_token_shows_by_the_announced_end() -> None:
    assembler = Assembler(PROMPT_TOKENS)
    assembler.accept(events_of([4, 5])[0])
    assembler.expect_end(PROMPT_TOKENS + 2)
    assert assembler.has_gap


def test_another_history_is_never_spliced_in() -> None:
    assembler = Assembler(PROMPT_TOKENS)
    assembler.accept(events_of([4, 5])[0])
    stranger = events_of([9, 5, 6])
    assert assembler.accept(stranger[1]) == []
    assert assembler.emitted == [4]
    wrong = Replayed(0, PROMPT_TOKENS + 1, hash_output(EMPTY_OUTPUT_HASH, [9]), [5], None)
    assert assembler.accept_replay(wrong) == []
    assert assembler.dropped == 2


def test_an_older_generation_is_fenced() -> None:
    assembler = Assembler(PROMPT_TOKENS)
    assembler.accept(events_of([4], generation=1)[0])
    assert assembler.accept(events_of([4, 8], generation=0)[1]) == []
    assert assembler.accept(events_of([4, 5], generation=1)[1]) == [5]


def test_a_new_attempt_continues_after_what_was_emitted() -> None:
    assembler = Assembler(PROMPT_TOKENS)
    assembler.accept(events_of([4])[0])
    assembler.accept(events_of([4, 5, 6], generation=3)[2])
    assembler.new_attempt()
    assert not assembler.has_gap
    assert assembler.accept(events_of([4, 5])[1]) == [5]


def test_an_end_is_repaired_by_its_owner_whatever_generation_another_reached() -> None:
    """MainDecode took over, its answer was lost, RelayDecode went on as generation 1; MainDecode ended the answer."""
    ids = [4, 5, 6]
    assembler = Assembler(PROMPT_TOKENS)
    assembler.accept(events_of(ids, generation=1)[0])
    assembler.expect_end(PROMPT_TOKENS + 3)
    replay = Replayed(0, PROMPT_TOKENS + 1, hash_output(EMPTY_OUTPUT_HASH, ids[:1]), [5, 6], FinishReason.STOP)
    assert assembler.accept_replay(replay) == [5, 6]
