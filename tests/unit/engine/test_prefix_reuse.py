"""An engine that remembers KV answers as one that does not, whatever was shared, evicted, aborted or run beside it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pdd.engine.engine import Engine, SequenceSpec, generate
from pdd.engine.loading import LoadedEngine, load_engine
from pdd.errors import CapacityError
from pdd.kv import KvNamespace
from pdd.types import AttemptKey, KvEventKind, Sampling, StopRule
from tests.unit.engine.conftest import Tiny

NAMESPACES = (KvNamespace(), KvNamespace(salt="tenant"))
SAMPLINGS = (Sampling(), Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=7))
STREAMS = [torch.randint(3, 512, (200,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
SIZE = 4
LENGTHS = (0, 1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1, 5 * SIZE)


def load(tiny: Tiny, *, size: int = SIZE, pool_tokens: int = 80, prefix_cache: bool = True) -> LoadedEngine:
    return load_engine(
        tiny[0],
        dtype="float32",
        block_size=size,
        pool_tokens=pool_tokens,
        step_tokens=16,
        seats=3,
        prefix_cache=prefix_cache,
    )


def look_up(engine: Engine, spec: SequenceSpec) -> SequenceSpec:
    """What a service does before it adds a sequence: all but the last token may be known already."""
    assert spec.namespace is not None
    blocks = engine.cache.match(spec.namespace, spec.prompt[:-1])
    return replace(spec, blocks=blocks, num_computed=len(blocks) * engine.cache.block_size)


def key(index: int) -> AttemptKey:
    return AttemptKey(f"{index:032x}", 1)


def spec(prompt: list[int], *, index: int = 0, max_tokens: int = 6) -> SequenceSpec:
    return SequenceSpec(key(index), prompt, [], Sampling(), StopRule(max_tokens), namespace=KvNamespace())


class Oracle:
    """Answers of an engine without a cache, one sequence at a time."""

    def __init__(self, tiny: Tiny) -> None:
        self._engine = load(tiny, prefix_cache=False).engine
        self._known: dict[tuple[tuple[int, ...], Sampling, int], list[int]] = {}

    def answer(self, asked: SequenceSpec) -> list[int]:
        known = (tuple(asked.prompt), asked.sampling, asked.stop.max_tokens)
        if known not in self._known:
            alone = replace(asked, blocks=[], num_computed=0, namespace=None)
            self._known[known] = generate(self._engine, alone)
        return self._known[known]


@dataclass
class Shown:
    """A cached block as it looked when it was first seen: the hash that names it, and its bytes' checksum."""

    name: bytes
    checksum: int


class ReuseMachine(RuleBasedStateMachine):
    """Prompts that part ways around block edges, on a pool that is always too small."""

    loaded: LoadedEngine
    oracle: Oracle

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.loaded.engine
        self.cache = self.engine.cache
        self.cache.release(self.cache.allocate(self.cache.total_blocks))  # forget what the run before left
        self.cache.journal.take()
        self.asked: dict[AttemptKey, SequenceSpec] = {}
        self.shown: dict[int, Shown] = {}
        self.count = 0

    @rule(
        stream=st.integers(0, 1),
        shared=st.sampled_from(LENGTHS),
        own=st.sampled_from((0, 1, SIZE, 2 * SIZE + 1)),
        namespace=st.sampled_from((*NAMESPACES, NAMESPACES[0])),
        sampling=st.sampled_from(SAMPLINGS),
        max_tokens=st.integers(1, 2 * SIZE + 1),
    )
    def ask(
        self, stream: int, shared: int, own: int, namespace: KvNamespace, sampling: Sampling, max_tokens: int
    ) -> None:
        prompt = STREAMS[stream][:shared] + STREAMS[2 + self.count % 2][:own] or STREAMS[stream][:1]
        self.count += 1
        asked = SequenceSpec(
            key(self.count), prompt, [], sampling, StopRule(max_tokens, frozenset({prompt[0]})), namespace=namespace
        )
        self.add(asked)

    @rule(stream=st.integers(0, 1), turn=st.integers(1, 3))
    def go_on(self, stream: int, turn: int) -> None:
        """A next turn: the prompt is an earlier one with its answer, and some more."""
        earlier = SequenceSpec(
            key(0), STREAMS[stream][: turn * SIZE], [], SAMPLINGS[0], StopRule(SIZE + 1), namespace=NAMESPACES[0]
        )
        self.count += 1
        prompt = [*earlier.prompt, *self.oracle.answer(earlier), *STREAMS[2][:turn]]
        self.add(replace(earlier, key=key(self.count), prompt=prompt))

    @precondition(lambda self: self.asked)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.asked:
                self.step_once()

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        gone = list(self.asked)[pick % len(self.asked)]
        self.engine.release(gone)
        del self.asked[gone]

    @rule(count=st.integers(1, 20))
    def crowd(self, count: int) -> None:
        """Somebody else wants blocks for a moment, as the network side does; what was cached is evicted."""
        try:
            blocks = self.cache.allocate(count)
        except CapacityError:
            assert count > self.cache.available_blocks
            return
        for block in blocks:
            self.loaded.kv_pool.block(block)[:] = b"\xff" * self.loaded.kv_pool.spec.block_bytes
        self.cache.release(blocks)

    @invariant()
    def cached_blocks_are_never_written(self) -> None:
        nodes = self.cache._nodes
        changes = self.cache.journal.take()
        removed = {name for change in changes if change.kind is KvEventKind.REMOVED for name in change.hashes}
        self.shown = {block: shown for block, shown in self.shown.items() if shown.name not in removed}
        for block, node in nodes.items():
            shown = Shown(node.hash, zlib.crc32(self.loaded.kv_pool.block(block)))
            before = self.shown.get(block)
            assert before in (None, shown)
            self.shown[block] = shown

    @invariant()
    def books_balance(self) -> None:
        cache = self.cache
        assert cache.evictable_blocks == sum(not node.held for node in cache._nodes.values())
        held = {
            block for one in (*self.engine._admitted.values(), *self.engine._waiting.values()) for block in one.blocks
        }
        assert cache.free_blocks + cache.evictable_blocks + len(held) == cache.total_blocks

    def teardown(self) -> None:
        steps = 0
        while self.asked:
            steps += 1
            assert steps < 5_000, "no end"
            self.step_once()
        assert self.cache.available_blocks == self.cache.total_blocks

    def add(self, asked: SequenceSpec) -> None:
        if len(self.asked) < 6:
            found = look_up(self.engine, asked)
            self.engine.add(found)
            self.asked[found.key] = found

    def step_once(self) -> None:
        if not self.engine.has_work():
            self.give_up_the_youngest()
            return
        result = self.engine.step()
        for update in result.updates:
            asked = self.asked[update.key]
            assert update.num_computed > asked.num_computed, "a prompt of which nothing is computed"
            if update.finish is not None:
                outputs = self.engine.outputs(update.key)
                self.engine.release(update.key)
                del self.asked[update.key]
                assert outputs == self.oracle.answer(asked)

    def give_up_the_youngest(self) -> None:
        """Those that wait hold what they have found, and so may leave no room for the first of them."""
        assert self.engine.status().running == 0
        assert len(self.engine._waiting) > 1, "one that is alone fits"
        youngest = list(self.engine._waiting)[-1]
        asked = self.asked.pop(youngest)
        self.engine.release(youngest)
        self.add(asked)


@pytest.fixture(scope="module")
def oracle(tiny: Tiny) -> Oracle:
    return Oracle(tiny)


def test_answers_are_those_of_an_engine_without_a_cache(tiny: Tiny, oracle: Oracle) -> None:
    """Text of others, or of an earlier life of a block, in an answer; a shared block that is written."""
    machine = type("Machine", (ReuseMachine,), {"loaded": load(tiny), "oracle": oracle})
    run_state_machine_as_test(machine, settings=settings(max_examples=200, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("size", [1, 16])
def test_lengths_around_block_edges_answer_alike_cold_and_hot(tiny: Tiny, oracle: Oracle, size: int) -> None:
    """A prompt that is cached to its last token leaves nothing to compute, and nothing to draw a token from."""
    loaded = load(tiny, size=size, pool_tokens=256)
    engine, cache = loaded.engine, loaded.engine.cache
    for length in sorted({1, size - 1, size, size + 1, 2 * size} - {0}):
        cache.release(cache.allocate(cache.total_blocks))
        asked = spec(STREAMS[0][:length])
        assert look_up(engine, asked).num_computed == 0
        for expected_hit in (0, *[(length - 1) // size * size] * 3):
            before = engine.status().prompt_tokens_computed
            found = look_up(engine, asked)
            shared = [bytes(loaded.kv_pool.block(block)) for block in found.blocks]
            assert found.num_computed == expected_hit
            assert generate(engine, found) == oracle.answer(asked)
            assert engine.status().prompt_tokens_computed - before == length - expected_hit >= 1
            assert [bytes(loaded.kv_pool.block(block)) for block in found.blocks] == shared


def test_a_look_up_after_a_refusal_finds_what_is_left(tiny: Tiny, oracle: Oracle) -> None:
    """The length of a first look-up that came to nothing is used again after eviction: KV of nobody is read."""
    engine = load(tiny, pool_tokens=16 * SIZE).engine
    cache = engine.cache
    asked = spec(STREAMS[0][: 8 * SIZE + 1], max_tokens=2 * SIZE)
    assert generate(engine, asked) == oracle.answer(asked)
    found = look_up(engine, asked)
    assert len(found.blocks) == 8
    taken = cache.allocate(cache.available_blocks)
    with pytest.raises(CapacityError):
        cache.allocate(2)
    cache.release(found.blocks)
    taken += cache.allocate(4)
    again = look_up(engine, asked)
    assert again.blocks == found.blocks[:4]
    engine.add(again)
    assert not engine.has_work(), "its other blocks are not there"
    cache.release(taken)
    while engine.has_work():
        engine.step()
    assert engine.outputs(asked.key) == oracle.answer(asked)
