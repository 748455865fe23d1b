"""llama.cpp, where it is installed, through the C interface that its Python package binds."""

from __future__ import annotations

import ctypes
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.engine.measuring import Probe, timed
from tests.bench.engine.settings import BATCHES, CONTEXT, PREFILLS, ROUNDS, STEPS

try:
    import llama_cpp
except ImportError:
    llama_cpp = None

_DECODED = (ROUNDS + 1) * STEPS
_Part = tuple[int, list[int], int]
"""Sequence, token IDs, position of the first."""


def version() -> str | None:
    """Of the Python package, which names the release of llama.cpp in it; None if it is not there."""
    return None if llama_cpp is None else llama_cpp.__version__


@contextmanager
def bfloat16_copy(model: Path) -> Iterator[Path]:
    """The same weights as a GGUF file in bfloat16, made by llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "bf16.gguf"
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype, settings.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, True
        if llama_cpp.llama_model_quantize(os.fsencode(model), os.fsencode(copy), ctypes.byref(settings)):
            raise RuntimeError(f"llama.cpp did not convert {model}")
        yield copy


class Llama:
    """llama.cpp with flash attention, which is its faster way with this model; everything else as it comes."""

    def __init__(self, model: Path, threads: int) -> None:
        _silence()
        settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(model), settings)
        self._one = self._context(max(PREFILLS) + 1, 1, threads)
        self._many = self._context(CONTEXT + _DECODED, max(BATCHES), threads)

    def prefill(self, count: int) -> float:
        """See `Rival`."""
        self._clear(self._one)
        return self._run(self._one, [(0, _tokens(count), 0)])

    def start(self, batch: int) -> Probe:
        """See `Rival`. Choosing the next token, which the others' steps contain, is left out."""
        self._clear(self._many)
        for sequence in range(batch):
            self._run(self._many, [(sequence, _tokens(CONTEXT), 0)])
        position = CONTEXT

        def steps() -> float:
            nonlocal position
            took = 0.0
            for _ in range(STEPS):
                took += self._run(self._many, [(sequence, [1000], position) for sequence in range(batch)])
                position += 1
            return took / STEPS

        return steps

    def close(self) -> None:
        """Free its memory."""
        for context in (self._one, self._many):
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)

    def _context(self, length: int, sequences: int, threads: int) -> Any:
        settings = llama_cpp.llama_context_default_params()
        # It rounds a sequence's share up to this.
        settings.n_ctx = sequences * (-(-length // 256) * 256)
        settings.n_batch = max(PREFILLS)
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return llama_cpp.llama_init_from_model(self._model, settings)

    def _clear(self, context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def _run(self, context: Any, parts: Sequence[_Part]) -> float:
        """Seconds of one call over a ragged batch, with logits for the last token of each part."""
        batch = llama_cpp.llama_batch_init(sum(len(tokens) for _, tokens, _ in parts), 0, 1)
        for sequence, tokens, first in parts:
            for index, token in enumerate(tokens):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, first + index
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = index == len(tokens) - 1
                batch.n_tokens += 1

        def call() -> None:
            if code := llama_cpp.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode: {code}")
            llama_cpp.llama_synchronize(context)

        took = timed(call)
        llama_cpp.llama_batch_free(batch)
        return took


def _tokens(count: int) -> list[int]:
    return [random.randrange(1000, 40_000) for _ in range(count)]


def _silence() -> None:
    """It tells standard error all it does. Its log callback has to outlive it."""
    global _callback
    _callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(_callback, ctypes.c_void_p(0))


_callback: Any = None
