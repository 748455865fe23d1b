"""The prompts of the exactness checks, fixed beforehand: slices of a text that everybody has, 30 to 3,000 tokens."""

from __future__ import annotations

from pathlib import Path

from pdd.model.tokenizer import Tokenizer

LENGTHS = (30, 31, 32, 33, 47, 100, 150, 255, 400, 513, 1100, 3000)
"""Around block and chunk borders, and far beyond them."""

ANSWER_TOKENS = 24


def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """One prompt of each length; each begins at another place of the licence text, so that none is a prefix."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = tokenizer.encode(text * 3)
    return [tokens[37 * index : 37 * index + length] for index, length in enumerate(LENGTHS)]
