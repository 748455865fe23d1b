"""fp32 output is token-for-token the same however a request travels: every path, every handoff position.

Real processes, real NATS and Valkey, real weights. A mismatch prints how near to a tie the reference was there.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdd.engine.engine import SequenceSpec, generate
from pdd.engine.loading import load_engine
from pdd.local.mesh import LocalMesh
from pdd.model.tokenizer import Tokenizer
from pdd.types import AttemptKey, Sampling, StopRule
from tests.e2e.conftest import OPTIONS, Answer, Client, books_balance, killed
from tests.e2e.prompts import ANSWER_TOKENS, prompts
from tests.e2e.reference import Drawn, Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

AT_ONCE = 4
LONG_ANSWER_TOKENS = 120
"""So many steps take far longer than to kill a process."""
GREEDY = Sampling()
SEEDED = Sampling(temperature=0.8, top_p=0.9, top_k=50, seed=20_261_201)

WAYS: dict[str, dict[str, object]] = {
    "pd-wan": {"pipeline": "pd-wan"},
    "pd-local": {"pipeline": "pd-local"},
    "pdd": {"pipeline": "pdd"},
    "handoff right after the first token": {"handoff_at": 1},
    "handoff at 2": {"handoff_at": 2},
    "handoff at 7": {"handoff_at": 7},
    "handoff at 16": {"handoff_at": 16},
    "handoff right before the last token": {"handoff_at": ANSWER_TOKENS - 1},
}


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> list[list[int]]:
    return prompts(tokenizer)


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def greedy(reference: Reference, asked: list[list[int]]) -> list[Drawn]:
    return [reference.generate(prompt, ANSWER_TOKENS) for prompt in asked]


@pytest.fixture(scope="module")
def seeded(reference: Reference, asked: list[list[int]]) -> list[Drawn]:
    return [reference.draw(prompt, ANSWER_TOKENS, SEEDED) for prompt in asked[:8]]


def explain(length: int, got: list[int], expected: list[int], margins: list[float]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    margin = margins[at] if at < len(margins) else float("nan")
    return f"prompt of {length}: token {at} differs, top-2 margin there {margin:.2e}; {got} != {expected}"


async def ask_all(client: Client, asked: list[list[int]], **how: object) -> list[Answer]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> Answer:
        async with gate:
            return await client.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, **how)  # type: ignore[arg-type]

    return await asyncio.gather(*(one(prompt) for prompt in asked))


def test_one_bare_engine(
    model: Path,
    asked: list[list[int]],
    greedy: list[Drawn],
    seeded: list[Drawn],
) -> None:
    loaded = load_engine(model, dtype="float32", block_size=16, pool_tokens=4096, step_tokens=512, seats=4)
    for sampling, expected in ((GREEDY, greedy), (SEEDED, seeded)):
        for number, (prompt, (tokens, margins)) in enumerate(zip(asked, expected, strict=False)):
            key = AttemptKey(f"{number:032x}", 1)
            spec = SequenceSpec(key, prompt, [], sampling, StopRule(ANSWER_TOKENS))
            got = generate(loaded.engine, spec)
            assert got == tokens, explain(len(prompt), got, tokens, margins)


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_through_the_mesh(
    client: Client, asked: list[list[int]], greedy: list[Drawn], way: str
) -> None:
    answers = await ask_all(client, asked, cache_salt=way, **WAYS[way])
    for prompt, answer, (tokens, margins) in zip(asked, answers, greedy, strict=True):
        assert answer.ids == tokens, explain(len(prompt), answer.ids, tokens, margins)
        assert answer.finish == "length"
        check_report(answer, len(prompt), WAYS[way])
    await books_balance(client)


async def test_cached_kv_changes_no_token(client: Client, asked: list[list[int]], greedy: list[Drawn]) -> None:
    """The same prompts again, when Prefill and MainDecode remember them; the longest would evict others."""
    some = asked[:-1]
    await ask_all(client, some, cache_salt="again", pipeline="pd-wan")
    for way in ("pd-wan", "handoff at 7"):
        answers = await ask_all(client, some, cache_salt="again", **WAYS[way])
        for prompt, answer, (tokens, margins) in zip(some, answers, greedy, strict=False):
            assert answer.ids == tokens, explain(len(prompt), answer.ids, tokens, margins)
            assert answer.report["recomputed_prompt_tokens"] == 0
        cached = [answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in some]
    await books_balance(client)


async def test_kv_leaves_while_later_chunks_still_compute(client: Client, asked: list[list[int]]) -> None:
    """Of computing and sending, the longer one hides most of the shorter one, whichever it is on this machine."""
    answer = await client.complete(asked[-1], max_tokens=2, pipeline="pd-wan", ignore_eos=True, cache_salt="cold")
    report = answer.report
    sending_ms = report["kv_wan_bytes"] * 8 / (OPTIONS.wan_mbps * 1e6) * 1e3
    computing_ms = report["prefill_done_ms"] - report["prefill_started_ms"]
    hidden_ms = sending_ms - (report["kv_ready_ms"] - report["prefill_done_ms"])
    assert hidden_ms > 0.5 * min(sending_ms, computing_ms)


def check_report(answer: Answer, prompt_tokens: int, how: dict[str, object]) -> None:
    """It really went that way, and its KV really crossed: all of the prompt's, and nothing was computed again."""
    report = answer.report
    kv_bytes = prompt_tokens * 30 * 2 * 3 * 64 * 4
    assert report["recomputed_prompt_tokens"] == 0
    assert report["attempts"] == 1
    by_role = (report["prefill_tokens"], report["relay_tokens"], report["main_decode_tokens"])
    assert sum(by_role) == ANSWER_TOKENS
    assert report["prefill_tokens"] == 1
    if how.get("pipeline") == "pd-local":
        assert (report["path"], report["kv_fabric_bytes"], report["kv_wan_bytes"]) == ("P->MD", kv_bytes, 0)
    if how.get("pipeline") == "pd-wan":
        assert (report["path"], report["kv_fabric_bytes"], report["kv_wan_bytes"]) == ("P->MD", 0, kv_bytes)
    if "handoff_at" in how:
        assert report["path"] == "P->RLD->MD"
        assert (report["kv_fabric_bytes"], report["kv_wan_bytes"]) == (kv_bytes, kv_bytes)
        assert report["handoff_position"] == how["handoff_at"]
        assert report["relay_tokens"] == report["handoff_position"] - 1
    assert answer.headers["x-pdd-path"] == report["path"]


@pytest.mark.parametrize("way", ["pd-wan", "pd-local", "handoff at 7", "handoff right before the last token"])
async def test_seeded_sampling(client: Client, asked: list[list[int]], seeded: list[Drawn], way: str) -> None:
    fields = {"temperature": SEEDED.temperature, "top_p": SEEDED.top_p, "top_k": SEEDED.top_k, "seed": SEEDED.seed}
    answers = await ask_all(client, asked[:8], cache_salt=f"seeded, {way}", **WAYS[way], **fields)
    for prompt, answer, (tokens, margins) in zip(asked, answers, seeded, strict=False):
        assert answer.ids == tokens, explain(len(prompt), answer.ids, tokens, margins)


async def test_a_lost_relay_changes_nothing_but_the_time(
    client: Client, mesh: LocalMesh, asked: list[list[int]]
) -> None:
    """RelayDecode is killed as soon as the client has a token of it, when most of the answer is still to come: a new
    attempt continues after what the client has seen."""
    calm = await client.complete(asked[3], max_tokens=LONG_ANSWER_TOKENS, ignore_eos=True, pipeline="pd-local")
    request = await client.streaming(
        2, asked[3], max_tokens=LONG_ANSWER_TOKENS, ignore_eos=True, handoff_at=LONG_ANSWER_TOKENS - 1
    )
    async with killed(mesh, "relay-0"):
        answer = await request
    assert answer.ids == calm.ids
    assert answer.report["attempts"] == 2
    await books_balance(client)
