"""Scripts for `ScriptedGenerator`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from pdd.types import FinishReason
from services.gateway.generation import Emission, GenerationRequest
from tests.unit.gateway.conftest import Script


def emit(ids: Sequence[int], finish: FinishReason = FinishReason.STOP, *, each: int = 1) -> Script:
    """Emit `ids`, `each` at a time; the last emission carries `finish`."""

    async def script(_: GenerationRequest) -> AsyncIterator[Emission]:
        for start in range(0, len(ids), each):
            last = start + each >= len(ids)
            yield Emission(list(ids[start : start + each]), finish if last else None)
            await asyncio.sleep(0)

    return script


def fail(error: Exception, after: Sequence[int] = ()) -> Script:
    """Emit `after` one by one, then raise `error`."""

    async def script(_: GenerationRequest) -> AsyncIterator[Emission]:
        for token in after:
            yield Emission([token])
        raise error

    return script


def endless(token: int, *, first: int = 10**9) -> Script:
    """Emit `token` for ever, slowly; before the `first` one wait for ever."""

    async def script(_: GenerationRequest) -> AsyncIterator[Emission]:
        emitted = 0
        while True:
            if emitted == first:
                await asyncio.Event().wait()
            yield Emission([token])
            emitted += 1
            await asyncio.sleep(0.005)

    return script
