"""Stop strings: find them across token borders and never show any part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for `stops` in a text that comes in pieces.

    Text that may be the beginning of a stop string is held back: at most `max(len(stop)) - 1` characters. The stop
    string that is complete first wins, so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held: str = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take the next piece; return what may be shown. Sets `found` (and then returns what stood before it)."""
        text = self._held + text
        self._held = ""
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found = True
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
