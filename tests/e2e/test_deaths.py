"""Prefill is killed while its KV is on its way: who stays gets the same answer, who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from pdd.local.mesh import LocalMesh
from pdd.local.shaper import ask
from pdd.model.tokenizer import Tokenizer
from tests.e2e.conftest import Client, books_balance, killed
from tests.e2e.prompts import prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

ANSWER_TOKENS = 16
LONG_ANSWER_TOKENS = 400
BEGUN_BYTES = 1 << 20


async def kv_crosses(mesh: LocalMesh) -> None:
    """Wait until KV has begun to cross the WAN; it takes far longer for all of it."""
    async with asyncio.timeout(60):
        before = (await asyncio.to_thread(ask, mesh.shaper_control)).line.a_to_b.payload_bytes
        while True:
            line = (await asyncio.to_thread(ask, mesh.shaper_control)).line
            if line.a_to_b.payload_bytes > before + BEGUN_BYTES:
                return
            await asyncio.sleep(0.01)


async def test_prefill_killed_during_transfers(client: Client, mesh: LocalMesh, tokenizer: Tokenizer) -> None:
    """Its blocks at MainDecode and RelayDecode were being written: they come back although nobody says "done"."""
    texts = prompts(tokenizer)
    leave, stay = ([texts[10][start : start + 600] for start in starts] for starts in ((0, 400), (200, 600)))

    async def answers_to(prompt: list[int], tokens: int, salt: str) -> list[int]:
        return (await client.complete(prompt, max_tokens=tokens, ignore_eos=True, cache_salt=salt)).ids

    crossing = asyncio.create_task(kv_crosses(mesh))
    leaving = [asyncio.create_task(answers_to(prompt, LONG_ANSWER_TOKENS, "killed")) for prompt in leave]
    staying = [asyncio.create_task(answers_to(prompt, ANSWER_TOKENS, "killed")) for prompt in stay]
    await crossing
    async with killed(mesh, "prefill-0"):
        for one in leaving:
            one.cancel()
        answers = await asyncio.gather(*staying)
        await asyncio.wait(leaving)
    await books_balance(client)
    assert all(one.cancelled() for one in leaving)
    assert answers == [await answers_to(prompt, ANSWER_TOKENS, "calm") for prompt in stay]
    await books_balance(client)
