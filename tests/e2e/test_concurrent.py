"""Thirty-two streams at once over one Prefill, one RelayDecode, two MainDecodes: batched, exact, all given back."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from pdd.engine.engine import SequenceSpec, generate
from pdd.engine.loading import load_engine
from pdd.local.scrape import Samples, scrape
from pdd.types import AttemptKey, Sampling, StopRule
from tests.e2e.conftest import Client, books_balance

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

STREAMS = 32
SYSTEM_TOKENS = 64


@pytest.fixture(scope="module")
def asked() -> list[tuple[list[int], int]]:
    """Prompts of 8 to 400 tokens, every other one with the same system prompt, and how long each answer is."""
    generator = random.Random(32)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(1000, 40_000) for _ in range(count)]

    system = tokens(SYSTEM_TOKENS)
    lengths = [generator.choice((8, 17, 40, 90, 160, 330)) for _ in range(STREAMS)]
    return [
        ([*(system if number % 2 else []), *tokens(length)], generator.randrange(8, 33))
        for number, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(model: Path, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    """What one engine answers, one request at a time."""
    loaded = load_engine(model, dtype="float32", block_size=16, pool_tokens=1024, step_tokens=512, seats=1)
    return [
        generate(
            loaded.engine, SequenceSpec(AttemptKey(f"{number:032x}", 1), prompt, [], Sampling(), StopRule(max_tokens))
        )
        for number, (prompt, max_tokens) in enumerate(asked)
    ]


async def figures(client: Client) -> dict[str, Samples]:
    """Metrics of every MainDecode across the WAN, by instance."""
    shown: dict[str, Samples] = {}
    for one in await client.instances():
        if (one["role"], one["dc"]) == ("main_decode", "b"):
            samples = await asyncio.to_thread(scrape, f"http://127.0.0.1:{one['metrics_port']}/metrics")
            assert samples is not None
            shown[one["instance"]] = samples
    return shown


async def test_thirty_two_streams_at_once(
    client: Client, asked: list[tuple[list[int], int]], expected: list[list[int]]
) -> None:
    before = await figures(client)
    answers = await asyncio.gather(
        *(
            client.stream(prompt, max_tokens=max_tokens, ignore_eos=True, cache_salt="streams")
            for prompt, max_tokens in asked
        )
    )
    assert [answer.ids for answer in answers] == expected
    await books_balance(client)
    after = await figures(client)
    assert len(after) == 2
    for instance in after:
        steps, sequences = (
            after[instance].total(name) - before[instance].total(name)
            for name in ("pdd_stage_step_sequences_count", "pdd_stage_step_sequences_sum")
        )
        assert steps > 0, f"main_decode {instance} had nothing to do"
        assert sequences > 1.5 * steps, f"main_decode {instance} did {sequences} sequences in {steps} steps"
