"""The engine: sequences, their blocks, and the step that lets computed tokens catch up with known ones.

Synchronous and single-threaded; knows no network. Prefill, extend and decode are the same operation with different
query lengths; stages differ in what they give it to do. A sequence's blocks are freed in one place only: `release`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pdd.attention.interface import AttentionBackend, AttentionBatch, SequenceSlice
from pdd.engine.block_pool import BlockPool
from pdd.engine.sampler import sample
from pdd.engine.scheduler import Chunk, Pending, StepPlan, schedule
from pdd.errors import TooLargeError
from pdd.model.llama import Llama
from pdd.types import AttemptKey, FinishReason, Sampling, StopRule


@dataclass(frozen=True)
class SequenceSpec:
    """A sequence to run.

    `outputs` were emitted elsewhere. `blocks` hold KV of the first `num_computed` tokens; the engine takes over the
    references, and allocates what is missing on admission. It samples while there are fewer than `sample_limit`
    outputs; a sequence at its limit stays, and computes no further.
    """

    key: AttemptKey
    prompt: list[int]
    outputs: list[int]
    sampling: Sampling
    stop: StopRule
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    sample_limit: int | None = None

    @property
    def most_outputs(self) -> int:
        """How many outputs there can be at most."""
        if self.sample_limit is None:
            return self.stop.max_tokens
        return min(self.stop.max_tokens, self.sample_limit)


@dataclass(frozen=True)
class SequenceUpdate:
    """What a step did to one sequence. `new_tokens` begin at `first_position` (index in prompt + output)."""

    key: AttemptKey
    num_computed: int
    first_position: int
    new_tokens: list[int]
    finish: FinishReason | None


@dataclass(frozen=True)
class StepResult:
    """What a step did, and its figures. `duration_s` is the real compute, without pacing."""

    updates: tuple[SequenceUpdate, ...]
    duration_s: float
    scheduled_tokens: int
    decodes: int


@dataclass(frozen=True)
class EngineStatus:
    """Counts, now and since the start. `prompt_tokens_computed` are prompt positions that went through a forward
    pass: on a stage that receives KV it stays zero."""

    running: int
    waiting: int
    seats: int
    step_tokens: int
    free_blocks: int
    total_blocks: int
    steps: int
    prompt_tokens_computed: int
    output_tokens: int


@dataclass
class _Sequence:
    spec: SequenceSpec
    tokens: list[int]
    num_computed: int
    blocks: list[int]
    frozen: bool = False
    finish: FinishReason | None = None

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.spec.prompt) :]

    @property
    def uncomputed(self) -> int:
        """Tokens to compute now. At its limit a sequence leaves its last token, which only sampling would need."""
        if self.frozen or self.finish is not None:
            return 0
        at_limit = len(self.tokens) - len(self.spec.prompt) >= self.spec.most_outputs
        return len(self.tokens) - self.num_computed - (1 if at_limit else 0)


class Engine:
    """See the module. `step_tokens` is the token budget of a step, `seats` how many sequences run at once."""

    def __init__(
        self,
        model: Llama,
        attention: AttentionBackend,
        blocks: BlockPool,
        *,
        block_size: int,
        step_tokens: int,
        seats: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.blocks = blocks
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._seats = seats
        self._now = now
        self._waiting: dict[AttemptKey, _Sequence] = {}
        self._running: dict[AttemptKey, _Sequence] = {}
        self._steps = 0
        self._prompt_tokens_computed = 0
        self._output_tokens = 0

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence. Raises `TooLargeError`, taking nothing over, if the pool can never hold it."""
        tokens = [*spec.prompt, *spec.outputs]
        if not spec.num_computed < len(tokens):
            raise ValueError("at least one token must be left to compute")
        if self._blocks_needed(spec) > self.blocks.total_blocks:
            raise TooLargeError(
                f"{len(tokens)} tokens and their answer need {self._blocks_needed(spec)} KV blocks, "
                f"there are {self.blocks.total_blocks}"
            )
        self._waiting[spec.key] = _Sequence(spec, tokens, spec.num_computed, list(spec.blocks))

    def freeze(self, key: AttemptKey) -> None:
        """Compute nothing more of a sequence until `thaw`. Unknown keys are ignored: it may just have been released."""
        sequence = self._find(key)
        if sequence is not None:
            sequence.frozen = True

    def thaw(self, key: AttemptKey) -> None:
        """Go on with a frozen sequence."""
        sequence = self._find(key)
        if sequence is not None:
            sequence.frozen = False

    def release(self, key: AttemptKey) -> None:
        """Forget a sequence and drop its references to blocks. Unknown keys are ignored."""
        sequence = self._waiting.pop(key, None) or self._running.pop(key, None)
        if sequence is not None:
            self.blocks.decref(sequence.blocks)

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        if any(sequence.uncomputed for sequence in self._running.values()):
            return True
        return bool(self._plan().chunks)

    def status(self) -> EngineStatus:
        """Counts; may be read from another thread, then each is right but not all of the same instant."""
        return EngineStatus(
            running=len(self._running),
            waiting=len(self._waiting),
            seats=self._seats,
            step_tokens=self._step_tokens,
            free_blocks=self.blocks.free_blocks,
            total_blocks=self.blocks.total_blocks,
            steps=self._steps,
            prompt_tokens_computed=self._prompt_tokens_computed,
            output_tokens=self._output_tokens,
        )

    def step(self) -> StepResult:
        """Plan, compute one ragged batch, sample, update."""
        started = self._now()
        plan = self._plan()
        for key in plan.admitted:
            self._admit(key)
        batch = [(self._running[chunk.key], chunk) for chunk in plan.chunks]
        sampled = self._forward(batch) if batch else {}
        updates = tuple(self._update(sequence, chunk, sampled.get(chunk.key)) for sequence, chunk in batch)
        self._steps += 1
        return StepResult(
            updates=updates,
            duration_s=self._now() - started,
            scheduled_tokens=sum(chunk.tokens for chunk in plan.chunks),
            decodes=sum(chunk.tokens == 1 for chunk in plan.chunks),
        )

    def _plan(self) -> StepPlan:
        running = [Pending(key, sequence.uncomputed) for key, sequence in self._running.items()]
        waiting = [
            Pending(key, sequence.uncomputed, self._blocks_needed(sequence.spec) - len(sequence.blocks))
            for key, sequence in self._waiting.items()
        ]
        return schedule(
            running,
            waiting,
            budget=self._step_tokens,
            free_seats=self._seats - sum(sequence.finish is None for sequence in self._running.values()),
            free_blocks=self.blocks.free_blocks,
        )

    def _admit(self, key: AttemptKey) -> None:
        sequence = self._waiting[key]
        missing = self._blocks_needed(sequence.spec) - len(sequence.blocks)
        sequence.blocks.extend(self.blocks.allocate(max(missing, 0)))
        self._running[key] = self._waiting.pop(key)

    def _forward(self, batch: list[tuple[_Sequence, Chunk]]) -> dict[AttemptKey, int]:
        """Run the batch; next tokens of those sequences whose last known token was computed."""
        tokens: list[int] = []
        positions: list[int] = []
        slices: list[SequenceSlice] = []
        sampling: list[_Sequence] = []
        rows: list[int] = []
        for sequence, chunk in batch:
            end = sequence.num_computed + chunk.tokens
            tokens.extend(sequence.tokens[sequence.num_computed : end])
            positions.extend(range(sequence.num_computed, end))
            slices.append(SequenceSlice(chunk.tokens, end, sequence.blocks))
            if end == len(sequence.tokens):
                sampling.append(sequence)
                rows.append(len(tokens) - 1)
        self._attention.plan(AttentionBatch(slices))
        logits = self._model.forward(
            torch.tensor(tokens), torch.tensor(positions), self._attention, torch.tensor(rows, dtype=torch.int64)
        )
        drawn = sample(logits, [s.spec.sampling for s in sampling], [len(s.tokens) for s in sampling]) if rows else []
        return {sequence.spec.key: token for sequence, token in zip(sampling, drawn, strict=True)}

    def _update(self, sequence: _Sequence, chunk: Chunk, token: int | None) -> SequenceUpdate:
        prompt_tokens = len(sequence.spec.prompt)
        before = sequence.num_computed
        sequence.num_computed += chunk.tokens
        self._prompt_tokens_computed += max(min(sequence.num_computed, prompt_tokens) - before, 0)
        first_position = len(sequence.tokens)
        new_tokens: list[int] = []
        if token is not None:
            new_tokens.append(token)
            sequence.tokens.append(token)
            sequence.finish = sequence.spec.stop.check(sequence.outputs)
            self._output_tokens += 1
        return SequenceUpdate(sequence.spec.key, sequence.num_computed, first_position, new_tokens, sequence.finish)

    def _blocks_needed(self, spec: SequenceSpec) -> int:
        most = len(spec.prompt) + max(spec.most_outputs, len(spec.outputs))
        return -(-most // self._block_size)

    def _find(self, key: AttemptKey) -> _Sequence | None:
        return self._running.get(key) or self._waiting.get(key)


def generate(engine: Engine, spec: SequenceSpec) -> list[int]:
    """Run one sequence alone to its end; its output IDs, those of the spec included."""
    engine.add(spec)
    outputs = list(spec.outputs)
    while engine.has_work():
        for update in engine.step().updates:
            outputs.extend(update.new_tokens)
    engine.release(spec.key)
    return outputs
