"""Incremental detokenising of one answer.

Owns the tokens whose text is not complete yet. Never shows half a character, never takes back or repeats what it
has shown, never raises on odd token sequences.
"""

from __future__ import annotations

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNFINISHED = 3
"""A UTF-8 character is at most four bytes, so at most three bytes wait for their last one."""
_TRIM_EVERY = 32


class Detokenizer:
    """Decodes one answer token by token, at a cost linear in its length.

    The joined text equals the one-shot decode (special tokens skipped). The one exception is invalid bytes next to
    valid ones under SentencePiece's byte fallback, whose one-shot decode gives up the valid ones as well.

    Only a short window of tokens is decoded each time: those that wait for a complete character, after those of the
    last complete text (decoders treat the beginning of a text differently). `tokenizers.decoders.DecodeStream` works
    so too, but raises on some sequences, cannot be flushed, and decodes a run of invalid bytes in quadratic time.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        self._window: list[int] = []
        self._context = 0
        """Leading tokens of the window whose text was complete when the others came."""
        self._shown = 0
        """Characters of the window's text that have been returned."""

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now complete (may be empty)."""
        if token in self._special or self._backend.id_to_token(token) is None:
            return ""
        self._window.append(token)
        text = self._backend.decode(self._window)
        trailing = len(text) - len(text.rstrip(_REPLACEMENT))
        if trailing and len(self._window) - self._context <= _MAX_UNFINISHED:
            return ""
        end = len(text) - min(trailing, _MAX_UNFINISHED)
        delta = text[self._shown : end]
        self._shown = max(self._shown, end)
        if not trailing and delta:
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._shown = len(self._backend.decode(self._window))
        elif len(self._window) % _TRIM_EVERY == 0:
            self._trim(text)
        return delta

    def flush(self) -> str:
        """Return the unfinished tail (as replacement characters) at the end of the answer."""
        tail = self._backend.decode(self._window)[self._shown :]
        self._shown += len(tail)
        return tail

    def _trim(self, text: str) -> None:
        """Drop leading tokens that were returned and that the rest of the window decodes the same without."""
        for cut in range(len(self._window) - _MAX_UNFINISHED, 0, -1):
            left = self._backend.decode(self._window[:cut])
            if len(left) <= self._shown and left + self._backend.decode(self._window[cut:]) == text:
                self._window = self._window[cut:]
                self._shown -= len(left)
                self._context = 0
                return
