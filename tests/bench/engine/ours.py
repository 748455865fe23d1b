"""Sequences on the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pdd.engine.engine import Engine
from pdd.engine.loading import LoadedEngine, load_engine
from pdd.engine.sequence import SequenceSpec
from pdd.kv import KvNamespace
from pdd.model.decoder import Decoder
from pdd.types import AttemptKey, Sampling, StopRule
from tests.bench.engine.measuring import timed
from tests.bench.engine.settings import BLOCK_SIZE, CONTEXT, POOL_TOKENS, SEATS, STEP_TOKENS, STEPS


def load(model: Path, threads: int, *, step_tokens: int = STEP_TOKENS) -> LoadedEngine:
    """The engine in bfloat16 as a stage runs it."""
    return load_engine(
        model,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        pool_tokens=POOL_TOKENS,
        step_tokens=step_tokens,
        seats=SEATS,
        threads=threads,
        prefix_cache=True,
    )


class Ours:
    """An engine and random prompts. Only sequences with a namespace share a prefix."""

    def __init__(self, model: Path, threads: int, *, step_tokens: int = STEP_TOKENS) -> None:
        self.engine: Engine = load(model, threads, step_tokens=step_tokens).engine
        self._draw = random.Random(1)
        self._made = 0

    @property
    def decoder(self) -> Decoder:
        """The forward pass alone."""
        return self.engine._model  # pyright: ignore[reportPrivateUsage]

    def tokens(self, count: int) -> list[int]:
        """So many random token IDs."""
        return [self._draw.randrange(1000, 40_000) for _ in range(count)]

    def add(self, prompt: list[int], *, limit: int | None = None, namespace: KvNamespace | None = None) -> AttemptKey:
        """Queue a prompt behind what is cached of it under `namespace`."""
        self._made += 1
        key = AttemptKey(f"{self._made:032x}", 1)
        cached = [] if namespace is None else self.engine.cache.match(namespace, prompt[:-1])
        self.engine.add(
            SequenceSpec(
                key,
                prompt,
                [],
                Sampling(),
                StopRule(2000),
                num_computed=len(cached) * BLOCK_SIZE,
                blocks=cached,
                sample_limit=limit,
                namespace=namespace,
            )
        )
        return key

    def run(self) -> Iterator[float]:
        """Step until nothing is left; seconds of each."""
        while self.engine.has_work():
            yield timed(self.engine.step)

    def prefill(self, count: int) -> float:
        """Seconds from a prompt of `count` tokens to the first token of its answer."""
        key = self.add(self.tokens(count), limit=1)
        took = timed(lambda: list(self.run()))
        self.engine.release(key)
        return took

    def start(self, batch: int) -> list[AttemptKey]:
        """Sequences that decode from a context of `CONTEXT` on."""
        keys = [self.add(self.tokens(CONTEXT - 1), limit=1) for _ in range(batch)]
        list(self.run())
        for key in keys:
            self.engine.set_sample_limit(key, None)
        return keys

    def stop(self, keys: list[AttemptKey]) -> None:
        """Release them all."""
        for key in keys:
            self.engine.release(key)

    def decode(self) -> float:
        """Seconds of a decode step, the mean of `STEPS`."""
        return timed(lambda: [self.engine.step() for _ in range(STEPS)]) / STEPS
