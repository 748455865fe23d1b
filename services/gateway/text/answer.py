"""The text of one answer: tokens in, showable text out, and the reason why it ended."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from pdd.types import FinishReason
from services.gateway.generation import Emission
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings


class AnswerText:
    """Follows the emissions of one request.

    `finish` is set once the answer has ended: by the emission's own reason, or by a stop string. `ids` are the output
    tokens up to the one that ended it (a stop token is among them; its text is not shown).
    """

    def __init__(self, backend: tokenizers.Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(backend)
        self._stops = StopStrings(stops)
        self.ids: list[int] = []
        self.finish: FinishReason | None = None

    def push(self, emission: Emission) -> str:
        """Take the next emission; return the text that may be shown (may be empty). Not to be called after `finish`."""
        shown: list[str] = []
        silent = len(emission.tokens) if emission.finish is FinishReason.STOP else None
        for index, token in enumerate(emission.tokens, start=1):
            self.ids.append(token)
            if index != silent:
                shown.append(self._stops.push(self._detokenizer.push(token)))
            if self._stops.found:
                self.finish = FinishReason.STOP
                return "".join(shown)
        if emission.finish is not None:
            self.finish = emission.finish
            shown.append(self._stops.push(self._detokenizer.flush()))
            if self._stops.found:
                self.finish = FinishReason.STOP
            else:
                shown.append(self._stops.flush())
        return "".join(shown)
