"""A conversation through the real mesh: what its turns have in common is computed once and crosses the WAN once."""

from __future__ import annotations

import asyncio

import pytest

from pdd.model.tokenizer import Tokenizer
from tests.e2e.conftest import Answer, Client, books_balance
from tests.e2e.prompts import prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

BLOCK = 16
KV_BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
ANSWER_TOKENS = 8


async def turn(client: Client, tokens: list[int], salt: str) -> Answer:
    """The next answer; then a moment for the index to hear what is cached."""
    answer = await client.complete(
        tokens, max_tokens=ANSWER_TOKENS, ignore_eos=True, cache_salt=salt, pipeline="pd-wan"
    )
    await asyncio.sleep(0.5)
    return answer


async def converse(client: Client, opening: list[int], questions: list[list[int]], salts: list[str]) -> list[Answer]:
    """Turns on top of each other; a salt for each, so that equal salts remember."""
    answers: list[Answer] = []
    tokens = list(opening)
    for question, salt in zip(questions, salts, strict=True):
        tokens += question
        answers.append(await turn(client, tokens, salt))
        tokens += answers[-1].ids
    return answers


async def test_turns_send_only_what_is_new(client: Client, tokenizer: Tokenizer) -> None:
    """One salt for all turns against a new one for each, which is no cache: bytes, hits, and the answers."""
    texts = prompts(tokenizer)
    opening = texts[10][:480]
    questions = [texts[7][start : start + 12] for start in range(0, 60, 12)]
    warm = await converse(client, opening, questions, ["conversation"] * 5)
    cold = await converse(client, opening, questions, [f"stranger {number}" for number in range(5)])
    assert [one.ids for one in warm] == [one.ids for one in cold]
    known = len(opening) + len(questions[0])
    for number in range(1, 5):
        report = warm[number].report
        # Of the last answer's tokens the last one was never computed.
        assert report["main_hit_tokens"] == (known + ANSWER_TOKENS - 1) // BLOCK * BLOCK
        assert report["prefill_hit_tokens"] == known // BLOCK * BLOCK
        assert warm[number].usage["prompt_tokens_details"]["cached_tokens"] == report["prefill_hit_tokens"]
        assert warm[number].report["main_decode"] == warm[0].report["main_decode"]
        length = known + ANSWER_TOKENS + len(questions[number])
        assert report["kv_wan_bytes"] == (length - report["main_hit_tokens"]) * KV_BYTES_PER_TOKEN
        assert cold[number].report["kv_wan_bytes"] == length * KV_BYTES_PER_TOKEN
        assert cold[number].usage["prompt_tokens_details"]["cached_tokens"] == 0
        known = length
    sent, without = (sum(one.report["kv_wan_bytes"] for one in ones[1:]) for ones in (warm, cold))
    share = 1 - sum(one.report["main_hit_tokens"] for one in warm[1:]) / sum(
        one.usage["prompt_tokens"] for one in warm[1:]
    )
    assert share < 0.1
    assert sent <= 0.12 * without
    await books_balance(client)


async def test_equal_openings_that_arrive_together_cross_once(client: Client, tokenizer: Tokenizer) -> None:
    """Two cold requests at once to one MainDecode: the second one's KV comes with the first one's transfer."""
    texts = prompts(tokenizer)
    opening, endings = texts[10][:600], [texts[4][:20], texts[5][:20]]

    async def ask(ending: list[int], salt: str) -> Answer:
        return await client.complete(
            [*opening, *ending], max_tokens=12, ignore_eos=True, cache_salt=salt, pipeline="pd-local"
        )

    apart = [await ask(ending, f"apart {number}") for number, ending in enumerate(endings)]
    together = await asyncio.gather(*(ask(ending, "together") for ending in endings))
    assert [one.ids for one in together] == [one.ids for one in apart]
    assert sum(one.report["kv_fabric_bytes"] for one in apart) == 2 * 620 * KV_BYTES_PER_TOKEN
    assert sum(one.report["kv_fabric_bytes"] for one in together) == (620 + 620 - 592) * KV_BYTES_PER_TOKEN
    await books_balance(client)
