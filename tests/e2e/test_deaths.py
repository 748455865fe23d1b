"""Prefill is killed while its KV is on its way: who stays gets the same answer, who leaves leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from pdd.local.mesh import LocalMesh
from pdd.model.tokenizer import Tokenizer
from tests.e2e.conftest import Client, books_balance
from tests.e2e.prompts import prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

ANSWER_TOKENS = 16


async def main_decode_receives(client: Client) -> None:
    """Wait until a transfer has blocks at MainDecode while Prefill still computes."""
    async with asyncio.timeout(20):
        while True:
            loads = [(one["role"], one["load"]) for one in await client.instances()]
            received = any(
                load["total_blocks"] - load["free_blocks"] - load["evictable_blocks"]
                for role, load in loads
                if role == "main_decode"
            )
            if received and any(load["running"] for role, load in loads if role == "prefill"):
                return
            await asyncio.sleep(0.05)


async def test_prefill_killed_during_transfers(client: Client, mesh: LocalMesh, tokenizer: Tokenizer) -> None:
    """Its blocks at MainDecode and RelayDecode were being written: they come back although nobody says "done"."""
    texts = prompts(tokenizer)
    asked = [texts[10][start : start + 600] for start in (0, 200, 400, 600)]

    async def ask(prompt: list[int], salt: str) -> list[int]:
        return (await client.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, cache_salt=salt)).ids

    running = [asyncio.create_task(ask(prompt, "killed")) for prompt in asked]
    await main_decode_receives(client)
    await asyncio.to_thread(mesh.kill, "prefill-0")
    for leaving in running[::2]:
        leaving.cancel()
    mesh.restart("prefill-0")
    answers = await asyncio.gather(*running, return_exceptions=True)
    await asyncio.to_thread(mesh.wait_ready)
    await books_balance(client)
    assert [isinstance(one, asyncio.CancelledError) for one in answers[::2]] == [True, True]
    assert answers[1::2] == [await ask(prompt, "calm") for prompt in asked[1::2]]
    await books_balance(client)
