"""Which stage runs on which core.

When stages outnumber cores, each runs one intra-op thread and is pinned: prefill on its own core, RelayDecode and
MainDecode on the other, so that decode keeps its pace while a prompt is computed. With more cores each stage gets
cores of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import msgspec

from pdd.types import Role


class Assignment(msgspec.Struct, frozen=True):
    """Where one stage runs, and with how many intra-op threads."""

    name: str
    cores: tuple[int, ...]
    threads: int


def assign(stages: Sequence[tuple[str, Role]], cores: Sequence[int]) -> list[Assignment]:
    """Give every stage (name, role) its cores, in the order of `stages`. `cores` are the usable ones, at least one."""
    if len(stages) < len(cores):
        # One core stays free for the gateway, the servers and the line.
        share = max(1, (len(cores) - 1) // len(stages))
        own = [tuple(cores[n * share : (n + 1) * share]) for n in range(len(stages))]
        return [Assignment(name, mine, len(mine)) for (name, _), mine in zip(stages, own, strict=True)]
    prefills = sum(role == Role.PREFILL for _, role in stages)
    split = min(max(1, len(cores) * prefills // len(stages)), max(1, len(cores) - 1))
    prefill_cores, decode_cores = cycle(cores[:split]), cycle(cores[split:] or cores)
    return [
        Assignment(name, (next(prefill_cores if role == Role.PREFILL else decode_cores),), 1) for name, role in stages
    ]
