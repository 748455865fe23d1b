"""Shared values: hashes that every process and machine agrees on, and when an answer ends."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.kv import KvSpec, ModelIdentity
from pdd.types import EMPTY_OUTPUT_HASH, AttemptKey, FinishReason, StopRule, hash_output, hash_prompt

GOLDEN_OUTPUT = 13419634226107280933
GOLDEN_PROMPT = "67948d8b7a334105f3952877c7c98930"

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(first=token_ids, second=token_ids)
def test_the_output_hash_runs(first: list[int], second: list[int]) -> None:
    assert hash_output(hash_output(EMPTY_OUTPUT_HASH, first), second) == hash_output(EMPTY_OUTPUT_HASH, first + second)
    assert 0 <= hash_output(EMPTY_OUTPUT_HASH, first) < 2**64


@given(ids=token_ids.filter(bool), data=st.data())
def test_one_other_token_or_order_is_another_hash(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:at], ids[at] ^ 1, *ids[at + 1 :]]
    assert hash_output(EMPTY_OUTPUT_HASH, ids) != hash_output(EMPTY_OUTPUT_HASH, other)
    assert hash_prompt(ids) != hash_prompt(other)
    assert hash_output(EMPTY_OUTPUT_HASH, ids) != hash_output(EMPTY_OUTPUT_HASH, [*ids, ids[-1]])
    if ids != ids[::-1]:
        assert hash_output(EMPTY_OUTPUT_HASH, ids) != hash_output(EMPTY_OUTPUT_HASH, ids[::-1])


@pytest.mark.parametrize("seed", ["0", "7", "random"])
def test_hashes_are_the_same_in_every_process(seed: str) -> None:
    """Golden values: a change of them is a change of the protocol."""
    code = (
        "from pdd.types import hash_output, hash_prompt\n"
        "print(hash_output(0, [1, 2, 50_000]), hash_prompt([1, 2, 50_000]).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == [str(GOLDEN_OUTPUT), GOLDEN_PROMPT]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ([5], None),
        ([5, 6], None),
        ([2], FinishReason.STOP),
        ([2, 5], None),  # only the newest token may end it: an older one did not
        ([5, 6, 7], FinishReason.LENGTH),
        ([5, 6, 2], FinishReason.STOP),  # a stop token in the last place is a stop
    ],
)
def test_how_an_answer_ends(output: list[int], reason: FinishReason | None) -> None:
    assert StopRule(3, frozenset({2})).check(output) is reason


def test_attempts_are_ordered_and_read_well() -> None:
    first, second = AttemptKey("ab", 1), AttemptKey("ab", 2)
    assert first < second
    assert str(second) == "ab/2"


def test_sizes_of_kv() -> None:
    spec = KvSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
    assert spec.token_bytes == 3 * 2 * 2 * 8 * 2
    assert spec.block_bytes == 4 * spec.token_bytes
    assert [spec.blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_one_other_property_is_another_fingerprint() -> None:
    ours = ModelIdentity("w", "llama", 2, 2, 16, "default")
    assert ours.fingerprint == ModelIdentity("w", "llama", 2, 2, 16, "default").fingerprint
    changes = {
        "weights": "v",
        "architecture": "qwen2",
        "num_layers": 3,
        "num_kv_heads": 4,
        "head_dim": 8,
        "rope": "yarn",
    }
    assert set(changes) == set(ModelIdentity.__struct_fields__)
    others = [msgspec.structs.replace(ours, **{field: value}) for field, value in changes.items()]
    assert len({ours.fingerprint, *(other.fingerprint for other in others)}) == len(changes) + 1
