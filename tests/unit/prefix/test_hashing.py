"""Block names are the same everywhere and for ever, and differ whenever anything differs."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from pdd.prefix.hashing import block_hashes

TOKENS = list(range(64))
GOLDEN = "e3c7c103cfd03221e946a314a67a6481"


def test_golden_vector() -> None:
    """Guards against a change of the names: instances of two versions would never hit each other's blocks."""
    assert block_hashes(TOKENS, 16)[-1].hex() == GOLDEN


def test_independent_of_the_process() -> None:
    """Guards against names that depend on a process' own randomness: nobody else would ever ask for them."""
    code = "from pdd.prefix.hashing import block_hashes; print(block_hashes(list(range(64)), 16)[-1].hex())"
    for seed in (None, "0", "7"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert printed.stdout.strip() == GOLDEN


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_salt_and_fidelity_never_run_together(salt: str, fidelity: str, salt2: str, fidelity2: str) -> None:
    one = block_hashes(TOKENS, 16, salt=salt, fidelity=fidelity)
    two = block_hashes(TOKENS, 16, salt=salt2, fidelity=fidelity2)
    assert (one == two) is ((salt, fidelity) == (salt2, fidelity2))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(1, 20))
def test_only_whole_blocks_and_a_prefix_keeps_its_names(tokens: list[int], block_size: int) -> None:
    hashes = block_hashes(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert block_hashes([*tokens, 1], block_size)[: len(hashes)] == hashes


KEYS = st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 3), st.text("ab\0", max_size=3))


@given(KEYS, KEYS, st.sampled_from(["exact", "fp8"]), st.sampled_from(["exact", "fp8"]))
def test_equal_only_if_everything_is(
    one: tuple[list[int], int, str], two: tuple[list[int], int, str], fidelity: str, fidelity2: str
) -> None:
    """Guards against one tenant's or one fidelity's blocks found under another's name: wrong KV for the wrong user."""
    (tokens, size, salt), (tokens2, size2, salt2) = one, two
    names = block_hashes(tokens, size, salt=salt, fidelity=fidelity)
    names2 = block_hashes(tokens2, size2, salt=salt2, fidelity=fidelity2)
    for number, name in enumerate(names):
        for number2, name2 in enumerate(names2):
            covered, covered2 = tokens[: (number + 1) * size], tokens2[: (number2 + 1) * size2]
            same = (covered, size, salt, fidelity) == (covered2, size2, salt2, fidelity2)
            assert (name == name2) is same
