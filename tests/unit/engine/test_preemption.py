"""More sequences than the pool can hold: some give their blocks up, come back, and answer as if alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdd.engine.engine import Engine, generate
from pdd.engine.sequence import SequenceSpec
from pdd.kv import KvNamespace
from pdd.types import AttemptKey, Sampling, StopRule
from tests.unit.engine.conftest import MakeEngine

POOL_TOKENS = 480
BLOCK = 4


def key(index: int) -> AttemptKey:
    return AttemptKey(f"{index:032x}", 1)


def specs(count: int, *, namespace: KvNamespace | None, seed: int) -> list[SequenceSpec]:
    draw = random.Random(seed)
    return [
        SequenceSpec(
            key(index),
            [draw.randrange(3, 512) for _ in range(draw.randrange(4, 40))],
            [],
            Sampling(temperature=0.9 * (index % 2), seed=index),
            StopRule(draw.randrange(20, 240)),
            namespace=namespace,
        )
        for index in range(count)
    ]


@pytest.fixture(params=[None, KvNamespace("")], ids=["no cache", "cache"])
def namespace(request: pytest.FixtureRequest) -> KvNamespace | None:
    return request.param


@pytest.mark.parametrize("seed", range(3))
def test_whoever_was_preempted_answers_the_same(
    make_engine: MakeEngine, namespace: KvNamespace | None, seed: int
) -> None:
    alone = make_engine().engine
    wanted = specs(8, namespace=namespace, seed=seed)
    engine = make_engine(pool_tokens=POOL_TOKENS, seats=8, prefix_cache=namespace is not None).engine
    for one in wanted:
        engine.add(one)
    preempted = 0
    answers: dict[AttemptKey, list[int]] = {}
    while engine.has_work():
        result = engine.step()
        preempted += result.preempted
        for update in result.updates:
            if update.finish is not None:
                answers[update.key] = engine.outputs(update.key)
                engine.release(update.key)
    assert preempted > 0
    assert answers == {one.key: generate(alone, replace(one, namespace=None)) for one in wanted}
    assert engine.cache.available_blocks == engine.cache.total_blocks


def test_the_oldest_never_gives_way_and_the_newest_comes_back_last(make_engine: MakeEngine) -> None:
    engine = make_engine(pool_tokens=POOL_TOKENS, seats=8).engine
    order: list[AttemptKey] = []
    for index in range(4):
        engine.add(SequenceSpec(key(index), [5 + index] * 20, [], Sampling(), StopRule(200)))
    while engine.has_work():
        for update in engine.step().updates:
            if update.finish is not None:
                order.append(update.key)
                engine.release(update.key)
    assert order == [key(index) for index in range(4)]


def test_what_is_still_cached_is_not_computed_again(make_engine: MakeEngine) -> None:
    """Blocks that somebody else took for a moment only: the sequence finds all of its KV but the last block's."""
    engine = make_engine(pool_tokens=320, prefix_cache=True).engine
    one = SequenceSpec(key(0), list(range(3, 43)), [], Sampling(), StopRule(200), namespace=KvNamespace(""))
    alone = generate(make_engine().engine, replace(one, namespace=None))
    engine.add(one)
    _steps(engine, 20)
    others = engine.cache.allocate(engine.cache.free_blocks)
    while engine.has_work():
        engine.step()
    length = len(engine.outputs(one.key)) + 40
    assert engine.status().preempted == 1
    before = engine.status().prompt_tokens_computed
    engine.cache.release(others)
    first = engine.step()
    assert first.scheduled_tokens <= BLOCK + 1
    assert first.updates[0].num_computed == length
    while engine.has_work():
        engine.step()
    assert engine.outputs(one.key) == alone
    assert engine.status().prompt_tokens_computed == before


def test_nobody_waits_for_blocks_that_those_behind_it_hold(make_engine: MakeEngine) -> None:
    """The first in line lacks blocks that another holds, who lacks some too: one of them has to let go."""
    alone = make_engine().engine
    engine = make_engine(pool_tokens=80).engine  # 20 blocks
    large = SequenceSpec(key(0), [7] * 60, [], Sampling(), StopRule(10))
    holder = SequenceSpec(key(1), [9] * 41, [3] * 20, Sampling(), StopRule(25), 40, engine.cache.allocate(10))
    engine.add(large)
    engine.add(holder)
    while engine.has_work():
        for update in engine.step().updates:
            if update.finish is not None:
                assert engine.outputs(update.key) == generate(
                    alone, replace(large if update.key == key(0) else holder, num_computed=0, blocks=[])
                )
                engine.release(update.key)
    assert engine.status().output_tokens == 15
    assert engine.cache.free_blocks == engine.cache.total_blocks


def test_running_answers_go_on_at_each_step_of_a_long_prompt(make_engine: MakeEngine) -> None:
    """No step is longer than its budget, and all that decode are in each."""
    engine = make_engine(pool_tokens=1024, seats=8, step_tokens=16).engine
    for index in range(4):
        engine.add(SequenceSpec(key(index), [5 + index] * 4, [], Sampling(), StopRule(80)))
    _steps(engine, 3)
    engine.add(SequenceSpec(key(9), [11] * 400, [], Sampling(), StopRule(4)))
    for _ in range(30):
        result = engine.step()
        assert result.scheduled_tokens <= 16
        assert {update.key for update in result.updates if update.new_tokens} >= {key(index) for index in range(4)}


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()
