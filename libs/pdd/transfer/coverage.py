"""Which parts of a transfer have arrived. Pure bookkeeping; it holds no bytes."""

from __future__ import annotations

import numpy as np

from pdd.transfer.slices import Piece


class Coverage:
    """Arrived (token, layer) pairs of tokens `[first_token, end_token)`. Arriving twice counts once."""

    def __init__(self, first_token: int, end_token: int, num_layers: int) -> None:
        self.first_token = first_token
        self.end_token = end_token
        self.num_layers = num_layers
        self._missing = np.ones((end_token - first_token, num_layers), np.bool_)
        self._whole_tokens = 0

    def contains(self, piece: Piece) -> bool:
        """Whether `piece` is not empty and lies within the transfer."""
        return (
            self.first_token <= piece.first_token < piece.end_token <= self.end_token
            and 0 <= piece.first_layer < piece.end_layer <= self.num_layers
        )

    def add(self, piece: Piece) -> int:
        """Mark `piece` as arrived. Returns how many (token, layer) pairs of it are new."""
        first, end = piece.first_token - self.first_token, piece.end_token - self.first_token
        missing = self._missing[first:end, piece.first_layer : piece.end_layer]
        new = int(np.count_nonzero(missing))
        missing[:] = False
        while self._whole_tokens < len(self._missing) and not self._missing[self._whole_tokens].any():
            self._whole_tokens += 1
        return new

    @property
    def whole_tokens(self) -> int:
        """How many leading tokens have arrived in every layer."""
        return self._whole_tokens

    @property
    def complete(self) -> bool:
        """Whether everything has arrived."""
        return self._whole_tokens == len(self._missing)
