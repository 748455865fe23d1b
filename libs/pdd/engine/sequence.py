"""One sequence as the engine holds it: its tokens, how many of them are computed, and what it still wants.

There is no prefill phase and no decode phase: `num_computed` catches up with the known tokens, and once it has, the
next token is drawn. Owns a sequence's counts; the engine owns its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdd.kv import KvNamespace
from pdd.types import AttemptKey, FinishReason, Sampling, StopRule


@dataclass(frozen=True)
class SequenceSpec:
    """A sequence to run.

    `outputs` are output IDs that exist already. `blocks` hold the KV of the first `num_computed` tokens; the engine
    takes the references over and allocates what is missing on admission. The engine samples only while there are
    fewer than `sample_limit` outputs (None: `stop` alone decides); a sequence at its limit stays, without a seat.
    Its KV is cached under `namespace`, None: not at all.
    """

    key: AttemptKey
    prompt: list[int]
    outputs: list[int]
    sampling: Sampling
    stop: StopRule
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    sample_limit: int | None = None
    namespace: KvNamespace | None = None


class RunningSequence:
    """The changing state of one sequence. `tokens` is prompt + output."""

    def __init__(self, spec: SequenceSpec, arrival: int) -> None:
        """`arrival` counts up from one sequence to the next.

        Raises `ValueError` if no token is left to compute: the next one could not be drawn.
        """
        self.key = spec.key
        self.sampling = spec.sampling
        self.stop = spec.stop
        self.prompt_len = len(spec.prompt)
        self.tokens = [*spec.prompt, *spec.outputs]
        self.num_computed = spec.num_computed
        self.blocks = list(spec.blocks)
        self.sample_limit = spec.sample_limit
        self.namespace = spec.namespace
        self.arrival = arrival
        self.frozen = False
        self.preempted = False
        """Whether it waits because its blocks were taken."""
        self.finish: FinishReason | None = self.stop.check(spec.outputs) if spec.outputs else None
        if not 0 <= self.num_computed < len(self.tokens):
            raise ValueError(f"{self.num_computed} of {len(self.tokens)} tokens computed: at least one must be left")

    @property
    def outputs(self) -> list[int]:
        """All output IDs so far."""
        return self.tokens[self.prompt_len :]

    @property
    def may_sample(self) -> bool:
        """Whether a further token is wanted."""
        return self.finish is None and len(self.tokens) < self.final_len

    @property
    def uncomputed(self) -> int:
        """Tokens to compute now. The last known token is computed only to draw the next one: until then its KV is
        wanted by nobody, and computing it early would leave nothing to draw from."""
        if self.frozen:
            return 0
        return len(self.tokens) - self.num_computed - (0 if self.may_sample else 1)

    @property
    def final_len(self) -> int:
        """How long prompt + output can get."""
        return self.final_len_under(self.sample_limit)

    def final_len_under(self, sample_limit: int | None) -> int:
        """How long prompt + output could get under another limit."""
        return max(self.prompt_len + _most_outputs(self.stop, sample_limit), len(self.tokens))

    def reset(self) -> None:
        """Its blocks are gone: all tokens are to be computed again, save those whose KV is found cached."""
        self.num_computed, self.blocks, self.preempted = 0, [], True

    def append(self, ids: Sequence[int]) -> FinishReason | None:
        """Take further output IDs in and say whether they end the answer."""
        self.tokens.extend(ids)
        self.finish = self.stop.check(self.outputs)
        return self.finish


def _most_outputs(stop: StopRule, sample_limit: int | None) -> int:
    return stop.max_tokens if sample_limit is None else min(stop.max_tokens, sample_limit)
