"""The engine's behaviour on real (tiny) weights: what it computes, what it holds, what it gives back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdd.engine.engine import Engine, SequenceSpec, SequenceUpdate, generate
from pdd.engine.loading import LoadedEngine
from pdd.errors import TooLargeError, UnknownRequestError
from pdd.types import AttemptKey, FinishReason, Sampling, StopRule
from tests.unit.engine.conftest import MakeEngine, Tiny

ANSWER = 12
SEEDED = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=99)


def key(index: int = 0) -> AttemptKey:
    return AttemptKey(f"{index:032x}", 1)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def spec(length: int = 37, *, index: int = 0, max_tokens: int = ANSWER, **changes: object) -> SequenceSpec:
    base = SequenceSpec(key(index), prompt(length, index), [], Sampling(), StopRule(max_tokens))
    return replace(base, **changes)  # type: ignore[arg-type]


def run(engine: Engine) -> list[SequenceUpdate]:
    """Step until nothing is left to do; all updates."""
    updates: list[SequenceUpdate] = []
    while engine.has_work():
        updates.extend(engine.step().updates)
    return updates


@pytest.fixture
def loaded(make_engine: MakeEngine) -> LoadedEngine:
    return make_engine()


@pytest.fixture
def engine(loaded: LoadedEngine) -> Engine:
    return loaded.engine


@pytest.fixture
def answer(make_engine: MakeEngine) -> list[int]:
    """What `spec()` gets on an engine of its own."""
    return generate(make_engine().engine, spec())


def test_greedy_output_equals_transformers_generate(tiny: Tiny, answer: list[int]) -> None:
    tokens = torch.tensor([prompt(37)])
    theirs = tiny[1].generate(tokens, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert answer == theirs[0, 37:].tolist()


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
def test_sharing_steps_changes_no_answer(make_engine: MakeEngine, sampling: Sampling) -> None:
    specs = [spec(length, index=i, sampling=sampling) for i, length in enumerate((37, 5, 18, 61, 1, 30))]
    alone = [generate(make_engine(step_tokens=512).engine, each) for each in specs]
    together = make_engine().engine
    for each in specs:
        together.add(each)
    run(together)
    assert [together.outputs(each.key) for each in specs] == alone


def test_updates_tell_of_every_chunk_and_every_token(engine: Engine) -> None:
    engine.add(spec(37, max_tokens=3))
    assert run(engine) == [
        SequenceUpdate(key(), 13, 37, [], None),
        SequenceUpdate(key(), 25, 37, [], None),
        SequenceUpdate(key(), 37, 37, [engine.outputs(key())[0]], None),
        SequenceUpdate(key(), 38, 38, [engine.outputs(key())[1]], None),
        SequenceUpdate(key(), 39, 39, [engine.outputs(key())[2]], FinishReason.LENGTH),
    ]


def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: Engine, answer: list[int]) -> None:
    stop_at = answer.index(answer[4])
    engine.add(spec(stop=StopRule(ANSWER, frozenset({answer[4]}))))
    updates = run(engine)
    assert engine.outputs(key()) == answer[: stop_at + 1]
    assert updates[-1].finish is FinishReason.STOP
    assert all(update.finish is None for update in updates[:-1])


def test_a_finished_sequence_keeps_its_blocks_until_released(engine: Engine) -> None:
    engine.add(spec())
    run(engine)
    assert engine.cache.free_blocks == engine.cache.total_blocks - 12  # 37 + 12 - 1 tokens in blocks of 4
    assert (engine.status().running, engine.status().waiting) == (0, 0)
    engine.release(key())
    engine.release(key())
    assert engine.cache.free_blocks == engine.cache.total_blocks
    with pytest.raises(UnknownRequestError):
        engine.outputs(key())


def test_status_counts(engine: Engine) -> None:
    engine.add(spec())
    engine.add(spec(20, index=1))
    result = engine.step()
    assert (result.scheduled_tokens, result.sequences, result.decodes) == (16, 2, 0)
    status = engine.status()
    assert (status.running, status.waiting, status.steps) == (2, 0, 1)
    assert (status.prompt_tokens_computed, status.output_tokens) == (16, 0)
    assert status.last_step == result
    run(engine)
    status = engine.status()
    assert (status.running, status.prompt_tokens_computed, status.output_tokens) == (0, 57, 2 * ANSWER)


def test_at_its_limit_a_sequence_stays_unscheduled_until_the_limit_is_raised(engine: Engine, answer: list[int]) -> None:
    engine.add(spec(sample_limit=1))
    run(engine)
    assert engine.outputs(key()) == answer[:1]
    assert engine.cache.free_blocks == engine.cache.total_blocks - 10  # the prompt, no more
    engine.set_sample_limit(key(), 5)
    run(engine)
    assert engine.outputs(key()) == answer[:5]
    engine.set_sample_limit(key(), None)
    run(engine)
    assert engine.outputs(key()) == answer
    assert engine.cache.free_blocks == engine.cache.total_blocks - 12


def test_without_blocks_to_grow_into_a_sequence_waits_and_goes_on(make_engine: MakeEngine, answer: list[int]) -> None:
    engine = make_engine(pool_tokens=48).engine
    engine.add(spec(sample_limit=1))
    run(engine)
    others = engine.cache.allocate(1)
    engine.set_sample_limit(key(), None)
    run(engine)
    assert 1 < len(engine.outputs(key())) < len(answer)
    assert (engine.status().preempted, engine.cache.free_blocks) == (1, engine.cache.total_blocks - 1)
    engine.cache.release(others)
    run(engine)
    assert engine.outputs(key()) == answer
    engine.release(key())
    assert engine.cache.free_blocks == engine.cache.total_blocks


def test_appended_outputs_are_extended_over_and_sampling_goes_on_from_them(engine: Engine, answer: list[int]) -> None:
    engine.add(spec(sample_limit=0))
    assert [u.num_computed for u in run(engine)][-1] == 36  # all but the token that would be sampled from
    engine.append(key(), answer[:3])
    engine.append(key(), answer[3:7])
    updates = run(engine)
    assert updates[-1].num_computed == 37 + 6
    assert not any(update.new_tokens for update in updates)
    engine.set_sample_limit(key(), None)
    updates = run(engine)
    assert updates[0].new_tokens == answer[7:8]
    assert updates[0].first_position == 37 + 7
    assert engine.outputs(key()) == answer


def test_appended_outputs_that_end_the_answer_end_it(engine: Engine, answer: list[int]) -> None:
    engine.add(spec(sample_limit=0))
    engine.append(key(), answer)
    run(engine)
    engine.set_sample_limit(key(), None)
    assert not engine.has_work()
    assert engine.outputs(key()) == answer
    with pytest.raises(ValueError, match="ended"):
        engine.append(key(), [5])


def test_a_frozen_sequence_stands_still_and_thaws_unchanged(engine: Engine, answer: list[int]) -> None:
    engine.add(spec())
    while len(engine.outputs(key())) < 4:
        engine.step()
    assert engine.freeze(key()) == answer[:4]
    assert not engine.has_work()
    assert engine.status().running == 0
    engine.add(spec(9, index=1))
    run(engine)
    assert engine.outputs(key()) == answer[:4]
    engine.thaw(key())
    run(engine)
    assert engine.outputs(key()) == answer


def test_frozen_before_admission_a_sequence_does_not_hold_up_the_queue(engine: Engine, answer: list[int]) -> None:
    engine.add(spec())
    engine.add(spec(9, index=1))
    assert engine.freeze(key()) == []
    run(engine)
    assert len(engine.outputs(key(1))) == ANSWER
    assert engine.outputs(key()) == []
    engine.thaw(key())
    run(engine)
    assert engine.outputs(key()) == answer


def test_what_can_never_fit_is_refused_and_its_blocks_are_given_back(make_engine: MakeEngine) -> None:
    engine = make_engine(pool_tokens=64).engine
    brought = engine.cache.allocate(3)
    with pytest.raises(TooLargeError, match="blocks"):
        engine.add(spec(60, max_tokens=6, blocks=brought))
    with pytest.raises(TooLargeError, match="513"):
        make_engine(pool_tokens=1024).engine.add(spec(500, max_tokens=13))
    engine.add(spec(60, max_tokens=5))
    with pytest.raises(ValueError, match="already"):
        engine.add(spec(60, max_tokens=5, blocks=engine.cache.allocate(2)))
    with pytest.raises(ValueError, match="at least one"):
        engine.add(spec(8, index=1, num_computed=8, blocks=engine.cache.allocate(2)))
    assert engine.cache.free_blocks == engine.cache.total_blocks
    run(engine)
    assert len(engine.outputs(key())) == 5


def test_waiting_sequences_are_admitted_in_order_as_room_appears(make_engine: MakeEngine) -> None:
    engine = make_engine(pool_tokens=96).engine
    for index, length in enumerate((60, 30, 4)):
        engine.add(spec(length, index=index))
    run(engine)
    # The second has no room yet, and the third, small as it is, does not overtake it.
    assert [len(engine.outputs(key(index))) for index in range(3)] == [ANSWER, 0, 0]
    assert engine.status().waiting == 2
    engine.release(key(0))
    run(engine)
    assert [len(engine.outputs(key(index))) for index in (1, 2)] == [ANSWER, ANSWER]
    for index in (1, 2):
        engine.release(key(index))
    assert engine.cache.free_blocks == engine.cache.total_blocks


def test_more_sequences_than_seats_take_turns(make_engine: MakeEngine) -> None:
    engine = make_engine(seats=2).engine
    for index in range(5):
        engine.add(spec(6, index=index))
    while engine.has_work():
        assert engine.step().sequences <= 2
    assert all(len(engine.outputs(key(index))) == ANSWER for index in range(5))


def test_blocks_taken_by_another_thread_between_plan_and_admission_are_no_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(pool_tokens=128).engine
    for index in (0, 1):
        engine.add(spec(37, index=index))
    blocks, allocate = engine.cache, engine.cache.allocate
    taken: list[int] = []

    def allocate_late(count: int) -> list[int]:
        if not taken:
            taken.extend(allocate(blocks.free_blocks - 13))
        return allocate(count)

    monkeypatch.setattr(blocks, "allocate", allocate_late)
    run(engine)
    assert [len(engine.outputs(key(index))) for index in (0, 1)] == [ANSWER, 0]
    blocks.release(taken)
    run(engine)
    assert len(engine.outputs(key(1))) == ANSWER


@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "seeded"])
def test_takeover_at_every_position_equals_one_engine(make_engine: MakeEngine, sampling: Sampling) -> None:
    """The second engine gets the prompt's KV as bytes and the outputs as IDs, and computes no prompt position."""
    whole = generate(make_engine().engine, spec(sampling=sampling))
    for position in range(1, ANSWER):
        first, second = make_engine(), make_engine()
        first.engine.add(spec(sampling=sampling, sample_limit=position))
        run(first.engine)
        outputs = first.engine.freeze(key())
        assert outputs == whole[:position]

        first_blocks = range(1, 11)  # a fresh pool hands its blocks out in order
        scattered = second.engine.cache.allocate(20)[::2]
        for source, target in zip(first_blocks, scattered, strict=True):
            second.kv_pool.block(target)[:] = first.kv_pool.block(source)
        second.engine.add(spec(sampling=sampling, outputs=outputs, num_computed=37, blocks=scattered))
        updates = run(second.engine)
        assert second.engine.outputs(key()) == whole
        assert updates[0] == SequenceUpdate(key(), 37 + position, 37 + position, [whole[position]], updates[0].finish)
        assert second.engine.status().prompt_tokens_computed == 0
        assert second.engine.status().output_tokens == ANSWER - position


EVERYTHING = Sampling(
    temperature=0.9,
    top_p=0.95,
    top_k=60,
    min_p=0.01,
    seed=7,
    repetition_penalty=1.2,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((17, 2.0), (300, -100.0)),
    logprobs=3,
)


def test_whoever_goes_on_with_an_answer_draws_the_same_tokens(make_engine: MakeEngine) -> None:
    """At each position, with all that looks back at prompt and output, beside others that want nothing of it."""
    whole = generate(make_engine().engine, spec(sampling=EVERYTHING))
    assert whole != generate(make_engine().engine, spec(sampling=SEEDED))
    for position in range(ANSWER):
        engine = make_engine().engine
        engine.add(spec(index=1))
        engine.add(spec(sampling=EVERYTHING, outputs=whole[:position]))
        run(engine)
        assert engine.outputs(key()) == whole


def test_logprobs_are_those_of_the_model_and_not_of_the_request(make_engine: MakeEngine, tiny: Tiny) -> None:
    engine = make_engine().engine
    engine.add(spec(sampling=EVERYTHING))
    engine.add(spec(index=1))
    updates = run(engine)
    assert all(update.logprobs is None for update in updates if update.key != key() or not update.new_tokens)
    told = [update.logprobs for update in updates if update.key == key() and update.new_tokens]
    tokens = [*prompt(37), *engine.outputs(key())]
    with torch.inference_mode():
        logits = tiny[1](torch.tensor([tokens])).logits[0, 36:-1].double()
    expected = torch.log_softmax(logits, -1)
    assert len(told) == ANSWER
    for row, (one, drawn) in enumerate(zip(told, engine.outputs(key()), strict=True)):
        assert one is not None
        assert one.drawn == pytest.approx(float(expected[row, drawn]), abs=1e-4)
        assert [token for token, _ in one.top] == expected[row].topk(3).indices.tolist()


def test_a_bias_towards_a_token_that_does_not_exist_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="512"):
        engine.add(spec(sampling=Sampling(logit_bias=((512, 1.0),))))
    assert not engine.has_work()
