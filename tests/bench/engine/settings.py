"""What is measured; fixed before a run."""

from __future__ import annotations

ROUNDS = 5
"""Of everything that is compared, after one to warm up."""

STEP_TOKENS = 512
"""Token budget of a step."""
BLOCK_SIZE = 16
POOL_TOKENS = 40_960
SEATS = 64

PREFILLS = (1024, 4096)
BATCHES = (1, 8, 32)
SCALING = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Batches of the engine alone: where does its decode throughput stop rising?"""
CONTEXT = 512
"""Tokens before the first that is decoded."""
STEPS = 8
"""Decode steps a round; contexts grow by as many."""

EXTENDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KNEE = 2.0
"""The knee is the longest extend of which a step takes at most so many decode steps' time."""

HIT_CONTEXT = 2048
HIT_PROMPTS = 4
HIT_RATES = (0, 10, 20, 24, 30, 40, 49, 50, 60, 70, 74, 80, 90, 95, 99)
"""Per cent. At 24, 49 and 74 full chunks leave a sliver of 32 to 48 tokens, at 95 and 99 there is nothing else."""
HIT_ROUNDS = 3

STREAMS = 8
LONG_PROMPT = 4096
